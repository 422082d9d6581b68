"""Find the pictures of rows, read each once, and say which tokens stand for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np

from corerl.config import ModelConfig
from corerl.data import Refused
from corerl.pictures import Picture, PictureReader
from corerl.types import IntArray
from corerl_vision.files import File, file_of, pixels_of
from corerl_vision.processor import BEGINS, ENDS, processor_of
from corerl_vision.spec import VisionOptions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WORD = "<image>"  # where a picture goes, in texts of published data
PARTS = ("image", "image_url", "input_image")  # types of content parts
CONTENT = ("image", "image_url", "url", "path", "bytes")  # their fields
BREAK, END = "[IMG_BREAK]", "[IMG_END]"  # tokens behind a row of features, and behind the last
BEHIND = "behind-the-picture"  # a text that templates write as it is
NUMBERS = "whose pictures and marks differ in number"


class VisionReader(PictureReader):
    """Reads picture files for a model of transformers."""

    def __init__(self, options: VisionOptions, model: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self._options, self._tokenizer = options, tokenizer
        self._processor = processor_of(model, min_pixels=options.min_pixels, max_pixels=options.max_pixels)
        self.placeholder = self._processor.placeholder
        self._before, self.mark, self._behind = self._written()
        self._alive: WeakValueDictionary[bytes, Picture] = WeakValueDictionary()
        # Episodes read in threads, several of them the same picture at once. A lock is there while someone has it.
        self._reading: WeakValueDictionary[bytes, Lock] = WeakValueDictionary()
        self._finding = Lock()

    def _written(self) -> tuple[str, int, str]:
        """What a chat template writes for a picture: a text, the token that becomes the picture, and another text."""
        known = [each for each in (self.placeholder, self._processor.begin) if each is not None]
        if not self._tokenizer.chat_template:
            return "", self.placeholder, ""
        behind = {"type": "text", "text": BEHIND}
        try:
            chats: list[Any] = [[{"role": "user", "content": each}] for each in ([{"type": "image"}, behind], [behind])]
            shown, without = (str(self._tokenizer.apply_chat_template(messages, tokenize=False)) for messages in chats)
        except Exception:  # a template of texts alone: prompts that are chats will be refused by name
            return "", self.placeholder, ""
        picture = shown.partition(BEHIND)[0].removeprefix(without.partition(BEHIND)[0])
        for mark in known:
            text = str(self._tokenizer.convert_ids_to_tokens(mark))
            if picture.count(text) == 1:
                before, _, after = picture.partition(text)
                return before, mark, after
        return "", self.placeholder, ""

    def find(self, row: Mapping[str, Any], prompt: Any, *, root: str) -> tuple[Any, Sequence[Any]]:
        held = row.get(self._options.key)
        cells = held if isinstance(held, list | tuple) else [held]
        listed = iter([cell for cell in cells if not _is_empty(cell)])
        root = self._options.root or root
        found: list[File] = []

        def take(cell: Any = None) -> None:
            """The picture of a part, or else the row's next one."""
            if cell is None and (cell := next(listed, None)) is None:
                raise Refused(NUMBERS, f"more marks than pictures in the field {self._options.key!r}")
            found.append(
                file_of(
                    cell,
                    root=root,
                    max_bytes=self._options.max_megabytes * 1e6,
                    max_pixels=self._options.max_megapixels * 1e6,
                )
            )

        if isinstance(prompt, str):
            text = f"{self._before}{self._tokenizer.convert_ids_to_tokens(self.mark)}{self._behind}"
            for _ in range(prompt.count(WORD)):
                take()
            marked: Any = prompt.replace(WORD, text)
        else:
            marked = [_marked(message, take) for message in prompt] if isinstance(prompt, list) else prompt
        if left := len(list(listed)):
            raise Refused(
                NUMBERS, f"{left} pictures more in the field {self._options.key!r} than marks {WORD} in the prompt"
            )
        return marked, found

    def read(self, reference: File) -> Picture:
        digest = reference.digest()
        with self._finding:
            reading = self._reading.setdefault(digest, Lock())
        with reading:
            if (alive := self._alive.get(digest)) is not None:
                return alive
            picture = self._alive[digest] = Picture(self._processor.seen(pixels_of(reference)))
            return picture

    def expand(self, picture: Picture) -> IntArray:
        width, height = picture.size
        rows, columns = self._processor.features(height, width)
        ids = [self.placeholder] * columns
        if rows > 1 or "image_sizes" in self._processor.own.model_input_names:
            line, end = (self._tokenizer.convert_tokens_to_ids(each) for each in (BREAK, END))
            return np.array([*[*ids, line] * (rows - 1), *ids, end], np.int64)
        opening, closing = self._around
        return np.array([*opening, *ids, *closing], np.int64)

    @cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """The tokens that a processor writes around the features, where the template has not written them: InternVL's
        and Gemma's, the third of which has empty lines around."""
        config, tokenizer = self._processor.config, self._tokenizer
        starts = [getattr(config, name, None) for name in BEGINS] + [getattr(tokenizer, "start_image_token_id", None)]
        ends = [getattr(config, name, None) for name in ENDS] + [getattr(tokenizer, "end_image_token_id", None)]
        start, end = (next((each for each in ids if each is not None), None) for ids in (starts, ends))
        if start is None or end is None:
            return [], []
        lines = tokenizer("\n\n", add_special_tokens=False)["input_ids"] if self.mark != self.placeholder else []
        return [*lines, start], [end, *lines]


def _is_empty(cell: Any) -> bool:
    """As rows without a picture have it: null, an empty text, and an object of nulls in files of columns."""
    return not cell or (isinstance(cell, Mapping) and not any(cell.values()))


def _marked(message: Any, take: Any) -> Any:
    """The message with the part `{"type": "image"}` for each of its pictures."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if isinstance(content, str):
        content = [{"type": "text", "text": content}] if WORD in content else content
    if not isinstance(content, list | tuple):
        return message
    parts = [each for part in content for each in _parts(part, take)]
    return {**message, "content": parts}


def _parts(part: Any, take: Any) -> Iterator[Any]:
    if not isinstance(part, Mapping):
        yield part
    elif part.get("type") in PARTS:
        held = next((part[name] for name in CONTENT if not _is_empty(part.get(name))), None)
        take(held)
        yield {"type": "image"}
    elif part.get("type", "text") == "text" and isinstance(part.get("text"), str) and WORD in part["text"]:
        before, *texts = part["text"].split(WORD)
        yield from [{"type": "text", "text": before}] if before else []
        for text in texts:
            take()
            yield {"type": "image"}
            yield from [{"type": "text", "text": text}] if text else []
    else:
        yield part
