import json
from pathlib import Path

import pytest

from corerl.data.chat import read_message
from corerl.errors import ConfigError
from tests.data.files import load, write

SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "3+4?"}


def test_openais_older_fields_are_read_as_content_and_tools() -> None:
    no = {"role": "assistant", "content": "No."}
    assert read_message({"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}) == no
    assert read_message({"role": "assistant", "content": None, "refusal": "No."}) == no
    assert read_message({"role": "assistant", "content": "Yes.", "refusal": None}) == {**no, "content": "Yes."}
    call = {"name": "add", "arguments": '{"a": 2}'}
    assert read_message({"role": "assistant", "content": None, "function_call": call}) == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}],
    }
    result = {"role": "function", "name": "add", "content": "4"}
    assert read_message(result) == {**result, "role": "tool"}


def test_a_picture_is_no_part_of_a_message_to_a_model_of_text() -> None:
    parts = [{"type": "text", "text": "What?"}, {"type": "image"}]
    assert read_message({"role": "user", "content": parts}, pictures=True)["content"] == parts
    with pytest.raises(ValueError, match="the model reads only text parts"):
        read_message({"role": "user", "content": parts})


def test_a_system_message_is_for_chats_only(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", json.dumps({"prompt": [USER]}), '{"prompt": "5+6?"}')
    source = load(path, system="Be brief.")
    assert (source.chat, source.prompt(0).messages, source.prompt(1).messages) == (True, (SYSTEM, USER), ())
    texts = write(tmp_path / "t.jsonl", '{"prompt": "5+6?"}', '{"prompt": "5+7?"}')
    with pytest.raises(ConfigError, match=r"^data.system: used only for chats, and no prompt is one; set data"):
        load(texts, system="Be brief.")
