"""Episodes that are more than one conversation: rows are compared with what the engine was asked and what it drew."""

from __future__ import annotations

import asyncio
import functools
import json
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from attrs import evolve

from corerl.config import ModelConfig, RolloutConfig
from corerl.engines import GenerateRequest, Generation
from corerl.models import load_tokenizer
from corerl.rollout import Rollout, ScoredRollout
from corerl_agents.config import EpisodesConfig
from corerl_agents.episodes import Episode, EpisodeFunction
from corerl_agents.script import scripted
from corerl_testing import exact_fraction, read_rollout, write_rollout
from plugins.agents.tests.clients import connected, post
from plugins.agents.tests.oracle import PARAMS, PROMPTS, TOKENIZER, Fails, Oracle, Play, assert_equal, parts_of
from tests.end_to_end.command import metrics
from tests.in_process import execute_here, small
from tests.machine import paced

ONE = PROMPTS[:1]
LONG = evolve(PARAMS, max_tokens=40)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def asking(episode: Episode, messages: list[Any], text: str, **parameters: Any) -> list[Any]:
    """The messages with this one and its answer."""
    asked = [*messages, user(text)]
    return [*asked, episode.chat(asked, **{"max_tokens": 4, **parameters})["message"]]


class Recorded(Oracle):
    """Remembers each row that it was asked for, and what was drawn for it."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[tuple[list[int], list[int], int]] = []  # tokens before, tokens drawn, noise key

    def __call__(self, request: GenerateRequest) -> Generation:
        drawn = super().__call__(request)
        answers = np.split(drawn.tokens, drawn.offsets[1:-1])
        for before, said, key in zip(request.by_row(), answers, request.noise_keys, strict=True):
            self.said.append((before.tolist(), said.tolist(), int(key)))
        return drawn


def assert_trained_once(rollout: Rollout, recorded: Recorded) -> None:
    """Each answer of the engine is trained on in one place, behind the tokens that it was drawn behind."""
    batch, found = rollout.batch, []
    for row, parts in enumerate(parts_of(rollout)):
        before: list[int] = []
        for tokens, trained in parts:
            found += [(before, tokens)] if trained else []
            before = before + tokens
        assert batch.row_columns["turns"][row] == sum(trained for _, trained in parts)
    assert sorted(found) == sorted((before, said) for before, said, _ in recorded.said)
    sampled = batch.columns["loss_mask"]
    np.testing.assert_array_equal(batch.columns["rollout_logprobs"], np.where(sampled, -batch.tokens, 0))
    np.testing.assert_array_equal(batch.columns["versions"], np.where(sampled, 3, 0))


def texts(rollout: Rollout) -> list[str]:
    """Of each row, with what is trained on in brackets."""
    rows = [
        [(TOKENIZER.decode(tokens, skip_special_tokens=True), trained) for tokens, trained in parts]
        for parts in parts_of(rollout)
    ]
    return ["".join(f"[{text}]" if trained else text for text, trained in row) for row in rows]


def said_in(rollout: Rollout) -> list[str]:
    return [text.replace("[", "").replace("]", "") for text in texts(rollout)]


# ---- one request after the other -------------------------------------------------------------------------------------


def test_a_summarized_conversation_continues_in_its_own_row(play: Play) -> None:
    def summarizing(episode: Episode, *, goes_on: bool = True) -> float:
        said = asking(episode, asking(episode, [], "21>"), "9>")
        if goes_on:
            asking(episode, asking(episode, [], f"1{said[1]['content']}1>"), "8>")
        return 2.0

    recorded, until_then = Recorded(), Recorded()
    rollout = play(summarizing, generate=recorded, samples=2, params=LONG)
    assert rollout.outcomes == [2.0] * 8
    assert_trained_once(rollout, recorded)
    rows = rollout.batch.row_columns
    assert {name: rows[name].tolist() for name in ("group", "sample", "episode", "turns", "final")} == {
        "group": [0] * 4 + [1] * 4,
        "sample": [0, 0, 1, 1] * 2,
        "episode": [0, 0, 1, 1, 2, 2, 3, 3],
        "turns": [2] * 8,
        "final": [False, True] * 4,
    }
    # Until then it is the episode that does not go on, and what follows has noise of its own.
    alone = play(lambda episode: summarizing(episode, goes_on=False), generate=until_then, samples=2, params=LONG)
    assert texts(alone) == texts(rollout)[::2] and alone.texts == rollout.texts[::2]
    keys, before = ({key for _, _, key in each.said} for each in (recorded, until_then))
    assert len(before) == 4 and before < keys and len(keys) == 8
    for row in (1, 3, 5, 7):  # the summary is written whole
        begin = texts(rollout)[row].partition("[")[0]
        assert begin.startswith("1") and rows["prompt_length"][row] == len(TOKENIZER.encode(begin))


def test_what_rows_share_is_trained_on_in_the_first(play: Play) -> None:
    def going_back(episode: Episode) -> None:
        shared = asking(episode, [], "21>")
        first = asking(episode, shared, "9>")
        asking(episode, shared, "77>")
        asking(episode, shared, "9>")  # the same once more is another sample
        asking(episode, first, "3>")

    recorded = Recorded()
    rollout = play(going_back, generate=recorded, samples=3, prompts=ONE, params=LONG)
    assert_trained_once(rollout, recorded)
    assert rollout.batch.row_columns["turns"].tolist() == [3, 1, 1] * 3
    assert rollout.batch.row_columns["final"].tolist() == [True, False, False] * 3
    assert len({key for _, _, key in recorded.said}) == 9  # of each episode its own, and of each branch
    for first in (0, 3, 6):
        rows = [rollout.batch.take_rows(np.array([row])) for row in range(first, first + 3)]
        shared = np.flatnonzero(np.diff(rows[0].columns["loss_mask"]))[1] + 1  # the first answer's end
        assert len({tuple(row.tokens[:shared].tolist()) for row in rows}) == 1
        assert [bool(row.columns["loss_mask"][:shared].any()) for row in rows] == [True, False, False]


def test_a_changed_answer_begins_a_row_and_a_note(play: Play, capsys: pytest.CaptureFixture[str]) -> None:
    def stripping(episode: Episode) -> None:
        first = asking(episode, [], "21>")
        first[1] = {**first[1], "content": "5"}  # what the policy has thought is left out, say
        second = asking(episode, first, "9>")
        asking(episode, second, "8>")

    recorded = Recorded()
    rollout = play(stripping, generate=recorded, samples=4, prompts=ONE)
    assert_trained_once(rollout, recorded)
    assert [text.partition("[")[0] for text in texts(rollout)] == ["21>", "21>59>"] * 4
    assert rollout.batch.row_columns["turns"].tolist() == [1, 2] * 4
    told = "corerl: note: an answer came back changed, so the request begins another row of its episode: messages[1].co"
    assert capsys.readouterr().err.count(told) == 1


def test_other_tools_or_template_arguments_begin_a_row(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tokenizer="characters:0123456789>uabt:;?", path="")
    tokenizer.chat_template = (
        "{% if brief %}b{% endif %}{% for tool in tools or [] %}t{% endfor %}"
        "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}<eos>;{% endfor %}a:"
    )
    tokenizer.save_pretrained(tmp_path)
    tools = [{"type": "function", "function": {"name": "add"}}]
    model, rollout = ModelConfig(path=str(tmp_path)), RolloutConfig(max_tokens=99)
    with scripted(ONE[0], ["1", "2", "3", "4", "5"], model=model, rollout=rollout) as script:
        messages = asking(script.episode, [], "5")
        for other in ({}, {"tools": tools}, {"chat_template_kwargs": {"brief": True}}):
            asking(script.episode, messages, "6", **other)
        asking(script.episode, [*messages, user("6"), {"role": "assistant", "content": "3"}], "7", tools=tools)
        assert script.text == "5"
    assert sorted("".join(text for text, _ in row) for row in script.rows) == [
        "bu:5<eos>;a:1<eos>;u:6<eos>;a:4<eos>",
        "tu:5<eos>;a:1<eos>;u:6<eos>;a:3<eos>;u:7<eos>;a:5<eos>",
        "u:5<eos>;a:1<eos>;u:6<eos>;a:2<eos>",
    ]


def test_max_rows_bounds_the_rows_of_an_episode(play: Play) -> None:
    told: list[str] = []

    def many(episode: Episode) -> None:
        shared = asking(episode, [], "21>")
        for messages, text in (([], "5>"), (shared, "9>"), (shared, "9>"), (shared[:1], "1>")):
            try:
                asking(episode, messages, text)
            except RuntimeError as error:
                told.append(str(error))

    rollout = play(many, samples=1, prompts=ONE, max_rows=1)
    begins = "; this would begin one more row than samplers.episodes.max_rows=1; append messages to those of an answer "
    assert all(begins in each for each in told)
    reasons = [each.split(begins)[0] for each in told]
    assert reasons[:2] == [
        "messages[0].content: got '5>', but the episode has '21>' there",
        "messages: got 3, but the episode already has 4, including its last answer",
    ]
    assert len(reasons) == 3 and reasons[2].startswith("messages[1].content: got '1>', but the episode has ")
    assert len(rollout.batch) == 1 and rollout.outcomes == [None]
    told.clear()
    assert len(play(many, samples=1, prompts=ONE, max_rows=3).batch) == 3 and len(told) == 1


class Mine(EpisodeFunction):
    section = "samplers.mine.episodes"


def test_a_refusal_names_the_section_of_the_samplers_own_config(failure: Fails) -> None:
    def changes(episode: Episode) -> None:
        asking(episode, [], "21>")
        asking(episode, [], "5>")

    refused = failure(Mine(name="mine", function=changes), max_rows=1).message
    assert "one more row than samplers.mine.episodes.max_rows=1; append" in refused
    late = failure(Mine(name="mine", function=lambda episode: time.sleep(1)), timeout=0.1).message
    assert "took longer than samplers.mine.episodes.timeout=0.1 seconds" in late


def unreadable(text: str, tools: list[Any]) -> Any:
    raise KeyError("name")


def test_an_answer_that_cannot_be_read_takes_no_row() -> None:
    options = EpisodesConfig(tool_calls=f"{__name__}:unreadable", max_rows=1)
    with scripted(ONE[0], ["1", "2"], options=options) as script:
        with pytest.raises(RuntimeError, match="KeyError: 'name'"):
            asking(script.episode, [], "5>", tools=[{"type": "function", "function": {"name": "add"}}])
        asking(script.episode, [], "5>")
        assert script.rows == [[("user: 5><|end|>\nassistant: ", False), ("2<|end|>", True)]]


# ---- requests side by side -------------------------------------------------------------------------------------------


def test_concurrent_requests_give_the_same_rows_in_any_order(play: Play) -> None:
    orders: list[list[str]] = []

    async def side_by_side(episode: Episode) -> float:
        came: list[str] = []
        orders.append(came)

        async def chat(messages: list[Any]) -> list[Any]:
            await asyncio.sleep(0.02 * random.SystemRandom().random())
            came.append(messages[-1]["content"])
            ask = functools.partial(episode.chat, messages, max_tokens=4)
            choice = await asyncio.get_running_loop().run_in_executor(threads, ask)
            return [*messages, choice["message"]]

        shared = await chat([user("21>")])
        ends = await asyncio.gather(
            *(chat([*shared, user("9>")]) for _ in range(3)),  # best of three
            *(chat([*shared, user(text)]) for text in ("1>", "2>")),
            *(chat([user(text)]) for text in ("3>", "4>", "5>")),  # agents of its own
        )
        await asyncio.gather(*(chat([*end, user("7>")]) for end in ends[3:]))
        return 1.0

    def played() -> Rollout:
        recorded, came = Recorded(), Came(1, 8, 5)

        def generate(request: GenerateRequest) -> Generation:
            came.wait()
            return recorded(request)

        rollout = play(side_by_side, generate=generate, samples=1, prompts=ONE, params=LONG, calls=64)
        assert_trained_once(rollout, recorded)
        return rollout

    with ThreadPoolExecutor(8) as threads:
        first, second = played(), played()
        while orders[0] == orders[-1]:  # seldom
            second = played()
    assert first.outcomes == [1.0] * 8 and first.batch.row_columns["episode"].tolist() == [0] * 8
    assert sorted(first.batch.row_columns["turns"].tolist()) == [1] * 2 + [2] * 5 + [2]
    assert_equal(second, first)
    assert len(set(said_in(first))) == 8  # the three are three samples


class Came:
    """Lets requests pass once all of their wave have come, so that none is answered before another one comes."""

    def __init__(self, *waves: int) -> None:
        self.ends = np.cumsum(waves).tolist()
        self.came = 0
        self.changed = threading.Condition()

    def wait(self) -> None:
        with self.changed:
            self.came += 1
            end = next(end for end in self.ends if end >= self.came)
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: self.came >= end, timeout=paced(20))


def ask_and_leave(episode: Episode, asked: threading.Event, message: dict[str, Any]) -> None:
    """Close the connection once the engine was `asked`."""
    asked.clear()
    connection, path = connected(episode.base_url), f"{urlsplit(episode.base_url).path}/chat/completions"
    connection.request("POST", path, json.dumps({"messages": [message], "max_tokens": 4}))
    assert asked.wait(20)
    connection.close()
    for _ in range(2):  # once these are answered, the server has seen that
        assert post(f"{episode.base_url}/models", None, "GET")[0] == 200


def test_a_repeated_request_gets_the_first_answer(play: Play) -> None:
    asked, release = threading.Event(), threading.Event()
    recorded = Recorded()

    def slow(request: GenerateRequest) -> Generation:
        asked.set()
        assert release.wait(20)
        return recorded(request)

    def impatient(episode: Episode) -> float:
        ask_and_leave(episode, asked, user("21>"))
        with ThreadPoolExecutor(1) as threads:
            again = threads.submit(asking, episode, [], "21>")
            release.set()
            first = again.result()
        second = asking(episode, first, "9>")
        release.clear()
        ask_and_leave(episode, asked, user("5>"))  # for good: nobody hears the answer
        release.set()
        asking(episode, second, "8>")
        return 1.0

    rollout = play(impatient, samples=1, prompts=ONE, generate=slow, params=LONG, calls=8)
    assert rollout.outcomes == [1.0]
    deadline = time.monotonic() + paced(20)
    while len(recorded.said) < 4 and time.monotonic() < deadline:  # the answer that nobody hears may come last
        time.sleep(0.01)
    assert rollout.batch.row_columns["turns"].tolist() == [3] and len(recorded.said) == 4
    del recorded.said[[before for before, _, _ in recorded.said].index(TOKENIZER.encode("5>"))]
    assert_trained_once(rollout, recorded)


# ---- what rows are worth ---------------------------------------------------------------------------------------------


def test_rows_of_an_episode_stay_together_everywhere(play: Play, tmp_path: Path) -> None:
    def some(episode: Episode) -> None:
        for begin in ("21>", "5>", "7>")[: 1 + episode.prompt.index % 3]:
            asking(episode, [], begin)

    prompts = [evolve(PROMPTS[0], index=index, answer="12") for index in range(3)]
    rollout = play(some, samples=2, prompts=prompts)
    assert rollout.batch.row_columns["episode"].tolist() == [0, 1, 2, 2, 3, 3, 4, 4, 4, 5, 5, 5]
    rewards = np.repeat(np.arange(6, dtype=np.float32), [1, 1, 2, 2, 3, 3])
    scored = ScoredRollout(step=4, rollout=rollout, rewards=rewards, exact_match=None, seconds={})
    taken = scored.take_prompts(np.array([2, 0]))
    assert taken.rewards.tolist() == [4, 4, 4, 5, 5, 5, 0, 1]
    joined = Rollout.concatenate([taken.rollout, scored.take_prompts(np.array([0, 1])).rollout])
    _, episode_of = joined.batch.episodes
    assert episode_of.tolist() == [0, 0, 0, 1, 1, 1, 2, 3, 4, 5, 6, 6, 7, 7]
    assert joined.batch.row_columns["group"].tolist() == [0] * 6 + [1, 1, 2, 2, 3, 3, 3, 3]
    assert [sample.reward for sample in taken.samples()] == [4, 5, 0, 1]
    assert [sample.reward for sample in taken.shown()] == [4, 0]
    final = [rollout.texts[row] for row in np.flatnonzero(rollout.batch.row_columns["final"])]
    assert [sample.response for sample in scored.samples()] == final
    assert exact_fraction(rollout) == sum(text == "12" for text in final) / 6
    read = read_rollout(write_rollout(tmp_path, scored))
    assert_equal(read.rollout, rollout)


def branches(episode: Episode) -> float:
    """One to three rows, as the run's first prompts have it."""
    first = asking(episode, [], "2>")
    if episode.prompt.index % 2:
        asking(episode, first, "1>")
        asking(episode, first, "3>")
        asking(episode, [], "5>")
    return float(len(first[1]["content"]))


@pytest.mark.parametrize("source", ["synchronous", "asynchronous"])
def test_a_run_trains_on_all_rows_of_its_episodes(source: str, tmp_path: Path) -> None:
    tiny = ["model.tokenizer=characters:0123456789>s", "model.config.vocab_size=16", "rollout.max_tokens=16"]
    function = ["rollout.sampler=episodes", f"samplers.episodes.function={__name__}:branches"]
    steps = ["run.steps=2", "eval.every=2", "checkpoint.every=0", "train.mini_batches=2"]
    summary = execute_here(small(tmp_path, *tiny, *function, f"rollout.source={source}", *steps))
    assert summary.steps_done == 2 and set(summary.evaluation) >= {"eval/reward", "eval/exact_match"}
    told = [line for line in metrics(tmp_path / "run") if "train/loss" in line]
    assert len(told) == 2 and any(line["rollout/rows"] > 1 for line in told)
    for line in told:
        # One row of one turn, or three of four.
        assert (line["rollout/rows"] - 1) * 1.5 == pytest.approx(line["rollout/turns"] - 1)
        # The trainer reads whole rows at once, the engine drew them turn by turn.
        assert 0 < line["rollout/logprob_diff"] < 1e-4 or source != "synchronous"
