"""Pictures in prompts: what a row holds of them, and the classes with which a wheel reads files and has a tower.

A picture is read once, in the driver, at the size at which the model's tower takes it, and from there on known by its
content. Rows hold the tokens that stand for it; its pixels travel with the batch, once, however many rows show it.

Axes: H rows and W columns of pixels, n tokens of one picture, T packed tokens, S sequences.
"""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from attrs import frozen

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.nn import Parameter
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from corerl.backend.primitives import StateKey
    from corerl.config.schema import ModelConfig, OptimizerConfig, RoleConfig
    from corerl.types import Array, IntArray, MemoryKind, MicroBatch
    from corerl.weights.chunks import Chunk

Key = TypeVar("Key")

PICTURES = "pictures"  # of a run's directory: files of the pictures that its end shows
REPR = re.compile(r"<picture [0-9a-f]{4} \d+x\d+>")  # of a picture, in the prompts of shown samples


@frozen(eq=False, slots=False)
class Picture:
    """A picture at its model's size. Two of equal pixels are the same picture."""

    pixels: Array  # [H, W, 3] uint8, RGB; not to be written to

    @cached_property
    def id(self) -> str:
        """The digest of its size and pixels, in hex."""
        digest = hashlib.sha256(repr(self.pixels.shape).encode())
        digest.update(np.ascontiguousarray(self.pixels).data)
        return digest.hexdigest()

    @property
    def size(self) -> tuple[int, int]:
        """(W, H), as picture files and libraries give it."""
        return self.pixels.shape[1], self.pixels.shape[0]

    def __repr__(self) -> str:
        return f"<picture {self.id[:4]} {self.size[0]}x{self.size[1]}>"


@frozen(kw_only=True, eq=False, slots=False)
class FoundPicture:
    """A picture that a row refers to, read once something asks for it. Pickled, it is the picture."""

    reader: PictureReader
    reference: Any

    @cached_property
    def picture(self) -> Picture:
        """Raises `corerl.data.Refused`."""
        return self.reader.read(self.reference)

    @property
    def id(self) -> str:
        return self.picture.id

    @property
    def size(self) -> tuple[int, int]:
        return self.picture.size

    @property
    def pixels(self) -> Array:
        return self.picture.pixels

    def __repr__(self) -> str:
        return repr(self.picture)

    def __reduce__(self) -> Any:
        return _same, (self.picture,)


def _same(picture: Picture) -> Picture:
    return picture


def read(picture: Picture | FoundPicture) -> Picture:
    """Raises `corerl.data.Refused`."""
    return picture if isinstance(picture, Picture) else picture.picture


def name_of(picture: Picture | FoundPicture) -> str:
    """What files and samples call it: the beginning of its id."""
    return picture.id[:16]


def save_pictures(pictures: Iterable[Picture | FoundPicture], run_dir: Path) -> None:
    """Write those that have no file yet to RUN_DIR/pictures/NAME.png, with Pillow, which comes with what reads them."""
    for picture in pictures:
        path = run_dir / PICTURES / f"{name_of(picture)}.png"
        if not path.exists():
            from PIL import Image

            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(".part")
            Image.fromarray(picture.pixels).save(part, "PNG", compress_level=1)
            part.replace(path)


