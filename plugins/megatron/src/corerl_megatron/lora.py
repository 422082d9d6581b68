"""Low-rank adapters beside megatron-core's linear layers: W x becomes W x + scale B (A x), with an A and a B for each
layer of the Hugging Face model that is in W.

A module of megatron-core keeps its parameters and their names. A hook adds the adapters to what it returns, so that it
does not matter whether torch or TransformerEngine multiplies.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from attrs import frozen
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.router import Router
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from torch import Tensor, nn
from torch.nn.functional import linear

from corerl.config import LoraConfig, RoleConfig
from corerl.errors import Unsupported
from corerl.messages import listed
from corerl.models import VALUE_HEAD_WEIGHT, hf_config, meta_model, targets_in
from corerl.weights import adapters_of, all_gather_json
from corerl_megatron.chunks import Held, Piece
from corerl_megatron.model import PackedModel
from corerl_megatron.parallel import Groups

SHOWN = 3  # tensors that an error names
ADAPTER = "adapter"  # the name of an adapter's module in that of its layer
ROWS, COLUMNS = 0, 1  # the dims of W that tensor-parallel ranks split: in column-parallel and in row-parallel layers


class Adapter(nn.Module):
    """The adapters of one weight W [out, in] of this rank, in which there are the weights of n Hugging Face layers.

    `lora_A` [n rank, in] has their matrices A, one below the other. `lora_B` [rows, rank] has the rows of their
    matrices B in the order in which W has those layers' rows: row i belongs to row `at[i]` of W, and to layer `of[i]`.

    What tensor-parallel ranks exchange are the n rank values of A x for each token, not the inputs or outputs of W. A
    matrix that each rank has whole gets the same whole gradient on every rank; or with sequence parallelism the part
    of its rank's tokens, which megatron-core sums over the ranks for parameters that are marked so.
    """

    def __init__(
        self, weight: Tensor, *, at: Tensor, of: Tensor, lora: LoraConfig, split: int | None, sequence_parallel: bool
    ) -> None:
        super().__init__()
        assert lora.rank is not None
        self.rank, self.scale = lora.rank, lora.scale
        self.layers, self.rows = int(of.max()) + 1, len(weight)
        self.at, self.of = at, of
        self.split, self.sequence_parallel = split, sequence_parallel
        self.lora_A = nn.Parameter(weight.new_empty(self.layers * self.rank, weight.shape[1]))
        self.lora_B = nn.Parameter(weight.new_empty(len(at), self.rank))
        # Read by megatron-core.
        self.lora_A.sequence_parallel = sequence_parallel and split != COLUMNS  # type: ignore[attr-defined]
        self.lora_B.sequence_parallel = sequence_parallel and split != ROWS  # type: ignore[attr-defined]

    def forward(self, x: Tensor, given: Tensor) -> Tensor:
        """`given` [..., out], what the layer gives for x, with what the adapters add to it."""
        low = self._exchanged(linear(x, self.lora_A))
        added = torch.addmm(given.flatten(0, -2), low.flatten(0, -2), self._whole().t(), alpha=self.scale)
        return added.view(given.shape)

    def _exchanged(self, low: Tensor) -> Tensor:
        """A x of all the tokens that the layer gives outputs for, from what this rank can compute of it."""
        exchanged: Tensor
        match self.split, self.sequence_parallel:
            case 0, True:
                exchanged = gather_from_sequence_parallel_region(low, tensor_parallel_output_grad=True)
            case 0, False:  # ranks have different rows of B, and so a part each of the gradient
                exchanged = copy_to_tensor_model_parallel_region(low)
            case 1, True:
                exchanged = reduce_scatter_to_sequence_parallel_region(low)
            case 1, False:
                exchanged = reduce_from_tensor_model_parallel_region(low)
            case _:
                exchanged = low
        return exchanged

    def _whole(self) -> Tensor:
        """[out, n rank]: in the row of each output its row of B in the columns of its own layer, zeros elsewhere. One
        product then adds to all outputs in their order, at the price of multiplying a few zeros."""
        if self.layers == 1 and len(self.at) == self.rows:
            return self.lora_B
        zeros = self.lora_B.new_zeros(self.rows, self.layers, self.rank)
        return zeros.index_put((self.at, self.of), self.lora_B).flatten(1)


def targets_of(role: RoleConfig) -> frozenset[str]:
    """The Hugging Face tensors that get adapters: the same ones as of a transformers model."""
    assert role.lora is not None
    model = meta_model(hf_config(role.model), value_head=role.value_head)
    return frozenset(f"{name}.weight" for name in targets_in(model, role.lora))


def put_adapters(
    modules: Sequence[PackedModel],
    held: Sequence[Held],
    lora: LoraConfig,
    targets: Collection[str],
    groups: Groups,
) -> list[Held]:
    """Give the layers with `targets` in them adapters, without values yet, and freeze all other parameters, which are
    those `held`, but a value head. Returns the adapters' parameters. Called on every rank; raises Unsupported if a
    target has an adapter on none."""
    weights = {id(part.param): part for part in held}
    found: list[Held] = []
    done: set[str] = set()
    for module in modules:
        for layer, name in _weights(module):
            part = weights.get(id(getattr(layer, name)))
            if part is None or part.expert or not any(piece.name in targets for piece in part.pieces):
                continue
            found += _put(layer, part, lora, targets, groups, sequence_parallel=module.config.sequence_parallel)
            done |= {piece.name for piece in part.pieces}
        _keep_graph(module)
    anywhere = {name for names in all_gather_json(sorted(done)) for name in names}
    if missed := sorted(set(targets) - anywhere):
        raise Unsupported(
            f"this backend cannot give {listed(missed, SHOWN)} adapters: they are no layers by themselves in "
            "megatron-core; leave them out of lora.targets, or use another backend"
        )
    for part in held:
        part.param.requires_grad_(any(piece.name == VALUE_HEAD_WEIGHT for piece in part.pieces))
    return found


def _weights(module: PackedModel) -> Iterator[tuple[nn.Module, str]]:
    """The layers that may have adapters, and the names of their weights: in a list, since each gets a module."""
    for layer in list(module.decoder.layers.modules()):
        if isinstance(getattr(layer, "weight", None), Tensor) and not isinstance(layer, Router):
            yield layer, "weight"
        if isinstance(layer, SharedExpertMLP) and layer.use_shared_expert_gate:
            yield layer, "gate_weight"


@frozen(eq=False)
class _Layout:
    """Where the rows of the layers with adapters are in a weight."""

    names: Sequence[str]  # of these layers' tensors
    pieces: Sequence[Piece]  # of these, by row

    @classmethod
    def of(cls, part: Held, targets: Collection[str]) -> _Layout:
        pieces = sorted((piece for piece in part.pieces if piece.name in targets), key=lambda piece: piece.start)
        assert all(piece.axes == (0, 1) for piece in pieces)
        return cls(list(dict.fromkeys(piece.name for piece in pieces)), pieces)

    def rows(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """[rows] row of the weight, and [rows] index of the layer, of each row of B."""
        at = [torch.arange(piece.start[0], piece.start[0] + piece.sizes[0]) for piece in self.pieces]
        of = [torch.full((piece.sizes[0],), self.names.index(piece.name)) for piece in self.pieces]
        return torch.cat(at).to(device), torch.cat(of).to(device)

    def of_a(self, rank: int) -> Iterator[Piece]:
        for index, name in enumerate(self.names):
            piece = next(each for each in self.pieces if each.name == name)
            yield Piece(
                name=adapters_of(name)[0],
                shape=(rank, piece.shape[1]),
                offsets=(0, piece.offsets[1]),
                start=(index * rank, 0),
                sizes=(rank, piece.sizes[1]),
                axes=(0, 1),
            )

    def of_b(self, rank: int) -> Iterator[Piece]:
        row = 0
        for piece in self.pieces:
            rows = piece.sizes[0]
            yield Piece.of(adapters_of(piece.name)[1], (piece.shape[0], rank), piece.offsets[0], row, (rows, rank))
            row += rows


def _put(
    layer: nn.Module,
    part: Held,
    lora: LoraConfig,
    targets: Collection[str],
    groups: Groups,
    *,
    sequence_parallel: bool,
) -> Iterator[Held]:
    """Put an adapter into a layer, whose weight is `part`; yields what it holds."""
    layout = _Layout.of(part, targets)
    at, of = layout.rows(part.param.device)
    adapter = Adapter(part.param, at=at, of=of, lora=lora, split=part.split, sequence_parallel=sequence_parallel)
    layer.add_module(ADAPTER, adapter)
    if isinstance(layer, SharedExpertMLP):
        layer.use_shared_expert_gate = False  # megatron-core would apply it without the adapter
        layer.register_forward_hook(_gated)
    else:
        layer.register_forward_hook(_changed)
    both = (
        (adapter.lora_A, layout.of_a(adapter.rank), COLUMNS),
        (adapter.lora_B, layout.of_b(adapter.rank), ROWS),
    )
    for param, pieces, split in both:
        whole = part.split != split
        yield Held(
            param=param,
            pieces=list(pieces),
            expert=False,
            split=None if whole else split,
            later_copy=not groups.first_copy,
            duplicate=whole and groups.tensor.rank() > 0,
        )


def _changed(layer: nn.Module, args: tuple[Tensor, ...], result: tuple[Tensor, Tensor | None]) -> Any:
    adapter = layer.get_submodule(ADAPTER)
    return adapter(args[0], result[0]), *result[1:]


def _gated(experts: SharedExpertMLP, args: tuple[Tensor, ...], result: Tensor) -> Tensor:
    """What the shared experts give, weighted as `SharedExpertMLP` does."""
    logits: Tensor = experts.get_submodule(ADAPTER)(args[0], linear(args[0], experts.gate_weight))
    return result * logits.sigmoid()


def _keep_graph(module: PackedModel) -> None:
    """Let what the frozen embedding gives ask for a gradient: else layers that are recomputed, in which torch looks for
    nothing that is trained but their inputs, would get none."""
    if module.pre_process:
        module.embedding.register_forward_hook(_asking)


def _asking(embedding: nn.Module, args: Any, embedded: Tensor) -> Tensor:
    states = embedded.detach()
    if torch.is_grad_enabled():
        # A leaf, whose gradient nobody reads: it would stay as long as whoever holds the states.
        states.requires_grad_().register_post_accumulate_grad_hook(_drop)
    return states


def _drop(states: Tensor) -> None:
    states.grad = None
