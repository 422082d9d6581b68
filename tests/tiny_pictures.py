"""Readers of pictures for tests, named `tests.tiny_pictures:SPEC`: a row's field `images` lists "WxH:shade"."""

from __future__ import annotations

import base64
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from attrs import frozen

from corerl.data import Refused
from corerl.pictures import Picture, PictureInputs, PictureReader, Tower
from corerl.plugin import PicturesSpec
from corerl.types import Array, IntArray

PLACEHOLDER, BREAK, END = 5, 6, 7


@frozen(kw_only=True)
class TinyOptions:
    key: str = "images"
    placeholder: int = PLACEHOLDER
    patch: int = 1  # pixels of a placeholder, in each direction


class TinyReader(PictureReader):
    """One placeholder for each patch, and BREAK between the rows of a picture; END behind it. The text that stands for
    one is the placeholder's own."""

    def __init__(self, options: TinyOptions, model: Any, tokenizer: Any) -> None:
        self.options, self.placeholder, self.mark = options, options.placeholder, options.placeholder
        self._written = tokenizer.decode([self.mark])
        self.decoded = Counter[str]()
        self._alive = WeakValueDictionary[str, Picture]()

    def find(self, row: Mapping[str, Any], prompt: Any, *, root: str) -> tuple[Any, Sequence[Any]]:
        references = row.get(self.options.key) or [sent for message in prompt for sent in _sent(message)]
        if wrong := [each for each in references if not re.fullmatch(r"\d+x\d+:(\d+|broken)", each)]:
            raise Refused("with pictures that cannot be read", f"no picture in {wrong[0]!r}")
        if isinstance(prompt, str):
            return prompt.replace("<image>", self._written), references
        return [self._marked(message) for message in prompt], references

    def _marked(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        if "<image>" not in str(message["content"]):
            return message
        before, *texts = message["content"].split("<image>")
        parts = [{"type": "text", "text": before}]
        for text in texts:
            parts += [{"type": "image"}, {"type": "text", "text": text}]
        return {**message, "content": parts}

    def read(self, reference: Any) -> Picture:
        if (alive := self._alive.get(reference)) is not None:
            return alive
        width, height, shade = re.split("[x:]", reference)
        if shade == "broken":
            raise Refused("with pictures that cannot be read", f"the picture {reference} ends early")
        self.decoded[reference] += 1
        picture = Picture(np.full((int(height), int(width), 3), int(shade), np.uint8))
        self._alive[reference] = picture
        return picture

    def expand(self, picture: Picture) -> IntArray:
        width, height = (size // self.options.patch for size in picture.size)
        row = [self.placeholder] * width
        return np.array([*[*row, BREAK] * (height - 1), *row, END])


def _sent(message: Any) -> list[str]:
    """The references in the data: URLs of a message's parts."""
    parts = message.get("content") if isinstance(message, Mapping) else None
    urls = [part["image_url"]["url"] for part in parts if "image_url" in part] if isinstance(parts, list) else []
    return [base64.b64decode(url.partition(",")[2]).decode() for url in urls]


class TinyInputs(PictureInputs):
    placeholder = PLACEHOLDER

    def __init__(self, model: Any) -> None: ...

    def inputs(self, pictures: Sequence[Picture]) -> Mapping[str, Array]:
        return {"pixel_values": np.stack([picture.pixels for picture in pictures])}

    def tower(self, decoder: Any, module: Any = None) -> Tower:
        from corerl_vision.tower import VisionTower

        return VisionTower(decoder, self, module)


SPEC = PicturesSpec(
    implementation="tests.tiny_pictures:TinyReader",
    inputs="tests.tiny_pictures:TinyInputs",
    config=TinyOptions,
    api=(2, 0),
    summary="reads pictures of one shade",
)
