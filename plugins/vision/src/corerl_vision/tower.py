"""The tower of a model that reads pictures, as a pass of its own: what it makes of each picture, and how the decoder
gets that in the place of placeholders.

Axes: T packed tokens, n features of one picture, H hidden.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from corerl.config import RoleConfig
from corerl.errors import ModelError
from corerl.pictures import Picture, PictureInputs, RankTower, Seen, Tower
from corerl.types import PICTURE, IntArray, MicroBatch

Key = TypeVar("Key")
AHEAD = 8  # parts of a pass's pictures whose inputs are made at once
TYPES = "mm_token_type_ids"
STATES, DEEP = "pooler_output", "deepstack_features"  # in the outputs of towers
PIXELS = 2**20  # of the pictures that go through a tower at once
GRID = "image_grid_thw"  # the argument of towers whose decoders number positions in three directions


@frozen(eq=False)
class Features:
    """What a tower makes of one picture."""

    states: Tensor  # [n, H]
    deep: tuple[Tensor, ...] = ()  # each [n, H]: what the decoder's first layers add, one by one
    grid: Tensor | None = None  # [3] frames, rows and columns of patches, if the decoder's positions follow from them


class VisionTower(Tower):
    """Calls the class's own `get_image_features`, and gives the decoder what came out when it calls that itself."""

    def __init__(self, decoder: PreTrainedModel, inputs: PictureInputs, module: PreTrainedModel | None = None) -> None:
        if not hasattr(decoder, "get_image_features"):
            raise ModelError(f"{type(decoder).__name__} has no get_image_features: it cannot be shown pictures")
        self.decoder, self.inputs, self.module = decoder, inputs, decoder if module is None else module
        self.encoded = 0  # pictures that have gone through the tower
        self._forms: dict[str, Any] = {}  # of the tower's outputs, as the decoder expects them
        self._call = _Call(self.module)

    def on_rank(self, config: RoleConfig, *, device: torch.device, group: dist.ProcessGroup | None) -> RankTower:
        from corerl_vision.rank_tower import VisionRankTower  # engines need none, nor a backend's code

        return VisionRankTower(self, config, device=device, group=group)

    def encode(self, pictures: Mapping[Key, Picture], device: torch.device) -> dict[Key, Features]:
        made: dict[Key, Features] = {}
        for part in self.in_parts(pictures, device):
            made |= part
        return made

    def in_parts(
        self,
        pictures: Mapping[Key, Picture],
        device: torch.device,
        weights: Callable[[], Mapping[str, Tensor]] | None = None,
    ) -> Iterator[dict[Key, Features]]:
        """The features of pictures by key, a few at a time. `weights`, asked for each part, are by parameter name; by
        default they are the module's own."""
        parts = list(parts_of(pictures))
        shown = [[pictures[key] for key in part] for part in parts]
        for keys, own, prepared in zip(parts, shown, self._prepared(shown), strict=True):
            made = self._encode(own, device, prepared=prepared, weights=None if weights is None else weights())
            yield dict(zip(keys, made, strict=True))

    def _prepared(self, parts: Sequence[Sequence[Picture]]) -> Iterator[dict[str, Tensor]]:
        """The inputs of each of these parts on the host, some made ahead: it takes longer than a pass on a GPU."""
        with ThreadPoolExecutor(min(AHEAD, max(1, len(parts)))) as threads:
            waiting = deque[Future[dict[str, Tensor]]]()
            for part in parts:
                waiting.append(threads.submit(self._prepare, part))
                if len(waiting) == AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()

    def _prepare(self, pictures: Sequence[Picture]) -> dict[str, Tensor]:
        return {name: torch.as_tensor(np.array(each)) for name, each in self.inputs.inputs(pictures).items()}

    def _encode(
        self,
        pictures: Sequence[Picture],
        device: torch.device,
        *,
        prepared: Mapping[str, Tensor],
        weights: Mapping[str, Tensor] | None,
    ) -> list[Features]:
        """What the tower makes of these pictures, together in one call: of their `prepared` inputs, with these
        `weights`."""
        grids = prepared.get(GRID)
        given = {name: each.to(device) for name, each in prepared.items()}
        if weights is None:
            made: Any = self._call(**given)
        else:
            made = functional_call(self._call, {f"module.{name}": each for name, each in weights.items()}, (), given)
        self.encoded += len(pictures)
        outputs = {name: getattr(made, name, None) for name in (STATES, DEEP)}
        self._forms = {name: _emptied(each) for name, each in outputs.items() if each is not None}
        states = self._apart(outputs[STATES], len(pictures))
        lengths = [len(own) for own in states]
        deep = [  # transformers 5.12 gives one tensor for all pictures, of whatever sizes
            each.flatten(0, -2).split(lengths) if isinstance(each, Tensor) else each for each in outputs[DEEP] or ()
        ]
        return [
            Features(own, tuple(layer[place] for layer in deep), None if grids is None else grids[place])
            for place, own in enumerate(states)
        ]

    def _apart(self, values: Any, count: int) -> list[Tensor]:
        """[n, H] of each picture; towers give a tensor for each, or one [pictures, n, H] or [pictures * n, H]."""
        if not isinstance(values, Tensor):
            return list(values)
        return list(values.unbind() if values.dim() == 3 else values.chunk(count))

    def seen(self, micro: MicroBatch, features: Mapping[int, Features], device: torch.device) -> Seen | None:
        numbers = micro.columns.get(PICTURE)
        if numbers is None or not numbers.any():
            return None
        slots = (numbers > 0) & (micro.tokens == self.inputs.placeholder)
        lengths = {number: len(each.states) for number, each in features.items()}
        shown = []
        for start, end in pairwise(micro.cu_seqlens.tolist()):
            own = _in_order(numbers[start:end][slots[start:end]], lengths)
            shown.append(tuple(features[number] for number in own))
        return Seen(tuple(shown), torch.as_tensor(slots, device=device))

    def shown(self, tokens: Tensor, seen: Seen | None) -> Tensor:
        stray = tokens == self.inputs.placeholder
        if seen is not None:
            stray = stray & ~seen.slots
        return torch.where(stray, 0 if self.inputs.placeholder else 1, tokens)

    @contextmanager
    def showing(self, features: Sequence[Features]) -> Iterator[dict[str, Any]]:
        made = SimpleNamespace(pooler_output=_like(self._forms[STATES], [each.states for each in features]))
        if (deep := self._forms.get(DEEP)) is not None:
            layers = [[each.deep[layer] for each in features] for layer in range(len(deep))]
            made.deepstack_features = [_like(form, layer) for form, layer in zip(deep, layers, strict=True)]

        # `generate` of newer transformers calls it, before the decoder would, with the arguments that it names.
        def given(pixel_values: Tensor | None = None, *_: Any, **__: Any) -> Any:
            return made

        self.decoder.__dict__["get_image_features"] = given
        try:
            yield {"pixel_values": features[0].states}
        finally:
            del self.decoder.__dict__["get_image_features"]

    def positions(self, tokens: Tensor, positions: Tensor, bounds: IntArray, seen: Seen) -> Tensor:
        number = getattr(self.decoder, "get_rope_index", None)
        if number is None or any(each.grid is None for own in seen.features for each in own):
            return positions[None]
        takes = inspect.signature(number).parameters
        # On the host, where the tokens come from: a device would be waited for at each sequence.
        read, slots, found = tokens.cpu(), seen.slots.cpu(), positions.cpu().expand(3, 1, -1).clone()
        for (start, end), own in zip(pairwise(bounds.tolist()), seen.features, strict=True):
            grids = [each.grid for each in own if each.grid is not None]
            if not grids:
                continue
            arguments: dict[str, Any] = {GRID: torch.stack(grids)}
            if TYPES in takes:
                arguments[TYPES] = slots[None, start:end].int()
            numbered, _ = number(read[None, start:end], **arguments)
            found[:, :, start:end] = numbered
        return found.to(positions.device)

    def kinds_of_tokens(self, slots: Tensor) -> dict[str, Tensor]:
        takes = inspect.signature(self.decoder.forward).parameters
        return {name: slots.int() for name in (TYPES, "token_type_ids") if name in takes}


