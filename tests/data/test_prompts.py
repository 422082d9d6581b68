import json
from pathlib import Path

import pytest

from corerl.data.prompts import JsonlPrompts, PromptSource, PromptStream, SortDigits, load_prompts
from corerl.errors import CheckpointError, ConfigError, DataError


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def numbered(path: Path, count: int) -> Path:
    return write(path, *(json.dumps({"prompt": f"p{i}", "answer": f"a{i}", "level": i}) for i in range(count)))


def load(path: Path | str, *, held_out: int = 1, prompt_key: str = "prompt") -> PromptSource:
    return load_prompts(source=str(path), prompt_key=prompt_key, answer_key="answer", held_out=held_out, seed=0)


def test_sort_digits_asks_for_five_digits_in_order() -> None:
    prompt = SortDigits(held_out=256, seed=0).prompt(35018)
    assert (prompt.text, prompt.answer) == ("35018>", "01358")
    assert SortDigits(held_out=256, seed=0).prompt(7).text == "00007>"


def test_held_out_prompts_are_the_same_for_a_seed_and_never_trained_on() -> None:
    source, again, other = (
        SortDigits(held_out=256, seed=1),
        SortDigits(held_out=256, seed=1),
        SortDigits(held_out=256, seed=2),
    )
    held_out = [prompt.index for prompt in source.held_out_prompts()]
    assert len(set(held_out)) == 256
    assert held_out == [prompt.index for prompt in again.held_out_prompts()]
    assert held_out != [prompt.index for prompt in other.held_out_prompts()]
    trained = {prompt.index for prompt in PromptStream(source, seed=1).take(100_000 - 256)}
    assert trained == set(range(100_000)) - set(held_out)


def test_rows_of_a_jsonl_file_are_read_where_they_stand(tmp_path: Path) -> None:
    lines = [
        '{"prompt": "grüß", "answer": "a", "level": 2}',
        "",
        '{"prompt": "two"}',
        '{"answer": 42, "prompt": "three"}',
    ]
    source = load(write(tmp_path / "p.jsonl", *lines))
    first, second, third = (source.prompt(index) for index in range(3))
    assert (first.index, first.text, first.answer, first.fields["level"]) == (0, "grüß", "a", 2)
    assert (second.text, second.answer) == ("two", "")
    assert (third.text, third.answer) == ("three", "42")
    assert sorted([*source.train.tolist(), *source.held_out.tolist()]) == [0, 1, 2]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "x"', "p.jsonl:2: not valid JSON"),
        ('["x"]', "p.jsonl:2: got a list, wanted a JSON object with the field 'prompt'"),
        ('{"promt": "x", "id": 1}', "p.jsonl:2: no field 'prompt'; it has: promt, id; did you mean 'promt'?"),
        ('{"prompt": 3}', "p.jsonl:2: field 'prompt' is a number, wanted a text that is not empty"),
        ('{"prompt": ""}', "p.jsonl:2: field 'prompt' is an empty text"),
    ],
)
def test_a_line_that_cannot_be_used_is_named_with_its_number(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path / "p.jsonl", '{"prompt": "fine"}', line, '{"prompt": "fine"}')
    with pytest.raises(DataError, match=message):
        load(path)


def test_a_line_that_is_not_utf8_is_named_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "fine"}\n{"prompt": "\xff"}\n')
    with pytest.raises(DataError, match="p.jsonl:2: not valid JSON"):
        load(path)


def test_a_missing_an_empty_and_an_unknown_source_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot read .*none.jsonl: No such file or directory"):
        load(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="p.jsonl is empty"):
        load(write(tmp_path / "p.jsonl", "", ""))
    with pytest.raises(ConfigError, match="unknown source 'sort-digit'; known: sort-digits, .*did you mean"):
        load("sort-digit")


def test_holding_out_everything_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="data.held_out=4 leaves nothing to train on: .*p.jsonl has 4 prompts"):
        load(numbered(tmp_path / "p.jsonl", 4), held_out=4)


def test_every_epoch_has_each_training_prompt_once_in_an_order_of_its_own(tmp_path: Path) -> None:
    source = load(numbered(tmp_path / "p.jsonl", 21), held_out=1)
    stream = PromptStream(source, seed=5)
    taken = [prompt.index for prompt in stream.take(15) + stream.take(30) + stream.take(15)]
    epochs = [taken[:20], taken[20:40], taken[40:]]
    assert all(sorted(epoch) == source.train.tolist() for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_a_restored_stream_continues_where_the_other_stood(tmp_path: Path) -> None:
    source = load(numbered(tmp_path / "p.jsonl", 21), held_out=1)
    stream, fresh = PromptStream(source, seed=5), PromptStream(source, seed=5)
    stream.take(33)
    position = json.loads(json.dumps(stream.position))
    fresh.restore(position)
    assert fresh.take(50) == stream.take(50)
    assert fresh.position == stream.position


def test_a_position_in_other_data_or_of_another_seed_is_refused(tmp_path: Path) -> None:
    position = PromptStream(load(numbered(tmp_path / "p.jsonl", 21)), seed=5).position
    with pytest.raises(CheckpointError, match="has prompts=20, this run has prompts=10"):
        PromptStream(load(numbered(tmp_path / "q.jsonl", 11)), seed=5).restore(position)
    with pytest.raises(CheckpointError, match="has seed=5, this run has seed=6"):
        PromptStream(load(tmp_path / "p.jsonl"), seed=6).restore(position)


def test_the_split_of_a_file_is_kept_when_it_is_loaded_again(tmp_path: Path) -> None:
    path = numbered(tmp_path / "p.jsonl", 21)
    one = JsonlPrompts(path, prompt_key="prompt", answer_key="answer", held_out=5, seed=0)
    two = JsonlPrompts(path, prompt_key="prompt", answer_key="answer", held_out=5, seed=0)
    assert one.held_out_prompts() == two.held_out_prompts()
    assert not set(one.held_out.tolist()) & set(one.train.tolist())
