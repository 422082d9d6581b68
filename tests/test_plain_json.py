from __future__ import annotations

from pathlib import Path

import pytest

from corerl.plain_json import parse_json, read_json_file

DEEP = "[" * 200_000


def test_json_is_read_from_text_bytes_and_files(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"é": [1]}', encoding="utf-8")
    assert parse_json("[1, null]") == parse_json(b"[1, null]") == [1, None]
    assert read_json_file(tmp_path / "a.json") == {"é": [1]}


@pytest.mark.parametrize("text", [r'{"a": "\ud83d\ude00"}', '{"a": "\U0001f600"}', '{"a": "\U0001f600"}'.encode()])
def test_a_surrogate_pair_is_a_character(text: str | bytes) -> None:
    assert parse_json(text) == {"a": "\U0001f600"}
    assert parse_json('["\ud55c"]'.encode()) == ["\ud55c"]  # begins with the byte that raw halves begin with


@pytest.mark.parametrize(
    "text", [r'{"a": "x\ud83dy"}', rb'[["\uDe00\ud83d"]]', r'{"\uDBFF": 1}', b'["\xed\xa0\x80"]', '["\ud800"]']
)
def test_half_a_surrogate_pair_is_no_text(text: str | bytes) -> None:
    with pytest.raises(ValueError, match="^a text in it has half a surrogate pair, which is no character$"):
        parse_json(text)


@pytest.mark.parametrize("text", [DEEP, DEEP.encode(), '{"a":' * 200_000])
def test_what_is_nested_too_deeply_is_a_value_error_as_all_that_is_no_json(text: str | bytes) -> None:
    with pytest.raises(ValueError, match="^it is nested more deeply than can be read$"):
        parse_json(text)
    with pytest.raises(ValueError, match="Expecting value"):
        parse_json("{]"[1:])


@pytest.mark.parametrize("text", [r'{"a": ["\ud800"]}', rb'{"\uDC80": 1}'])
def test_half_of_a_character_is_a_value_error_and_a_whole_one_is_read(text: str | bytes) -> None:
    with pytest.raises(ValueError, match="^a text in it has half a surrogate pair, which is no character$"):
        parse_json(text)
    assert parse_json(r'"\ud83d\ude00 \\ud800"') == "\U0001f600 \\ud800"
