"""Every chat is rendered before a run draws one: the first refused one is told with its line, or all are left out."""

import json
import threading
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from corerl.data.prompts import PromptSource, PromptStream
from corerl.driver import chats
from corerl.driver.chats import ChatCheck
from corerl.errors import DataError
from corerl.models.tokenizer import load_tokenizer
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


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("bad", [(99,), (42, 7), (0,)])
def test_the_first_refused_chat_is_told_with_file_and_line(
    tmp_path: Path, bad: tuple[int, ...], background: bool
) -> None:
    check = ChatCheck(source(tmp_path, bad=bad), tokenizer(), {}, skip=False)
    if background:
        check.begin()
    with pytest.raises(
        DataError, match=rf"p\.jsonl:{min(bad) + 1}: {WHY}; correct the row, or set data.refused='skip'"
    ):
        check.finish()


@pytest.mark.parametrize("background", [False, True])
def test_refused_chats_are_left_out_and_counted_where_that_is_asked_for(tmp_path: Path, background: bool) -> None:
    prompts = source(tmp_path, bad=(3, 42, 98))
    prompts.leave_out(frozenset({5}))  # too long, say
    asked: list[int] = []
    where = prompts.where
    prompts.where = lambda index: asked.append(index) or where(index)  # type: ignore[method-assign]
    check = ChatCheck(prompts, tokenizer(), {}, skip=True)
    if background:
        check.begin()
    told = check.finish()
    assert told.startswith("data: 3 of 100 prompts are skipped, because the chat template refuses them; the first: ")
    assert "p.jsonl:4: the tokenizer's chat template rejects" in told
    assert asked == [3]  # a line's number costs a reading of the file up to it
    drawn = {prompt.index for prompt in PromptStream(prompts, 0).take(200)}
    held_out = {prompt.index for prompt in prompts.held_out_prompts()}
    assert drawn | held_out == set(range(100)) - {3, 5, 42, 98}


def test_where_every_chat_is_refused_none_is_left_to_train_on(tmp_path: Path) -> None:
    check = ChatCheck(source(tmp_path, bad=tuple(range(100))), tokenizer(), {}, skip=True)
    with pytest.raises(
        DataError, match=rf"all 90 training prompts are skipped: the chat template refuses 100 .*:1: {WHY}"
    ):
        check.finish()


def test_many_chats_are_checked_while_something_else_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    refused = chats.refused

    def noted(*given: object) -> object:
        threads.append(threading.current_thread())
        return refused(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(chats, "FEW", 99)
    monkeypatch.setattr(chats, "refused", noted)
    check = ChatCheck(source(tmp_path, bad=()), tokenizer(), {}, skip=False)
    assert not check.few
    check.begin()
    assert check.finish() == check.finish() == ""
    assert len(threads) == 1 and threads[0] is not threading.current_thread()


def test_texts_need_no_check(tmp_path: Path) -> None:
    texts = load(write(tmp_path / "t.jsonl", '{"prompt": "1"}', '{"prompt": "2"}'))
    check = ChatCheck(texts, load_tokenizer(tokenizer="characters:12", path=""), {}, skip=False)
    assert check.few and check.finish() == ""
