"""Pictures in requests: those of the prompt, and those that a function, its tools or its users send."""

from __future__ import annotations

import base64
import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from corerl.data import Refused as Unreadable
from corerl.messages import short_repr
from corerl.pictures import FoundPicture, Picture, PictureReader, read
from corerl_agents.refused import SHOWN, Refused

KINDS = ("image", "image_url", "input_image")  # of parts
# How files begin whose format a `data:` URL names; it is the content that is read.
FORMATS = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp", b"BM": "bmp"}
SEND = 'send {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}, as `episode.picture` makes it'


def picture_part(picture: bytes | str | Path) -> dict[str, Any]:
    """The part of a message that shows a picture file, of which this is the content or the path."""
    content = picture if isinstance(picture, bytes) else Path(picture).read_bytes()
    name = next((name for begin, name in FORMATS.items() if content.startswith(begin)), "png")
    return {"type": "image_url", "image_url": {"url": f"data:image/{name};base64,{base64.b64encode(content).decode()}"}}


def with_indices(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A prompt's messages, copied, whose pictures remain the same ones wherever a function puts them."""
    copies = [copy.deepcopy(dict(message)) for message in messages]
    for index, part in enumerate(part for message in copies for part in _parts(message)):
        part["index"] = index
    return copies


@frozen(kw_only=True, eq=False)
class Shown:
    """A request's messages, in which each picture is a part `{"type": "image", "id": ...}`, and the pictures by id."""

    messages: Sequence[Any]
    pictures: Mapping[str, Picture]


def with_pictures(
    messages: Sequence[Any], reader: PictureReader | None, own: Sequence[Picture | FoundPicture]
) -> Shown:
    """Read the pictures of a request. A part `{"type": "image", "index": n}` is that one of `own`, the prompt's;
    without an index it is the next one. Raises Refused."""
    if reader is None or not any(True for message in messages for _ in _parts(message)):
        return Shown(messages=messages, pictures={})
    pictures: dict[str, Picture] = {}
    bare = iter(own)

    def shown(number: int, part: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            if part.keys() == {"type", "index"}:
                picture = _at(part["index"], own)
            else:
                picture = _own(bare, len(own)) if part.keys() == {"type"} else _sent(part, reader)
        except (Unreadable, ValueError) as error:
            raise Refused(f"messages[{number}]: {error}") from error
        return {"type": "image", "id": pictures.setdefault(picture.id, picture).id}

    marked = []
    for number, message in enumerate(messages):
        if not any(True for _ in _parts(message)):
            marked.append(message)
            continue
        if message.get("role") == "assistant":
            raise Refused(f"messages[{number}]: the policy says no pictures; remove them from the assistant's message")
        content = [shown(number, part) if _is_picture(part) else part for part in message["content"]]
        marked.append({**message, "content": content})
    return Shown(messages=marked, pictures=pictures)


def ids_in(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of the pictures in messages, in their order."""
    return [part["id"] for message in messages for part in _parts(message)]


def _parts(message: Any) -> Iterator[dict[str, Any]]:
    content = message.get("content") if isinstance(message, Mapping) else None
    yield from filter(_is_picture, content if isinstance(content, list) else ())


def _is_picture(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in KINDS


def _own(bare: Iterator[Picture | FoundPicture], count: int) -> Picture:
    if (found := next(bare, None)) is None:
        raise ValueError(f"has one more part {{'type': 'image'}} than the prompt has pictures, {count}; {SEND}")
    return read(found)


def _at(index: Any, own: Sequence[Picture | FoundPicture]) -> Picture:
    if not isinstance(index, int) or not 0 <= index < len(own):
        raise ValueError(f"has the picture of index {short_repr(index, SHOWN)}, but the prompt has {len(own)}; {SEND}")
    return read(own[index])


def _sent(part: Mapping[str, Any], reader: PictureReader) -> Picture:
    url = part.get("image_url")
    url = url.get("url") if isinstance(url, Mapping) else url
    if not isinstance(url, str) or not url.startswith("data:"):  # a path would let a client read files
        raise ValueError(f"has the picture {short_repr(url, SHOWN)}, which is no data: URL; {SEND}")
    # Nothing else of the part, which may name a path too.
    sent = {"type": "image_url", "image_url": {"url": url}}
    _, (reference,) = reader.find({}, [{"role": "user", "content": [sent]}], root="")
    return reader.read(reference)