def parts_of(pictures: Mapping[Key, Picture]) -> Iterator[list[Key]]:
    """The keys of pictures, in order, in parts of at most `PIXELS`, or of one: what may go through a tower at once."""
    part: list[Key] = []
    pixels = 0
    for key, picture in pictures.items():
        own = picture.size[0] * picture.size[1]
        if part and pixels + own > PIXELS:
            yield part
            part, pixels = [], 0
        part.append(key)
        pixels += own
    if part:
        yield part


class _Call(nn.Module):
    """Makes of the call of a tower a module's forward pass, for which torch can replace weights."""

    def __init__(self, module: PreTrainedModel) -> None:
        super().__init__()
        self.module = module

    def forward(self, **inputs: Tensor) -> Any:
        features: Any = self.module.get_image_features
        return features(**inputs, return_dict=True)


def _in_order(numbers: IntArray, lengths: Mapping[int, int]) -> list[int]:
    """The pictures whose placeholders have these numbers, one by one; `lengths` are of their features."""
    shown: list[int] = []
    at = 0
    while at < len(numbers):
        number = int(numbers[at])
        end = at + lengths[number]
        if (found := int((numbers[at:end] == number).sum())) != lengths[number]:
            raise ModelError(
                f"picture {number} has {found} placeholders in a row, its tower {lengths[number]} features"
            )
        shown.append(number)
        at = end
    return shown


def _emptied(values: Any) -> Any:
    """The same form without the numbers."""
    if isinstance(values, Tensor):
        return values.new_empty((0,) * values.dim())
    return type(values)(_emptied(each) for each in values)


def _like(form: Any, parts: Sequence[Tensor]) -> Any:
    """The parts in the form, and the dtype, in which a tower gave them."""
    held = form if isinstance(form, Tensor) else next(iter(form), None)
    cast = [part if held is None else part.to(held.dtype) for part in parts]
    if not isinstance(form, Tensor):
        return cast if isinstance(form, list) else tuple(cast)
    return torch.stack(cast) if form.dim() == 3 else torch.cat(cast)
