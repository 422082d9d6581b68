"""Read the experts that routers choose, replay given experts (routing replay), and add the load-balancing loss.

megatron-core's routers ask the object in their `router_replay`, if any, for their top-k. Its own class registers
itself in a process-wide list and handles one micro-batch at a time; this module replaces it.
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

from corerl.backend import DeviceBatch, counted, free_tokens
from corerl.ops import upload
from corerl.types import MicroBatch, Output
from corerl_megatron.balance import Balance, Share
from corerl_megatron.packed import Split, all_gathered
from corerl_megatron.parallel import Groups


@frozen(kw_only=True, eq=False)
class MicroBatchRouting:
    """How one layer routes a micro-batch, whose t tokens on this rank pass through it."""

    experts: Tensor | None = None  # [t, k] int64 experts of the tokens; None lets the router choose
    free: Tensor | None = None  # [t] bool: tokens for which the router chooses nevertheless; None for no token
    counts: Tensor | None = None  # [t, 1] bool: which tokens count to the load of experts; None if none does
    share: Share | None = None  # of the balancing loss; None without one


NOTHING = MicroBatchRouting()


@define(eq=False)
class Chooser:
    """Replaces the top-k of one router.

    A recomputed layer runs twice for a micro-batch: without gradient in the stage's forward pass, and again in the
    backward pass. Each stage takes micro-batches in the same order, forward and backward.
    """

    layer: int  # index among the MoE layers
    softmax_first: bool  # whether the router's scores are already probabilities
    passing: bool = False  # whether a micro-batch is in the stage's forward pass
    current: MicroBatchRouting = NOTHING  # of that micro-batch
    trains: bool = False  # whether a backward pass will follow
    chosen: Tensor | None = None  # [t, k] experts in the last pass without a backward pass
    load: Tensor | None = None  # [experts] how often each was chosen in the passes with one
    again: deque[MicroBatchRouting] = field(factory=deque)  # of micro-batches that will be recomputed, in order

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Scores and indices [t, k] of the experts, from scores [t, experts]; megatron-core defines the signature."""
        assert default_compute_topk is not None
        routing = self._of_this_pass()
        allowed = of_best_groups(scores, num_groups, group_topk) if num_groups and group_topk else scores
        values, own = default_compute_topk(allowed, topk)
        experts = own
        if routing.experts is not None:
            experts = routing.experts
            if routing.free is not None:
                experts = torch.where(routing.free[:, None], own, experts)
            values = scores.gather(1, experts)
        if routing.share is not None and torch.is_grad_enabled():
            values = routing.share.balanced(values, scores if self.softmax_first else scores.softmax(1), own)
        if not self.trains:
            self.chosen = experts
        elif self.passing and routing.counts is not None:
            often = torch.zeros_like(scores).scatter(1, experts, 1.0).mul(routing.counts).sum(0).detach()
            self.load = often if self.load is None else self.load + often
        return values, experts

    def _of_this_pass(self) -> MicroBatchRouting:
        if not self.passing:
            return self.again.popleft() if self.again else NOTHING
        if self.trains and not torch.is_grad_enabled():
            self.again.append(self.current)
        return self.current