class PictureReader(ABC):
    """Finds and reads the pictures of a run's rows, in the driver, for one model."""

    placeholder: int  # the id of the token that stands where the tower's features go
    mark: int  # the id of the one token that a chat template writes for each picture, for most models the placeholder

    @abstractmethod
    def __init__(self, options: Any, model: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        """`options` is an instance of the spec's config class. Raises ModelError for a model whose pictures it cannot
        prepare."""

    @abstractmethod
    def find(self, row: Mapping[str, Any], prompt: Any, *, root: str) -> tuple[Any, Sequence[Any]]:
        """The prompt of a row, a text or messages, with a mark where each picture goes, and a reference to each of
        them, in this order: what `read` takes, and whose text (`str`) is that of no other picture. In messages the
        mark is the part `{"type": "image"}`, as chat templates expect it, in a text what the model's own template would
        write. `root` is the directory of the row's file. Looks at the beginnings of files only. Raises
        `corerl.data.Refused` for what cannot be shown to the model."""

    @abstractmethod
    def read(self, reference: Any) -> Picture:
        """Decode and resize a picture; a picture that is alive is not decoded again. Several threads may call it.
        Raises `corerl.data.Refused`."""

    @abstractmethod
    def expand(self, picture: Picture) -> IntArray:
        """[n] the tokens that take the place of the one token that a chat template writes for it: as many
        `placeholder`s as the tower gives features, and what the model's processor writes between them."""


class PictureInputs(ABC):
    """Prepares pictures for the tower of a model, in each rank and in engines that run transformers' own classes."""

    placeholder: int  # as of `PictureReader`

    @abstractmethod
    def __init__(self, model: ModelConfig) -> None: ...

    @abstractmethod
    def inputs(self, pictures: Sequence[Picture]) -> Mapping[str, Array]:
        """The arguments of the model's `get_image_features`, such as `pixel_values` and `image_grid_thw`, for these
        pictures together. Several threads may call it."""

    @abstractmethod
    def tower(self, decoder: PreTrainedModel, module: PreTrainedModel | None = None) -> Tower:
        """What shows pictures to `decoder`. The tower's weights are in `module`: another model of the same class,
        without the text decoder, or `decoder` itself, of a model that is built whole. Raises ModelError if that class
        cannot be shown pictures."""


@frozen(eq=False)
class Seen:
    """The pictures of one micro-batch."""

    features: tuple[tuple[Any, ...], ...]  # [S] of each sequence, in the order in which it shows them
    slots: Tensor  # [T] bool: where the features go


class Tower(ABC):
    """The part of a model that reads pictures, as a pass of its own, and how the decoder gets what that makes of them
    in the place of placeholders. What it makes of a picture, its features, nobody else looks into."""

    module: PreTrainedModel  # has its weights

    @abstractmethod
    def encode(self, pictures: Mapping[Key, Picture], device: torch.device) -> dict[Key, Any]:
        """The features of pictures, by the same keys."""

    @abstractmethod
    def seen(self, micro: MicroBatch, features: Mapping[int, Any], device: torch.device) -> Seen | None:
        """The pictures of a micro-batch, by the numbers in its column; None if it shows none. Raises ModelError if a
        picture has more or fewer placeholders than features."""

    @abstractmethod
    def shown(self, tokens: Tensor, seen: Seen | None) -> Tensor:
        """[T] tokens without placeholders that stand for no picture: a policy may sample one, as the last of a row."""

    @abstractmethod
    def positions(self, tokens: Tensor, positions: Tensor, bounds: IntArray, seen: Seen) -> Tensor:
        """[3, 1, T] where the class numbers positions of pictures in three directions, sequence by sequence; else
        [1, T], as they are."""

    @abstractmethod
    def kinds_of_tokens(self, slots: Tensor) -> dict[str, Tensor]:
        """The argument of decoders that let the tokens of one picture see each other: 1 at its features, of rows."""

    @abstractmethod
    def showing(self, features: Sequence[Any]) -> AbstractContextManager[dict[str, Any]]:
        """Within the block, the decoder's own call of its tower gives these features, in the order of its rows; yields
        the arguments that make it call that."""

    @abstractmethod
    def on_rank(self, config: RoleConfig, *, device: torch.device, group: ProcessGroup | None) -> RankTower:
        """The tower of one of the ranks of `group`, with weights that are allocated and not loaded."""


class RankTower(ABC):
    """Encodes the pictures of a pass before its micro-batches, each once, so that no collective of the decoder depends
    on which rows or ranks show any. Holds the weights and, if they are trained, gradients and optimizer."""

    adam_step = 0  # steps taken, for Adam's bias correction: fewer than the backend's where steps show no picture

    @abstractmethod
    def encode(self, pictures: Mapping[int, Picture]) -> dict[int, Any]:
        """The features of pictures by number, which stay on the device. Local, as are all passes."""

    @abstractmethod
    def leaves(self, pictures: Mapping[int, Picture]) -> dict[int, Any]:
        """As `encode`; of a tower that is trained, features whose gradients `backward` passes on."""

    @abstractmethod
    def backward(self, pictures: Mapping[int, Picture], leaves: Mapping[int, Any]) -> None:
        """Add to the gradients of the weights what follows from those of the features."""

    @abstractmethod
    def seen(self, micro: MicroBatch, features: Mapping[int, Any]) -> Seen | None:
        """As of `Tower`."""

    @abstractmethod
    def reduced(self) -> list[Parameter]:
        """The parameters that are trained, with gradients that are the average of the ranks', or none where no rank has
        any. Called on every rank once a step."""

    @abstractmethod
    def step(self, lr: float, config: OptimizerConfig | None = None) -> None:
        """Step with the gradients there are, as the caller has clipped them, and with all else that `config` says; by
        default the role's `[train.optimizer]`. Counted in `adam_step` if there are any."""

    @abstractmethod
    def drop_gradients(self) -> None: ...

    @abstractmethod
    def chunks(self, key: StateKey) -> list[Chunk]:
        """The HF tensors of the tower; of a frozen one there are no masters and moments. Missing moments are created,
        as after `adam_step` steps."""

    @abstractmethod
    def tensors(self, kind: MemoryKind) -> list[Tensor]:
        """As of a backend; gradients stay on the device."""
