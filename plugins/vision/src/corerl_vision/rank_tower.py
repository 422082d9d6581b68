"""A tower whole on every rank, whatever the backend does with the rest of the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from attrs import evolve
from torch import Tensor, nn

from corerl.backend import StateKey, adamw, moments, set_adam
from corerl.config import OptimizerConfig, RoleConfig
from corerl.models import hf_boxes, local_chunks, materialize, move_buffers
from corerl.pictures import Picture, RankTower, Seen
from corerl.types import MemoryKind, MicroBatch
from corerl.weights import Chunk
from corerl_vision.tower import Features, VisionTower

FLAT = 2**26  # elements of gradients that ranks sum up at once


class VisionRankTower(RankTower):
    """Frozen, the weights are in the precision of passes. Trained, they are float32 with an AdamW of their own, and
    passes compute with copies in the precision of passes; once a step, gradients are averaged over the ranks."""

    def __init__(
        self, tower: VisionTower, config: RoleConfig, *, device: torch.device, group: dist.ProcessGroup | None
    ) -> None:
        self._tower, self._device, self._group = tower, device, group
        self.trained = config.model.tower == "trained" and not config.frozen
        self._compute: torch.dtype = getattr(torch, config.train.precision)
        self._config = config.train.optimizer
        self._boxes = hf_boxes(tower.module)
        held = torch.float32 if self.trained else self._compute
        shapes = {name: tuple(param.shape) for name, param in tower.module.named_parameters()}
        self._params = {
            name: nn.Parameter(torch.empty(shape, dtype=held, device=device), requires_grad=self.trained)
            for name, shape in shapes.items()
        }
        materialize(tower.module, self._params)
        move_buffers(tower.module, device)
        tower.module.eval()
        self._optimizer: torch.optim.AdamW | None = None
        if self.trained:
            self._optimizer = adamw(self._params, shapes, config.train.optimizer, fused=device.type == "cuda")

    # ---- passes ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def encode(self, pictures: Mapping[int, Picture]) -> dict[int, Features]:
        made: dict[int, Features] = {}
        for part in self._encoded(pictures):
            made |= part
        return made

    def leaves(self, pictures: Mapping[int, Picture]) -> dict[int, Features]:
        features = self.encode(pictures)
        if not self.trained:
            return features
        # Of float32: micro-batches add their gradients up in them.
        return {
            number: evolve(
                each,
                states=each.states.float().requires_grad_(),
                deep=tuple(layer.float().requires_grad_() for layer in each.deep),
            )
            for number, each in features.items()
        }

    def backward(self, pictures: Mapping[int, Picture], leaves: Mapping[int, Features]) -> None:
        """Each picture is encoded a second time, so that activations of a few are kept at once."""
        if not self.trained:
            return
        for part in self._encoded(pictures):
            own = list(_states(leaves[number] for number in part))
            found = list(_states(part.values()))
            pairs = [
                (states, leaf.grad.to(states.dtype))
                for states, leaf in zip(found, own, strict=True)
                if leaf.grad is not None
            ]
            if pairs:  # fillers have none
                torch.autograd.backward([states for states, _ in pairs], [grad for _, grad in pairs])

    def seen(self, micro: MicroBatch, features: Mapping[int, Features]) -> Seen | None:
        return self._tower.seen(micro, features, self._device)

    def _encoded(self, pictures: Mapping[int, Picture]) -> Iterator[dict[int, Features]]:
        """The features of pictures by number, a few at a time."""
        apart = any(param.dtype != self._compute for param in self._params.values())
        return self._tower.in_parts(pictures, self._device, self._cast if apart else None)

    def _cast(self) -> dict[str, Tensor]:
        """The weights in the precision of passes."""
        return {name: param.to(self._compute) for name, param in self._params.items()}

    # ---- steps -------------------------------------------------------------------------------------------------------

    def reduced(self) -> list[nn.Parameter]:
        """An all-reduce of a byte a parameter, and for each `FLAT` elements a reduce and a broadcast."""
        if not self.trained:
            return []
        params = list(self._params.values())
        if self._group is None or dist.get_world_size(self._group) == 1:
            return params
        has = torch.tensor([param.grad is not None for param in params], dtype=torch.uint8, device=self._device)
        dist.all_reduce(has, op=dist.ReduceOp.MAX, group=self._group)
        # What no rank has a gradient for, as where no row shows a picture, is not stepped.
        stepped = [param for param, anywhere in zip(params, has.tolist(), strict=True) if anywhere]
        for part in _parts_of(stepped):
            grads = [torch.zeros_like(param) if param.grad is None else param.grad for param in part]
            flat = torch.cat([grad.flatten() for grad in grads])
            # Not all-reduced: ranks that add in another order would drift apart.
            first = dist.get_global_rank(self._group, 0)
            dist.reduce(flat, dst=first, group=self._group)
            flat /= dist.get_world_size(self._group)
            dist.broadcast(flat, src=first, group=self._group)
            for param, values in zip(part, flat.split([param.numel() for param in part]), strict=True):
                param.grad = values.view_as(param)
        return params

    def step(self, lr: float, config: OptimizerConfig | None = None) -> None:
        if self._optimizer is not None:
            set_adam(self._optimizer, evolve(config or self._config, lr=lr))
            self.adam_step += any(param.grad is not None for param in self._params.values())
            self._optimizer.step()

    def drop_gradients(self) -> None:
        for param in self._params.values():
            param.grad = None

    # ---- state -------------------------------------------------------------------------------------------------------

    def chunks(self, key: StateKey) -> list[Chunk]:
        if key is not StateKey.PARAM and not self.trained:
            return []
        replica = self._group is not None and dist.get_rank(self._group) > 0
        chunks: list[Chunk] = []
        for name, param in self._params.items():
            values = param.detach()
            if key in (StateKey.EXP_AVG, StateKey.EXP_AVG_SQ):
                assert self._optimizer is not None
                values = moments(self._optimizer, param, self.adam_step)[key.value]
            chunks += local_chunks(self._boxes[name], (0,) * param.dim(), tuple(param.shape), values, replica=replica)
        return chunks

    def tensors(self, kind: MemoryKind) -> list[Tensor]:
        if kind is MemoryKind.PARAM:
            return list(self._params.values())
        if kind is MemoryKind.OPTIMIZER and self._optimizer is not None:
            return [value for state in self._optimizer.state.values() for value in state.values()]
        return []


def _parts_of(params: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """The parameters in order, in parts of at least `FLAT` elements but for the last."""
    part: list[nn.Parameter] = []
    for param in params:
        part.append(param)
        if sum(each.numel() for each in part) >= FLAT:
            yield part
            part = []
    if part:
        yield part


def _states(features: Iterable[Features]) -> Iterator[Tensor]:
    for each in features:
        yield each.states
        yield from each.deep
