"""Files as `pyarrow` and `datasets` write them."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from corerl.errors import DataError
from corerl.messages import install_hint
from tests.data.files import load, write

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "3+4?"}]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "x"', "p.jsonl:2: not valid JSON"),
        (
            '{"prompt": "x",}',
            r"p.jsonl:2: not valid JSON: [\w ]+, at character 1[56]; expected one JSON object per line; ",
        ),
        (
            '{"prompt": "x", "n": ' + "9" * 5000 + "}",
            r"p.jsonl:2: not valid JSON: Exceeds the limit \(4300 digits\).*; data.refused='skip'",
        ),
        ("[" * 200_000, "p.jsonl:2: not valid JSON: it is nested more deeply than can be read"),
        (json.dumps({"prompt": [{"role": "user", "content": "x"}], "tools": "[" * 200_000}), "field 'tools': got '.*"),
        (r'{"prompt": "a\ud800"}', "p.jsonl:2: not valid JSON: a text in it has half a surrogate pair"),
        (json.dumps({"prompt": [{"role": "user", "content": [None]}]}), "message 1 has the content part None, but"),
        (
            json.dumps({"prompt": [{"role": "user", "content": [{"type": "text", "text": None}]}]}),
            "message 1 has the content part {'type': 'text', 'text': None}, but .* which have a string 'text'",
        ),
        *[
            (
                json.dumps({"prompt": [{"role": "assistant", "content": None, "tool_calls": calls}]}),
                rf"message 1 has the tool_calls {shown}, wanted a list of objects as in OpenAI's format",
            )
            for calls, shown in [({"a": 1}, "{'a': 1}"), ("add", "'add'"), (["add"], r"\['add'\]"), ([CHAT], r"\[\[.*")]
        ],
        ('["x"]', "p.jsonl:2: got \\['x'\\], expected a JSON object with the field 'prompt'"),
        ('{"promt": "x", "id": 1}', "p.jsonl:2: no field 'prompt'; it has: promt, id; did you mean 'promt'?"),
        ('{"prompt": ""}', "p.jsonl:2: field 'prompt' is '', expected"),
        ('{"prompt": ["x"]}', "p.jsonl:2: field 'prompt': message 1 has no string 'role'; every message needs a role"),
        ('{"prompt": [{"role": "user", "content": ["x"]}]}', "field 'prompt': message 1 has the content part 'x', but"),
        ('{"prompt": [{"role": "user"}]}', "field 'prompt': message 1 has no string 'content'; every message needs"),
        (
            '{"prompt": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}',
            "message 1 has the content part {'type': 'image_url'",
        ),
        (
            '{"prompt": [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [{"id": "1"}]}]}',
            "message 2, the last one, is a tool call of the assistant, which leaves nothing to answer",
        ),
        (
            '{"prompt": [{"role": "user", "content": "x"}], "tools": ["add"]}',
            r"p.jsonl:2: field 'tools': got \['add'\], wanted a list of tools, each an object .*data.tools_key",
        ),
    ],
)
def test_an_unusable_line_is_named_with_its_number(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path / "p.jsonl", '{"prompt": "fine"}', line, '{"prompt": "fine"}')
    with pytest.raises(DataError, match=message):
        load(path)


def test_an_answer_key_must_be_a_field_of_some_row(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", '{"prompt": "1"}', '{"prompt": "2", "result": "3"}')
    named = load(path, held_out=0, answer_key="result")
    assert [named.prompt(index).answer for index in (0, 1)] == ["", "3"]
    assert named.notices == (f"data: 1 of 2 prompts have no answer; the first: {path}:1",)
    (notice,) = load(path, held_out=0).notices  # the default field may be missing
    none = f"data.answer_key: none of the 2 prompts of {path} has an answer under "
    assert notice == f"{none}'answer'; the first one has: prompt"
    with pytest.raises(DataError, match=f"^{none}'reslt'; the first one has: prompt$"):
        load(path, held_out=0, answer_key="reslt")


# ---- messages in OpenAI's format, and tools --------------------------------------------------------------------------

USER = {"role": "user", "content": "c"}
TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": {"a": {"type": "number", "default": None}}}},
    {"type": "function", "function": {"name": "say", "parameters": {"text": {"type": "string"}}}},
]
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
SAID = [
    {"role": "user", "content": [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "4"},
]
READ = [
    {"role": "user", "content": "2+2?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}],
    },
    {"role": "tool", "tool_call_id": "1", "content": "4"},
]


def test_messages_are_read_as_openai_writes_them(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", json.dumps({"prompt": SAID, "tools": TOOLS}), json.dumps({"prompt": SAID}))
    source = load(path)
    assert list(source.prompt(0).messages) == list(source.prompt(1).messages) == READ
    assert source.prompt(0).fields["prompt"] == SAID  # a reward function sees the row itself
    # A null that a row of JSON has is its own.
    assert (list(source.prompt(0).tools), source.prompt(1).tools) == (TOOLS, ())


@pytest.mark.parametrize("written", [json.dumps(TOOLS), [json.dumps(tool) for tool in TOOLS]])
def test_tools_may_be_json_text_in_any_field(tmp_path: Path, written: object) -> None:
    rows = ({"prompt": "2+2?", "functions": written, "tools": 3, "n": n} for n in range(2))
    path = write(tmp_path / "p.jsonl", *map(json.dumps, rows))
    assert list(load(path, chat=True, tools_key="functions").prompt(0).tools) == TOOLS
    assert load(path, chat=True, tools_key="").prompt(0).tools == ()
    assert load(path).prompt(0).tools == ()  # a text has none


@pytest.mark.parametrize("saved", ["parquet", "arrow"])
def test_a_columnar_format_adds_nothing_to_what_the_rows_said(tmp_path: Path, saved: str) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    calls = [
        {"function": {"name": "add", "arguments": {"a": 2, "b": 3}}},
        {"function": {"name": "say", "arguments": {"text": "x"}}},
    ]
    messages = [
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": [call]}, USER]
        for call in calls
    ]
    tools = [[{"name": "add", "parameters": {"a": {"type": "number"}}}], [{"name": "say", "parameters": {"text": {}}}]]
    tools[1][0]["parameters"] = {"text": {"type": "string"}}
    table = pyarrow.table({"prompt": messages, "tools": tools})
    assert table.to_pylist()[0]["prompt"][1]["tool_calls"][0]["function"]["arguments"] == {"a": 2, "b": 3, "text": None}
    if saved == "parquet":
        path = tmp_path / "p.parquet"
        parquet.write_table(table, path)
    else:
        path = tmp_path / "saved"
        pytest.importorskip("datasets").Dataset(table).save_to_disk(path)
    source = load(path)
    assert [list(source.prompt(index).messages) for index in (0, 1)] == messages
    assert [list(source.prompt(index).tools) for index in (0, 1)] == tools


# ---- rows that cannot be shown to the model --------------------------------------------------------------------------

PNG = b"\x89PNG\r\n\x1a\n"
IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
STORED = {"bytes": PNG, "path": None}
CHATS = [[{"role": "user", "content": text}] for text in ("one", "<image>two", "three", "four")]


def pictures(path: Path, saved: str) -> Path:
    """Four chats, of which the second and the third have a picture in two fields."""
    columns = {
        "prompt": CHATS,
        "images": pa.array([[], [STORED], None, []], pa.list_(IMAGE)),
        "figure": pa.array([None, None, STORED, {"bytes": None, "path": None}], IMAGE),
        "answer": ["1", "2", "3", "4"],
    }
    if saved == "jsonl":
        rows = [
            {"prompt": CHATS[0], "images": []},
            {"prompt": CHATS[1], "images": ["a.png"]},
            {"prompt": CHATS[2], "images": None, "figure": {"bytes": "iVBORw0KGgo=", "path": None}},
            {"prompt": CHATS[3]},
        ]
        return write(path, *(json.dumps({**row, "answer": str(at)}) for at, row in enumerate(rows, start=1)))
    pq.write_table(pa.table(columns), path)
    return path


@pytest.mark.parametrize("saved", ["jsonl", "parquet"])
def test_rows_with_pictures_are_refused_skipped_or_ignored(tmp_path: Path, saved: str) -> None:
    path = pictures(tmp_path / f"p.{saved}", saved)
    where = ":2" if saved == "jsonl" else ", row 1"
    with pytest.raises(
        DataError, match=rf"p.{saved}{where}: field 'images' has images, .*; data.refused='skip' leaves"
    ):
        load(path)
    source = load(path, refused="skip")
    assert [source.prompt(index).answer for index in range(len(source))] == ["1", "4"]
    assert [source.prompt(index).index for index in range(len(source))] == [0, 1]
    assert source.where(1) == f"{path}:4" if saved == "jsonl" else f"{path}, row 3"
    (notice,) = source.notices
    assert notice == (
        f"data: 2 of 4 rows of {path} are skipped, because they cannot be shown to the model: 1 with images, 1 with "
        f"media; the first: {path}{where}: field 'images' has images, which the model is not shown; list it in "
        "data.ignore if only rewards need it, or set model.pictures to show it to the model ("
        f"{install_hint('vision')})"
    )
    ignored = load(path, ignore=("images", "figure"))
    assert len(ignored) == 4 and ignored.prompt(1).fields["images"]
    with pytest.raises(DataError, match=r"1 of 1 rows of .* cannot be shown to the model: 1 with images; the first: "):
        load(write(tmp_path / "only.jsonl", json.dumps({"prompt": "x", "image": "a.png"})), refused="skip")


def test_skipping_leaves_out_every_row_that_cannot_be_used(tmp_path: Path) -> None:
    part = {"type": "input_audio", "input_audio": {"data": "x"}}
    refused = [
        ("not JSON", "that are not JSON"),
        ("[]", "that are no objects"),
        ('{"question": "x"}', "without a prompt"),
        ('{"prompt": ""}', "without a prompt"),
        ('{"prompt": null}', "without a prompt"),
        (json.dumps({"prompt": [{"role": "user", "content": [part]}]}), "with audio"),
        (json.dumps({"prompt": [{"role": "user", "content": "?", "images": ["a.png"]}]}), "with images"),
        (json.dumps({"prompt": [{"role": "user"}]}), "with messages that cannot be read"),
        (json.dumps({"prompt": [USER], "tools": ["add"]}), "with tools that cannot be read"),
        (json.dumps({"prompt": [USER], "chat_template_kwargs": [1]}), "with chat_template_kwargs that cannot be read"),
    ]
    lines = [line for row, (line, _) in enumerate(refused) for line in (line, f'{{"prompt": "{row}", "answer": "x"}}')]
    source = load(write(tmp_path / "p.jsonl", *lines), refused="skip")
    assert [source.prompt(index).text for index in range(len(source))] == [str(row) for row in range(10)]
    (notice,) = source.notices
    assert "10 of 20 rows of" in notice and "p.jsonl:1: not valid JSON" in notice
    for kind in {kind for _, kind in refused}:
        assert f"{sum(each == kind for _, each in refused)} {kind}" in notice


@pytest.mark.parametrize("saved", ["jsonl", "parquet"])
def test_fields_that_prompts_often_need_are_reported_once(tmp_path: Path, saved: str) -> None:
    rows = [
        {"prompt": "a", "system": "Be brief.", "documents": []},
        {"prompt": "b", "system": None, "documents": ["d"]},
    ]
    rows = [{**row, "tools": TOOLS, "chat_template_kwargs": {"enable_thinking": True}, "answer": "1"} for row in rows]
    path = tmp_path / f"p.{saved}"
    if saved == "jsonl":
        write(path, *map(json.dumps, rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    (notice,) = load(path).notices
    assert notice.startswith(f"data: rows of {path} have fields that prompts often need and the model is not shown: ")
    counts = notice.partition("is not shown: ")[2].partition("; the first: ")[0].split(", ")
    assert sorted(counts) == ["1 'documents'", "1 'system'", "2 'chat_template_kwargs'", "2 'tools'"]
    assert load(path, chat=True, ignore=("system", "documents")).notices == ()


@pytest.mark.parametrize("saved", ["jsonl", "parquet"])
def test_a_row_has_template_arguments_of_its_own(tmp_path: Path, saved: str) -> None:
    options = [{"enable_thinking": False}, {"reasoning_effort": "low"}, None]
    rows = [{"prompt": [USER], "chat_template_kwargs": each} for each in options]
    path = tmp_path / f"p.{saved}"
    if saved == "jsonl":
        rows[1]["chat_template_kwargs"] = json.dumps(options[1])
        write(path, *map(json.dumps, rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    source = load(path)
    assert [dict(source.prompt(index).template_options) for index in range(3)] == [*options[:2], {}]
    assert dict(load(path, ignore=("chat_template_kwargs",)).prompt(0).template_options) == {}
