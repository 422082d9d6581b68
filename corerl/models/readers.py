"""Read any box of any tensor in a Hugging Face directory, and only that from disk."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from corerl.errors import ModelError
from corerl.messages import first_line
from corerl.weights.chunks import TensorSource

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class FirstOf:
    """Several sources as one: each tensor comes from the first source that has it."""

    def __init__(self, *sources: TensorSource) -> None:
        self._sources = sources

    def shape(self, name: str) -> tuple[int, ...] | None:
        return next((shape for source in self._sources if (shape := source.shape(name)) is not None), None)

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        source = next(source for source in self._sources if source.shape(name) is not None)
        return source.read(name, offsets, sizes)


class SafetensorsSource:
    """A `weights.chunks.TensorSource` of safetensors files, each opened when first needed and kept open.

    Raises ModelError, with the file's name, if the directory, its index or one of its files is missing or damaged.
    """

    holds = "a Hugging Face model"  # what is expected of the directory, for messages

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self._open: dict[str, Any] = {}
        if not self.directory.is_dir():
            raise ModelError(f"{str(directory)!r} is not a directory, expected {self.holds}")
        self._files = self._find()

    @property
    def names(self) -> Set[str]:
        """The names of all tensors, as the files have them."""
        return self._files.keys()

    def stored(self, name: str) -> str | None:
        """The name that the files have for the tensor `name`; None if they lack it."""
        return name if name in self._files else None

    def shape(self, name: str) -> tuple[int, ...] | None:
        stored = self.stored(name)
        return None if stored is None else tuple(self._slice(stored).get_shape())

    def dtype(self, name: str) -> str | None:
        """The dtype of a tensor by its name in safetensors, such as "BF16"."""
        stored = self.stored(name)
        return None if stored is None else str(self._slice(stored).get_dtype())

    @property
    def dtypes(self) -> Counter[str]:
        """The number of tensors of each dtype, by its name in safetensors, such as "BF16"."""
        return Counter(self._slice(name).get_dtype() for name in self._files)

    def where(self, name: str) -> Path:
        """The file that has the tensor, or else the file that should list it."""
        alone = SINGLE if (self.directory / SINGLE).is_file() else INDEX
        return self.directory / self._files.get(self.stored(name) or "", alone)

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        stored = self.stored(name)
        assert stored is not None, name  # `shape` says which tensors there are
        box = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
        return self._slice(stored)[box] if box else self._opened(self._files[stored]).get_tensor(stored)

    def _find(self) -> dict[str, str]:
        """The file of each tensor: tensor name -> file name. Of a single file and an index, transformers takes the
        single file."""
        if (self.directory / SINGLE).is_file():
            return dict.fromkeys(self._opened(SINGLE).keys(), SINGLE)
        index = self.directory / INDEX
        if index.is_file():
            try:
                return {str(name): str(file) for name, file in json.loads(index.read_bytes())["weight_map"].items()}
            except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise ModelError(f"{index} is damaged, expected JSON with a weight_map ({error!r})") from error
        found = ", ".join(sorted(entry.name for entry in self.directory.iterdir())) or "nothing"
        raise ModelError(f"{self.directory} has no weights: expected {SINGLE} or {INDEX}, found {found}")

    def _opened(self, file: str) -> Any:
        if file not in self._open:
            path = self.directory / file
            try:
                path.open("rb").close()  # safe_open takes any error for a missing file
                self._open[file] = safe_open(str(path), "pt")
            # An empty file cannot be mapped, nor one for which there is no memory, which torch tells as RuntimeError.
            except (SafetensorError, OSError, RuntimeError) as error:
                why = getattr(error, "strerror", None) or first_line(error)  # safetensors' own errors have none
                raise ModelError(f"{path} cannot be read: {why}; download or save it again") from error
        return self._open[file]

    def _slice(self, name: str) -> Any:
        try:
            return self._opened(self._files[name]).get_slice(name)
        except SafetensorError as error:
            raise ModelError(f"{self.directory / self._files[name]} lacks {name!r}: {error}") from error
