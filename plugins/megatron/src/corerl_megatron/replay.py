"""Through which experts each token goes: told by one pass through the model, or told to another (routing replay); and
what routers are told of the balance of their load.

megatron-core's routers ask the object in their `router_replay` for their top-k, where there is one. Its own object
keeps itself in a list of the whole process, and knows one micro-batch at a time; this is the plugin's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from attrs import define, field, frozen
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from corerl.backend.batches import DeviceBatch
from corerl.backend.routing import COLUMN, free_tokens
from corerl.ops.upload import upload
from corerl.types import MicroBatch
from corerl_megatron.balance import Balance, Share, counted
from corerl_megatron.packed import Split, all_gathered
from corerl_megatron.parallel import Groups


@frozen(kw_only=True, eq=False)
class Told:
    """What one layer is told of a micro-batch, of which t tokens pass it on this rank."""

    experts: Tensor | None = None  # [t, k] int64 that they go through; None leaves it to the router
    free: Tensor | None = None  # [t] bool: tokens that choose for themselves all the same; None where none does
    share: Share | None = None  # in the loss that balances; None where there is none


NOTHING = Told()


@define(eq=False)
class Chooser:
    """What one router asks in the place of its own top-k.

    A layer that is recomputed passes twice: without a gradient while its micro-batch passes through the stage, and
    again in that micro-batch's backward pass. Each stage takes micro-batches in one order, forward and backward.
    """

    layer: int  # of the layers of experts
    softmax_first: bool  # the scores it is asked about are probabilities already
    passing: bool = False  # a micro-batch passes through the stage, be it for the first time
    told: Told = NOTHING  # of that micro-batch
    trains: bool = False  # a backward pass will follow
    chosen: Tensor | None = None  # [t, k] of the tokens that have passed last, without a backward pass
    again: deque[Told] = field(factory=deque)  # of micro-batches that will pass a second time, in their order

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Scores and indices [t, k] of the experts, from scores [t, experts]. megatron-core's name and arguments."""
        assert default_compute_topk is not None
        told = self._now_told()
        values, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        experts = own
        if told.experts is not None:
            experts = told.experts if told.free is None else torch.where(told.free[:, None], own, told.experts)
            values = scores.gather(1, experts)
        if told.share is not None and torch.is_grad_enabled():
            values = told.share.balanced(values, scores if self.softmax_first else scores.softmax(1), own)
        if not self.trains:
            self.chosen = experts
        return values, experts

    def _now_told(self) -> Told:
        if not self.passing:
            return self.again.popleft() if self.again else NOTHING
        if self.trains and not torch.is_grad_enabled():
            self.again.append(self.told)
        return self.told


@frozen(kw_only=True, eq=False)
class Routing:
    """The routers of this rank. A model without experts has none."""

    choosers: Sequence[Sequence[Chooser]]  # of each part of this rank's stage
    layers: int  # of experts, in the whole model
    topk: int
    experts: int
    sequence_parallel: bool
    groups: Groups

    @classmethod
    def of(cls, chunks: Sequence[nn.Module], config: TransformerConfig, groups: Groups) -> Routing:
        """Takes every router's choice over."""
        assert not config.moe_router_fusion  # a kernel that asks nobody
        frequency = config.moe_layer_freq if config.num_moe_experts else []
        assert isinstance(frequency, list)
        routers = [[module for module in chunk.modules() if isinstance(module, TopKRouter)] for chunk in chunks]
        for router in (router for part in routers for router in part):
            assert router.layer_number is not None
            router.router_replay = Chooser(
                layer=sum(frequency[: router.layer_number - 1]), softmax_first=config.moe_router_pre_softmax
            )
        return cls(
            choosers=[[router.router_replay for router in part] for part in routers],
            layers=sum(frequency),
            topk=config.moe_router_topk,
            experts=config.num_moe_experts or 0,
            sequence_parallel=config.sequence_parallel,
            groups=groups,
        )

    def begin(self) -> None:
        """Before the first micro-batch. Nothing is left of an earlier run, of one that failed either."""
        for chooser in (chooser for part in self.choosers for chooser in part):
            chooser.passing, chooser.told, chooser.chosen = False, NOTHING, None
            chooser.again.clear()

    @contextmanager
    def passing(
        self,
        part: int,
        micro: MicroBatch,
        inputs: DeviceBatch,
        split: Split | None,
        *,
        trains: bool,
        balance: Balance | None,
    ) -> Iterator[None]:
        """While a micro-batch passes through this part of the stage, its tokens go where its column says, if it has
        one. With `trains` a backward pass follows."""
        share = None if balance is None else self._share(micro, inputs, split, balance)
        replayed = self._replayed(part, micro, inputs, split) if COLUMN in inputs.columns else {}
        for chooser in self.choosers[part]:
            experts, free = replayed.get(chooser.layer, (None, None))
            chooser.told = Told(experts=experts, free=free, share=share)
            chooser.passing, chooser.trains = True, trains
        yield
        for chooser in self.choosers[part]:
            chooser.passing, chooser.told = False, NOTHING

    def chosen(self, part: int, tokens: int, split: Split | None) -> Tensor:
        """[T, layers of this part, k] int32: where the tokens of the micro-batch that has passed last went. Called on
        every rank of the stage."""
        if not self.choosers[part]:
            return torch.zeros(tokens, 0, self.topk, dtype=torch.int32)
        chosen = [chooser.chosen for chooser in self.choosers[part]]
        local = torch.stack([each for each in chosen if each is not None], dim=1).int()
        if self.sequence_parallel:
            local = all_gathered(local, self.groups.tensor)
        if split is not None:
            local = all_gathered(local, self.groups.context).index_select(0, split.restore)
        return local.cpu()

    def whole(self, parts: Sequence[Tensor], device: torch.device) -> Tensor:
        """[T, layers, k] int16 of one micro-batch, from what each part of each stage has `chosen`. Called on every
        rank."""
        layers = [chooser.layer for part in self.choosers for chooser in part]
        total = torch.zeros(len(parts[0]), self.layers, self.topk, dtype=torch.int32, device=device)
        total[:, layers] = torch.cat([*parts], dim=1).to(device)
        if self.groups.pipeline.size() > 1:
            torch.distributed.all_reduce(total, group=self.groups.pipeline)  # 0 where another stage has the layer
        return total.to(torch.int16).cpu()

    def _share(self, micro: MicroBatch, inputs: DeviceBatch, split: Split | None, step: Balance) -> Share:
        counts = counted(micro)
        local = self._local(upload(counts, inputs.tokens.device), split)
        return Share(counts=local[:, None], tokens=int(counts.sum()), group=self.groups.tokens, step=step)

    def _replayed(
        self, part: int, micro: MicroBatch, inputs: DeviceBatch, split: Split | None
    ) -> dict[int, tuple[Tensor, Tensor | None]]:
        """By layer, the experts of this rank's tokens, and which are free. Raises ModelError where the column is none
        of this model."""
        free = free_tokens(micro, layers=self.layers, topk=self.topk, experts=self.experts)
        experts = self._local(inputs.columns[COLUMN], split).long()
        alone = None if free is None else self._local(upload(free, experts.device), split)
        return {
            chooser.layer: (experts[:, chooser.layer], None if alone is None else alone[:, chooser.layer])
            for chooser in self.choosers[part]
        }

    def _local(self, tokens: Tensor, split: Split | None) -> Tensor:
        """Of [T, ...] the tokens that this rank's routers see."""
        if split is not None:
            tokens = tokens[split.local]
        tensor = self.groups.tensor
        return tokens.chunk(tensor.size())[tensor.rank()] if self.sequence_parallel else tokens
