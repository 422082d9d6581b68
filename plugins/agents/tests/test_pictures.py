"""Episodes that show pictures: rows are compared with what the chat template itself writes, expanded."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from corerl.data import Prompt
from corerl.engines import GenerateRequest, Generation
from corerl.models import load_tokenizer
from corerl.pictures import FoundPicture
from corerl.rollout import Rollout, expand
from corerl.types import PICTURE, offsets_of
from corerl_agents.episodes import Episode
from corerl_agents.pictures import with_pictures
from plugins.agents.tests.oracle import PARAMS, Play
from tests.tiny_pictures import TinyOptions, TinyReader

# <pad> <bos> <eos> <unk> 0 = 4, the placeholder * = 5, the break | = 6, the end ! = 7
TOKENIZER = load_tokenizer(tokenizer="characters:0*|!123456789>uat:;", path="")
TOKENIZER.chat_template = (
    "{% for m in messages %}{{ m.role[0] }}:{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ '*' if part.type == 'image' else part.text }}{% endfor %}{% endif %}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
LONG = evolve(PARAMS, max_tokens=60, stop_tokens=(2, 5))
TEXT = {"type": "text", "text": "9"}
IMAGE = {"type": "image"}


@pytest.fixture
def reader() -> TinyReader:
    return TinyReader(TinyOptions(), None, TOKENIZER)


@pytest.fixture
def shown(play: Play, reader: TinyReader) -> Play:
    """One episode with these pictures in its prompt."""

    def played(function: Any, generate: Any, *references: str) -> Rollout:
        prompts = [asked(reader, *references)]
        known = {"params": LONG, "tokenizer": TOKENIZER, "pictures": reader, "samples": 1}
        return play(function, prompts=prompts, generate=generate, **known)

    return played


def asked(reader: TinyReader, *references: str) -> Prompt:
    """A chat that shows these, with text before each."""
    content = [part for _ in references for part in (TEXT, IMAGE)]
    pictures = tuple(FoundPicture(reader=reader, reference=each) for each in references)
    message = {"role": "user", "content": content or "9"}
    return Prompt(index=0, text="9", answer="", messages=(message,), pictures=pictures)


def answering(requests: list[GenerateRequest], *answers: str) -> Callable[[GenerateRequest], Generation]:
    """An engine of these answers, the same for every row of a request."""
    said = itertools.cycle([TOKENIZER.encode(each, add_special_tokens=False) for each in answers])

    def generate(request: GenerateRequest) -> Generation:
        requests.append(request)
        tokens, count = next(said), len(request)
        return Generation(
            tokens=np.array(tokens * count),
            offsets=offsets_of([len(tokens)] * count),
            logprobs=np.full(len(tokens) * count, -0.5, np.float32),
            versions=np.zeros(len(tokens) * count, np.int64),
            truncated=np.zeros(count, np.bool_),
            unfinished=np.zeros(count, np.bool_),
        )

    return generate


def rendered(reader: TinyReader, messages: Sequence[Any], references: Sequence[str]) -> tuple[list[int], list[str]]:
    """What the template writes for the whole conversation, expanded: tokens, and the id of what each stands for."""
    text = TOKENIZER.apply_chat_template(list(messages), tokenize=False)
    pictures = [reader.read(each) for each in references]
    tokens, column = expand(TOKENIZER.encode(text, add_special_tokens=False), pictures, reader)
    return tokens.tolist(), [pictures[number - 1].id if number else "" for number in column]


def test_rows_with_tools_pictures_equal_the_templates_own_rendering(shown: Play, reader: TinyReader) -> None:
    requests: list[GenerateRequest] = []
    said: list[Any] = []

    def use_tool(episode: Episode) -> float:
        messages = episode.messages
        messages.append(episode.chat(messages, max_tokens=5)["message"])
        shot = [TEXT, episode.picture(b"3x2:7"), episode.picture(b"2x2:1")]
        messages += [{"role": "tool", "content": shot}, {"role": "user", "content": "8"}]
        said[:] = [*messages, episode.chat(messages)["message"]]
        return 1.0

    rollout = shown(use_tool, answering(requests, "34<eos>", "5<eos>"), "2x2:1")
    assert rollout.outcomes == [1.0]
    plain = [
        {**message, "content": [part if part["type"] == "text" else IMAGE for part in message["content"]]}
        if isinstance(message["content"], list)
        else message
        for message in said
    ]
    tokens, shown = rendered(reader, plain, ["2x2:1", "3x2:7", "2x2:1"])
    batch = rollout.batch
    assert batch.tokens.tolist() == tokens
    ids = ["", *(picture.id for picture in batch.pictures)]
    assert [ids[number] for number in batch.columns[PICTURE]] == shown
    assert len(batch.pictures) == 2 and reader.decoded == {"2x2:1": 1, "3x2:7": 1}
    assert TOKENIZER.decode(batch.tokens[batch.columns["loss_mask"]]) == "34<eos>5<eos>"
    before = requests[1]  # what the engine was shown before the second answer
    assert before.tokens.tolist() == tokens[: len(before.tokens)] and len(before.pictures) == 2


def test_the_same_words_about_other_pictures_are_another_row(shown: Play) -> None:
    def two_rows(episode: Episode) -> None:
        for content in (b"1x1:1", b"1x1:2"):
            messages = [{"role": "user", "content": [episode.picture(content)]}]
            messages.append(episode.chat(messages, max_tokens=4)["message"])
            episode.chat([*messages, {"role": "user", "content": "8"}], max_tokens=4)

    rollout = shown(two_rows, answering([], "3<eos>"))
    assert rollout.batch.row_columns["turns"].tolist() == [2, 2]
    shades = [int(rollout.batch.take_rows(np.array([row])).pictures[0].pixels[0, 0, 0]) for row in (0, 1)]
    assert sorted(shades) == [1, 2]


def test_messages_that_are_left_out_take_their_pictures_along(shown: Play) -> None:
    def last_alone(episode: Episode) -> None:
        (message,) = episode.messages
        episode.chat([{**message, "content": message["content"][-1:]}])

    requests: list[GenerateRequest] = []
    shown(last_alone, answering(requests, "3<eos>"), "1x1:1", "1x1:2")
    assert [int(picture.pixels[0, 0, 0]) for picture in requests[0].pictures] == [2]


def test_pictures_count_against_limits(shown: Play) -> None:
    answers: list[Any] = []

    def screenshot(episode: Episode) -> None:
        messages = episode.messages
        messages.append(episode.chat(messages, max_tokens=4)["message"])
        messages.append({"role": "tool", "content": [episode.picture(b"9x9:1")]})
        answers.append(episode.chat(messages))

    rollout = shown(screenshot, answering([], "3<eos>"))
    assert answers[0]["finish_reason"] == "length" and answers[0]["message"]["content"] == ""
    assert rollout.batch.row_columns["truncated"].tolist() == [True] and rollout.batch.pictures == ()


def test_a_conversation_is_over_when_a_placeholder_was_sampled(shown: Play) -> None:
    reasons: list[str] = []

    def going_on(episode: Episode) -> None:
        messages = episode.messages
        for _ in range(2):
            answer = episode.chat(messages)
            reasons.append(answer["finish_reason"])
            messages += [answer["message"], {"role": "user", "content": "8"}]

    requests: list[GenerateRequest] = []
    rollout = shown(going_on, answering(requests, "3*"))
    assert (reasons, len(requests)) == (["length", "length"], 1)
    assert rollout.batch.row_columns["truncated"].tolist() == [True] and rollout.texts == ["3"]
    assert PICTURE not in rollout.batch.columns


def test_a_client_cannot_name_a_path_beside_a_data_url(reader: TinyReader, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    find = reader.find
    monkeypatch.setattr(reader, "find", lambda row, prompt, root: asked.append(prompt) or find(row, prompt, root=root))
    sent = Episode.picture(b"1x1:3")
    shown = with_pictures([{"role": "user", "content": [{**sent, "image": "private.png"}]}], reader, ())
    assert asked == [[{"role": "user", "content": [sent]}]] and len(shown.pictures) == 1


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ([{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}], "has the picture .* no data: URL; send"),
        ([{"type": "image_url", "image_url": {"url": "https://a.b/c.png"}}], "has the picture .* no data: URL; send"),
        ([IMAGE, IMAGE], "one more part {'type': 'image'} than the prompt has pictures, 1"),
        ([{**IMAGE, "index": 1}], "has the picture of index 1, but the prompt has 1; send"),
        ([Episode.picture(b"1x1:broken")], "the picture 1x1:broken ends early"),
        ("3*", "0 pictures, but the prompt has the token that stands for one 1 times"),
    ],
)
def test_pictures_that_cannot_be_shown_are_refused(shown: Play, content: Any, why: str) -> None:
    def refused(episode: Episode) -> None:
        with pytest.raises(RuntimeError, match=f"^messages.*{why}"):
            episode.chat([{"role": "user", "content": content}])

    rollout = shown(refused, answering([], "3<eos>"), "1x1:1")
    assert rollout.outcomes[0].kind == "silent"  # no assertion of the function has failed
    assert rollout.batch.pictures[0].size == (1, 1)  # the bare prompt's