def of_best_groups(scores: Tensor, groups: int, best: int) -> Tensor:
    """`scores` [t, experts], but -inf for experts that are not in a token's `best` of so many equal groups. A group's
    score is the sum of its two largest (DeepSeek-V3, DeepSeek-AI 2024), which megatron-core sums as many of as experts
    are chosen in a group."""
    of_groups = scores.unflatten(1, (groups, -1)).topk(2, dim=2).values.sum(2)
    kept = torch.zeros_like(of_groups, dtype=torch.bool).scatter(1, of_groups.topk(best, dim=1).indices, True)
    return scores.masked_fill(~kept.repeat_interleave(scores.shape[1] // groups, dim=1), -torch.inf)


@frozen(kw_only=True, eq=False)
class Routing:
    """Controls the routers of this rank; a dense model has none."""

    choosers: Sequence[Sequence[Chooser]]  # for each part of this rank's stage
    layers: int  # number of MoE layers in the whole model
    topk: int
    experts: int
    sequence_parallel: bool
    groups: Groups

    @classmethod
    def of(cls, chunks: Sequence[nn.Module], config: TransformerConfig, groups: Groups) -> Routing:
        """Take over every router's choice."""
        assert not config.moe_router_fusion  # the fused kernel cannot be overridden
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
        """Called before the first micro-batch: clears the state of earlier runs, even failed ones."""
        for chooser in (chooser for part in self.choosers for chooser in part):
            chooser.passing, chooser.current, chooser.chosen, chooser.load = False, NOTHING, None, None
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
        """Within the block, in which a micro-batch passes through this part of the stage, replay the experts in its
        column, if it has one. With `trains` a backward pass follows."""
        counts, share = None, None
        if trains and self.choosers[part]:
            real = counted(micro)
            counts = self._local(upload(real, inputs.tokens.device), split)[:, None]
            if balance is not None:
                share = Share(counts=counts, tokens=int(real.sum()), group=self.groups.tokens, step=balance)
        replayed = self._replayed(part, micro, inputs, split) if Output.ROUTED_EXPERTS in inputs.columns else {}
        for chooser in self.choosers[part]:
            experts, free = replayed.get(chooser.layer, (None, None))
            chooser.current = MicroBatchRouting(experts=experts, free=free, counts=counts, share=share)
            chooser.passing, chooser.trains = True, trains
        yield
        for chooser in self.choosers[part]:
            chooser.passing, chooser.current = False, NOTHING

    def load(self, device: torch.device) -> Tensor:
        """[layers, experts] how often this rank's tokens went through each expert in the last run; 0 in layers of other
        stages. Ranks that compute the same tokens all count them."""
        total = torch.zeros(self.layers, self.experts, device=device)
        for chooser in (chooser for part in self.choosers for chooser in part):
            if chooser.load is not None:
                total[chooser.layer] = chooser.load
        return total

    def chosen(self, part: int, tokens: int, split: Split | None) -> Tensor:
        """[T, layers of this part, k] int32 experts of the last micro-batch's tokens. Called on every rank of the
        stage."""
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
        """[T, layers, k] int16 experts of one micro-batch, from what each part of this rank's stage has `chosen`.
        Called on every rank."""
        layers = [chooser.layer for part in self.choosers for chooser in part]
        total = torch.zeros(len(parts[0]), self.layers, self.topk, dtype=torch.int32, device=device)
        total[:, layers] = torch.cat([*parts], dim=1).to(device)
        if self.groups.pipeline.size() > 1:
            torch.distributed.all_reduce(total, group=self.groups.pipeline)  # 0 for layers of other stages
        return total.to(torch.int16).cpu()

    def _replayed(
        self, part: int, micro: MicroBatch, inputs: DeviceBatch, split: Split | None
    ) -> dict[int, tuple[Tensor, Tensor | None]]:
        """By layer, the experts of this rank's tokens, and which tokens are free. Raises ModelError if the column does
        not fit this model."""
        free = free_tokens(micro, layers=self.layers, topk=self.topk, experts=self.experts)
        experts = self._local(inputs.columns[Output.ROUTED_EXPERTS], split).long()
        alone = None if free is None else self._local(upload(free, experts.device), split)
        return {
            chooser.layer: (experts[:, chooser.layer], None if alone is None else alone[:, chooser.layer])
            for chooser in self.choosers[part]
        }

    def _local(self, tokens: Tensor, split: Split | None) -> Tensor:
        """The tokens of [T, ...] that this rank's routers see."""
        if split is not None:
            tokens = tokens[split.local]
        tensor = self.groups.tensor
        return tokens.chunk(tensor.size())[tensor.rank()] if self.sequence_parallel else tokens
