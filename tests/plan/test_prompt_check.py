"""Every prompt is looked at before a run draws one: the first refused chat is told with its line, or all left out."""

import json
import math
import threading
from pathlib import Path

import pytest
from attrs import evolve
from transformers import PreTrainedTokenizerBase

from corerl.data.prompts import PromptSource, PromptStream
from corerl.errors import DataError
from corerl.models.tokenizer import load_tokenizer
from corerl.plan.prompt_check import PromptCheck
from corerl.rollout import encoding
from tests.data.files import load, write

# As Gemma's and Mistral's do.
ALTERNATING = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m['content'] }}{% endfor %}"
)
WHY = r"the tokenizer's chat template rejects its messages \(TemplateError: roles must alternate\); .*: user, user"


def tokenizer() -> PreTrainedTokenizerBase:
    made = load_tokenizer(tokenizer="characters:0123456789", path="")
    made.chat_template = ALTERNATING
    return made


def source(tmp_path: Path, *, bad: tuple[int, ...], count: int = 100) -> PromptSource:
    rows = [{"prompt": [{"role": "user", "content": str(n)}] * (1 + (n in bad))} for n in range(count)]
    return load(write(tmp_path / "p.jsonl", *map(json.dumps, rows)), held_out=10)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "PART", 8)
    monkeypatch.setattr(encoding, "PART_SECONDS", math.inf)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("bad", [(99,), (42, 7), (0,)])
def test_the_first_refused_chat_is_told_with_file_and_line(
    tmp_path: Path, bad: tuple[int, ...], background: bool
) -> None:
    check = PromptCheck(source(tmp_path, bad=bad), tokenizer(), {}, skip=False)
    if background:
        check.begin()
    with pytest.raises(
        DataError, match=rf"p\.jsonl:{min(bad) + 1}: {WHY}; correct the row, or set data.refused='skip'"
    ):
        check.finish()


@pytest.mark.parametrize("background", [False, True])
def test_refused_and_long_prompts_are_left_out_and_counted_where_that_is_asked_for(
    tmp_path: Path, background: bool
) -> None:
    prompts = source(tmp_path, bad=(3, 42, 98))
    asked: list[int] = []
    where, prompt = prompts.where, prompts.prompt
    prompts.where = lambda index: asked.append(index) or where(index)  # type: ignore[method-assign]
    long = ({"role": "user", "content": "1" * 30},)
    prompts.prompt = (  # type: ignore[method-assign]
        lambda index: evolve(prompt(index), messages=long) if index in (5, 50) else prompt(index)
    )
    check = PromptCheck(prompts, tokenizer(), {}, skip=True, longest=20, limit="rollout.max_tokens=4")
    if background:
        check.begin()
    assert check.notices is None
    refused, too_long = check.finish()
    assert check.notices == check.finish() == (refused, too_long)
    assert refused.startswith(
        "data: 3 of 100 prompts are skipped, because they cannot be shown to the model; the first: "
    )
    assert "p.jsonl:4: the tokenizer's chat template rejects" in refused
    assert asked == [3]  # a line's number costs a reading of the file up to it
    assert too_long == (
        "data: 2 of 100 prompts are skipped: they have up to 30 tokens, but at most 20 fit with rollout.max_tokens=4"
    )
    drawn = {each.index for each in PromptStream(prompts, 0).take(200)}
    held_out = {each.index for each in prompts.held_out_prompts()}
    assert drawn | held_out == set(range(100)) - {3, 5, 42, 50, 98}


def test_where_every_chat_is_refused_none_is_left_to_train_on(tmp_path: Path) -> None:
    check = PromptCheck(source(tmp_path, bad=tuple(range(100))), tokenizer(), {}, skip=True)
    with pytest.raises(
        DataError, match=rf"all 90 training prompts are skipped: 100 of 100 prompts cannot be shown .*:1: {WHY}"
    ):
        check.finish()


@pytest.mark.processes
def test_chats_for_which_the_template_takes_too_much_are_told_or_left_out_until_there_are_three(tmp_path: Path) -> None:
    prompts, ours = source(tmp_path, bad=()), tokenizer()
    ours.chat_template = "{{ messages[0].content }}{% if '7' in messages[0].content %}{{ 'a' * 10**10 }}{% endif %}"
    what = r"p\.jsonl:8: the tokenizer's chat template takes more than 512 MiB of memory for its messages"
    with pytest.raises(DataError, match=rf"{what}; correct the template or the row, or set data.refused='skip'"):
        PromptCheck(prompts, ours, {}, skip=False).finish()
    with pytest.raises(DataError, match=rf"{what}; the template takes too much for 3 of the first 32 prompts"):
        PromptCheck(prompts, ours, {}, skip=True).finish()
    ours.chat_template = ours.chat_template.replace("'7'", "'77'")
    (notice,) = PromptCheck(prompts, ours, {}, skip=True).finish()
    assert notice.startswith("data: 1 of 100 prompts are skipped")
    assert "p.jsonl:78: the tokenizer's chat template takes more than 512 MiB" in notice


def test_a_check_that_takes_long_goes_on_in_the_background_where_it_was_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered: list[tuple[str, threading.Thread]] = []
    render = encoding.render

    def noted(ours: PreTrainedTokenizerBase, messages: tuple[dict[str, str], ...], **given: object) -> str:
        rendered.append((messages[0]["content"], threading.current_thread()))
        return render(ours, messages, **given)  # type: ignore[arg-type]

    monkeypatch.setattr(encoding, "render", noted)
    check = PromptCheck(source(tmp_path, bad=()), tokenizer(), {}, skip=False)
    assert not check.look(0.0) and not check.look(0.0)  # a part each
    assert (check.done, check.of, check.ready(0.0)) == (16, 100, False)
    check.begin()
    assert check.finish() == ()
    assert (check.done, check.ready(0.0), check.look(0.0)) == (100, True, True)
    assert [content for content, _ in rendered] == [str(n) for n in range(100)]
    ours = [thread is threading.current_thread() for _, thread in rendered]
    assert ours == [True] * 16 + [False] * 84


def test_chats_that_take_long_are_looked_at_one_by_one_until_the_check_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, go_on = threading.Event(), threading.Event()
    rendered: list[str] = []
    render = encoding.render

    def slow(ours: PreTrainedTokenizerBase, messages: tuple[dict[str, str], ...], **given: object) -> str:
        rendered.append(messages[0]["content"])
        if len(rendered) == 3:
            reached.set()
            go_on.wait()
        return render(ours, messages, **given)  # type: ignore[arg-type]

    monkeypatch.setattr(encoding, "render", slow)
    monkeypatch.setattr(encoding, "PART_SECONDS", 0.0)
    check = PromptCheck(source(tmp_path, bad=()), tokenizer(), {}, skip=False)
    assert not check.look(0.0) and not check.look(0.0)
    assert (check.done, rendered) == (2, ["0", "1"])
    check.begin()
    reached.wait()
    check.stop()
    go_on.set()
    for thread in threading.enumerate():
        if thread.name == "prompt check":
            thread.join()
    assert (check.done, rendered) == (3, ["0", "1", "2"])


def test_texts_of_any_length_need_no_check(tmp_path: Path) -> None:
    texts = load(write(tmp_path / "t.jsonl", '{"prompt": "1"}', '{"prompt": "2"}'))
    check = PromptCheck(texts, load_tokenizer(tokenizer="characters:12", path=""), {}, skip=False)
    assert check.look(0.0) and check.finish() == () and check.done == 0
