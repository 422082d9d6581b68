"""Edits of input files, as plain data that a file of the corpus can hold: each is [what, file, arguments...].

    bytes    file, operation, place, argument       place is modulo the file's size
    tree     file, keys, operation, argument        of TOML, JSON, JSON lines and a safetensors header
    setting  file, keys, value                      of TOML; tables on the way are made
    text     file, whole text
    become   file, what the path is instead         a directory, a link in a circle, ...
    sizes    file                                   checkpoint.json is told the new sizes of the files beside it

A value that plain data cannot hold is {"raw": text, "times": n, "close": text}: `raw` n times and `close` n times.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import struct
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tomli_w

Edit = Sequence[Any]
Keys = tuple[str | int, ...]
BYTES = ("flip", "cut", "insert", "zeros", "repeat", "encode", "length")
ODD = ("directory", "loop", "dangling", "blank", "holes", "nothing", "model", "saved")


def apply(edits: Sequence[Edit], inputs: Path) -> None:
    """Apply them in the working directory, whose entries are links to those of `inputs`."""
    for what, file, *arguments in edits:
        path = Path(_own(file, inputs))
        if (what != "become" and not path.is_file()) or any(each.is_symlink() for each in path.parents):
            continue  # an earlier edit has made it something else, perhaps a link to the inputs themselves
        match what:
            case "bytes":
                path.write_bytes(_changed(path.read_bytes(), *arguments))
            case "setting":
                _edit_tree(path, arguments[0], "put", arguments[1])
            case "text":
                path.write_bytes(arguments[0].encode("utf-8", "surrogatepass"))
            case "tree":
                _edit_tree(path, *arguments)
            case "become":
                _become(path, *arguments)
            case "sizes":
                _tell_sizes(path)


def _own(file: str, inputs: Path) -> str:
    """Replace the link that `file` is, or lies below, by a copy."""
    top = file.partition("/")[0]
    if os.path.islink(top):
        os.unlink(top)
        if (inputs / top).is_dir():
            shutil.copytree(inputs / top, top, symlinks=True)
        else:
            shutil.copyfile(inputs / top, top)
    return file


def _tell_sizes(path: Path) -> None:
    try:
        content = json.loads(path.read_bytes())
        for name in content["files"]:
            if (path.parent / name).is_file():
                content["files"][name] = (path.parent / name).stat().st_size
        path.write_text(json.dumps(content))
    except (ValueError, LookupError, TypeError, RecursionError, OSError):
        return  # it holds no sizes any more


# ---- bytes -----------------------------------------------------------------------------------------------------------


def _changed(data: bytes, operation: str, place: int, argument: Any) -> bytes:
    at = place % (len(data) + 1)
    match operation:
        case "flip":
            at = place % max(1, len(data))
            return data[:at] + bytes(byte ^ argument for byte in data[at : at + 1]) + data[at + 1 :]
        case "cut":
            return data[:at]
        case "insert":
            return data[:at] + argument.encode("latin-1") + data[at:]
        case "zeros":
            return data[:at] + bytes(len(data[at : at + argument])) + data[at + argument :]
        case "repeat":
            return data[:at] + data[at : at + 64] * argument + data[at + 64 :]
        case "encode":
            return data.decode("utf-8", "replace").encode(argument, "replace")
        case "length":  # of a safetensors header
            return struct.pack("<Q", argument) + data[8:]
    raise ValueError(operation)


# ---- trees -----------------------------------------------------------------------------------------------------------


def read_tree(path: Path) -> Any:
    """The content of a file as tables and arrays. Raises ValueError."""
    data = path.read_bytes()
    match path.suffix:
        case ".toml":
            return tomllib.loads(data.decode())
        case ".jsonl":
            return [json.loads(line) for line in data.splitlines() if line.strip()]
        case ".safetensors":
            return json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
        case ".parquet":
            from pyarrow import parquet

            return parquet.read_table(path).to_pylist()
    return json.loads(data)


def _edit_tree(path: Path, keys: Sequence[str | int], operation: str, argument: Any) -> None:
    """One edit; where an earlier edit has removed its place, or the file is no tree any more, nothing happens."""
    try:
        tree = read_tree(path)
        raw: dict[str, str] = {}
        tree = _edited(tree, keys, operation, _marked(argument, raw))
    except (ValueError, LookupError, TypeError, RecursionError, AttributeError, OSError, struct.error):
        return
    _write_tree(path, tree, raw)


def _marked(value: Any, raw: dict[str, str]) -> Any:
    """`value` with a mark in the place of each raw text, which `raw` then has."""
    if isinstance(value, dict) and "raw" in value:
        mark = f"@@{len(raw)}@@"
        raw[mark] = value["raw"] * value.get("times", 1) + value.get("close", "") * value.get("times", 1)
        return mark
    return value


def _edited(tree: Any, keys: Sequence[str | int], operation: str, argument: Any) -> Any:
    if not keys:
        return argument
    tree = copy.deepcopy(tree)
    holder = tree
    for key in keys[:-1]:
        holder = holder.setdefault(key, {}) if operation == "put" else holder[key]
    last: Any = keys[-1]
    match operation:
        case "set" | "put":
            holder[last] = argument
        case "delete":
            del holder[last]
        case "rename":
            holder[argument] = holder.pop(last)
        case "add":
            value, name = holder[last], argument
            holder[last] = {**value, name: name} if isinstance(value, dict) else [*value, name]
        case "double":
            value = holder[last]
            if isinstance(holder, list):
                holder.insert(last, value)
            else:
                holder[f"{last}@@twice@@"] = value
        case "nudge":
            value = holder[last]
            holder[last] = value + argument if type(value) in (int, float) else value * 2
        case "copy":
            value = tree
            for key in argument:
                value = value[key]
            holder[last] = copy.deepcopy(value)
    return tree


def _write_tree(path: Path, tree: Any, raw: dict[str, str]) -> None:
    def dumped(value: Any) -> str:
        text = tomli_w.dumps(value) if path.suffix == ".toml" else json.dumps(value)
        for mark, instead in raw.items():
            text = text.replace(f'"{mark}"', instead)
        return text.replace("@@twice@@", "")

    try:
        match path.suffix:
            case ".jsonl":
                content = "".join(dumped(row) + "\n" for row in (tree if isinstance(tree, list) else [tree])).encode()
            case ".safetensors":
                data = path.read_bytes()
                header = dumped(tree).encode()
                tensors = data[8 + struct.unpack("<Q", data[:8])[0] :]
                content = struct.pack("<Q", len(header)) + header + tensors
            case ".parquet":
                _write_parquet(path, json.loads(dumped(tree)))
                return
            case _:
                content = dumped(tree).encode("utf-8", "surrogatepass")
    except (TypeError, ValueError, RecursionError, AttributeError):  # a format that cannot hold it: TOML has no null
        return
    path.write_bytes(content)


def _write_parquet(path: Path, rows: Any) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        parquet.write_table(pa.Table.from_pylist(rows), path)
    except (pa.ArrowException, TypeError, ValueError, LookupError, AttributeError, OverflowError):
        return


def places(tree: Any, keys: Keys = ()) -> Iterator[Keys]:
    """The keys of every value in a tree."""
    yield keys
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield from places(value, (*keys, key))


# ---- paths -----------------------------------------------------------------------------------------------------------


def _become(path: Path, what: str) -> None:
    if not path.parent.is_dir():
        return  # an earlier edit has made it something else
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    match what:
        case "nothing":
            pass
        case "directory":
            path.mkdir()
        case "loop":
            path.symlink_to(path.name)
        case "dangling":
            path.symlink_to("nowhere")
        case "blank":
            path.touch()
        case "holes":
            path.touch()
            os.truncate(path, 2**26)
        case _:
            path.symlink_to(os.path.abspath(what))
