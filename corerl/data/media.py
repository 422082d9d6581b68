"""Detect pictures, sound and video in rows and messages, which a text model cannot be shown."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from corerl.messages import install_hint

# Names of fields in published data sets, such as `images`, `image_1`, `audio_path` and `video_url`.
FIELD = re.compile(
    r"(?:(?P<images>image|img|picture|photo)|(?P<audio>audio|waveform)|(?P<video>video))"
    r"s?(?:_?\d+|_(?:path|file|url|uri|byte|data|base64)s?)?",
    re.IGNORECASE,
)
PART = re.compile(
    r"(?:input_|output_)?(?:(?P<images>image)|(?P<audio>audio)|(?P<video>video)|(?P<files>file))(?:_url)?"
)
IMAGES = "images"
MEDIA = "media"  # content that does not say which kind it is
SIGNATURES = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"RIFF", b"OggS", b"ID3", b"fLaC", b"\x1aE\xdf\xa3")
ADDRESSES = ("data:image/", "data:audio/", "data:video/")


@cache
def way() -> str:
    """The end of a message about a row with pictures."""
    return f", or set model.pictures to show it to the model ({install_hint('vision')})"


def kind_in_field(name: str, value: Any) -> str:
    """What a field holds that is not text, by its name or its content: images, audio, video or media; "" if nothing."""
    first = _first(value)
    if first is None or (first is value and isinstance(first, int | float)):  # as a number of images
        return ""
    return _kind_of_name(name) or MEDIA * _is_media(first)


def kind_in_messages(messages: Any) -> str:
    """What messages hold that is not text, by the types of their parts and their own fields; "" if nothing."""
    for message in messages if isinstance(messages, list) else []:
        fields = dict(message) if isinstance(message, dict) else {}
        content = fields.pop("content", None)
        for part in content if isinstance(content, list) else []:
            if isinstance(part, dict) and (found := PART.fullmatch(str(part.get("type")))):
                return str(found.lastgroup)
        for name, value in fields.items():
            if kind := kind_in_field(name, value):
                return kind
    return ""


@cache
def _kind_of_name(name: str) -> str:
    found = FIELD.fullmatch(name)
    return str(found.lastgroup) if found else ""


def _first(value: Any) -> Any:
    """The first item, at any depth of lists, that is not null or empty."""
    if isinstance(value, list | tuple):
        return next((first for each in value if (first := _first(each)) is not None), None)
    if isinstance(value, dict) and all(each is None for each in value.values()):
        return None
    return None if isinstance(value, str | bytes) and not value else value


def _is_media(value: Any) -> bool:
    match value:
        case bytes():
            return value.startswith(SIGNATURES) or value[4:8] == b"ftyp"
        case str():
            return value.startswith(ADDRESSES)
        case dict():  # as `datasets` stores its types Image, Audio and Video, and decoded audio
            return value.keys() == {"bytes", "path"} or value.keys() >= {"array", "sampling_rate"}
    return False
