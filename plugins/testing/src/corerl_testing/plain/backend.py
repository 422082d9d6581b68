"""A backend that batches sequences of equal length through a transformers model, with full logits and torch's own AdamW
and clipping: the reference for both values of `train.layout`, with neither packing nor padding."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch

from corerl.backend import (
    Backend,
    LossInputs,
    MetricSum,
    OutputCollector,
    StateKey,
    adamw,
    moments,
    replayed_experts,
    require_balance,
    resolve_loss,
    set_adam,
    set_adam_step,
)
from corerl.backend.experts import ExpertLoad
from corerl.backend.passes import PREFIXES_SAVED
from corerl.config import RoleConfig
from corerl.errors import Unsupported
from corerl.models import (
    VALUE_HEAD,
    Routers,
    buffer_chunks,
    build_on_meta,
    hf_boxes,
    hf_config,
    local_chunks,
    materialize,
    meta_model,
    parts_of,
    put_adapters,
)
from corerl.models.layouts import choose_layout
from corerl.models.routing import Routed
from corerl.pictures import Picture
from corerl.plugin import Context
from corerl.types import (
    PICTURE,
    TARGETS,
    ForwardResult,
    GradientResult,
    IntArray,
    LossSpec,
    MemoryKind,
    Metric,
    MicroBatch,
    Output,
    PackedBatch,
    ParallelLayout,
    Step,
    StepResult,
    merge_metrics,
)
from corerl.weights import Chunk

NOTHING: Mapping[Any, Any] = {}
OTHER = 0  # a token that is no placeholder


class PlainBackend(Backend):
    """The reference: one rank, plain torch, a transformers model."""

    def build(self, config: RoleConfig, context: Context) -> ParallelLayout:
        hf = hf_config(config.model)
        if config.train.share_prefixes and getattr(hf.get_text_config(), "sliding_window", None):
            raise Unsupported(
                "train.share_prefixes=true with sliding windows is not supported by the plain backend, whose masks "
                "have none; set it to false, or use another backend"
            )
        # Refuses what every backend does.
        choose_layout(meta_model(hf, value_head=config.value_head), config.train.layout)
        shows = self.picture_inputs is not None
        self.model = build_on_meta(
            hf, dtype=torch.float32, attention="eager", value_head=config.value_head, pictures=shows
        )
        self.decoder = parts_of(self.model).decoder
        self.routers = Routers(self.model)
        if config.lora is not None:
            put_adapters(self.model, config.lora, dtype=torch.float32)
        self.boxes = hf_boxes(self.model)
        materialize(
            self.model,
            {
                name: torch.nn.Parameter(torch.empty(param.shape, device=self.device))
                for name, param in self.model.named_parameters()
            },
        )
        self.model.to(self.device)  # type: ignore[arg-type]  # transformers' decorator hides its parameters
        self.params = dict(self.model.named_parameters())
        for name, param in self.params.items():
            if not any(self.trains(box.name) for box in self.boxes[name]):
                param.requires_grad_(False)
        self.trained = {name: param for name, param in self.params.items() if param.requires_grad}
        shapes = {name: tuple(param.shape) for name, param in self.trained.items()}
        if not config.frozen:
            self.optimizer = adamw(self.trained, shapes, config.train.optimizer, fused=False)
        return ParallelLayout.data_parallel(rank=0, world_size=1, shares_prefixes=config.train.share_prefixes)

    def forward_backward(
        self, batch: PackedBatch, loss: LossSpec, outputs: tuple[Output, ...], last: bool
    ) -> GradientResult:
        loss_function = resolve_loss(loss)
        metrics, collector = MetricSum(), OutputCollector()
        tokens = 0
        saved: Mapping[str, Metric] = {}
        coef = self.config.train.aux_loss_coef
        require_balance(coef, layers=self.routers.layers, tokens=batch.step_tokens)
        experts = ExpertLoad(routers=self.routers, coef=coef, step_tokens=batch.step_tokens)
        self.model.train()
        for micro in batch.micro_batches:
            routed = Routed() if self.routers.layers else None
            computed = self.outputs(micro, batch.temperature, pictures=batch.pictures, record=routed)
            columns = {name: torch.tensor(column, device=self.device) for name, column in micro.columns.items()}
            result = loss_function(
                LossInputs(
                    logprobs=computed.get(Output.LOGPROBS),
                    entropy=computed.get(Output.ENTROPY),
                    values=computed.get(Output.VALUES),
                    columns=columns,
                    bounds=torch.tensor(micro.cu_seqlens, device=self.device),
                )
            )
            balance = None if routed is None else experts.add(micro, routed)
            (result.loss if balance is None else result.loss + balance).backward()
            metrics.add(result.metrics)
            collector.add(micro, {output: computed[output] for output in outputs})
            passed = len(micro.tokens) - (0 if micro.prefix_lengths is None else int(micro.prefix_lengths.sum()))
            tokens += passed
            if micro.prefix_lengths is not None:
                saved = merge_metrics((saved, {PREFIXES_SAVED: Metric(len(micro.tokens) - passed, len(micro.tokens))}))
        found = collector.finish(outputs) if outputs else None
        reported = {**metrics.finish(), **experts.metrics(), **saved}
        return GradientResult(metrics=reported, tokens=tokens, outputs=found)

    def optimizer_step(self, step: Step, scale: float) -> StepResult:
        for param in self.trained.values():
            if param.grad is not None:
                param.grad *= scale
        settings = self.optimizer_at(step)
        norm = torch.nn.utils.clip_grad_norm_(self.trained.values(), settings.clip_norm or math.inf).item()
        applied = math.isfinite(norm)
        if applied:
            set_adam(self.optimizer, settings)
            self.optimizer.step()
        self.optimizer.zero_grad()
        return StepResult(applied=applied, grad_norm=norm)

    def forward(self, batch: PackedBatch, outputs: tuple[Output, ...]) -> ForwardResult:
        collector = OutputCollector()
        self.model.eval()
        with torch.no_grad():
            for micro in batch.micro_batches:
                routed = Output.ROUTED_EXPERTS in outputs
                computed = self.outputs(micro, batch.temperature, pictures=batch.pictures, routed=routed)
                collector.add(micro, {output: computed[output] for output in outputs})
        return collector.finish(outputs)

    def outputs(
        self,
        micro: MicroBatch,
        temperature: float,
        *,
        pictures: Mapping[int, Picture] = NOTHING,
        routed: bool = False,
        record: Routed | None = None,
    ) -> dict[Output, torch.Tensor]:
        """All outputs of the model, [T] each or as `targets`, with zeros at sequence starts and in padding; if
        `routed`, also the experts of each token [T, layers, k]. `record` gets what routers made of the tokens, with
        zeros in padding."""
        tokens = torch.tensor(micro.tokens, device=self.device)
        given = replayed_experts(self.routers, micro, self.device)
        targets = torch.tensor(micro.columns[TARGETS], device=self.device) if TARGETS in micro.columns else None
        columns: dict[Output, torch.Tensor] = {}
        if micro.prefix_lengths is not None and micro.prefix_lengths.any():
            first, node = (torch.tensor(each, device=self.device) for each in nodes_of(micro))
            self.routers.set_cells(first, node)
            with self.routers.replaying(given, keep=routed, record=record is not None):
                columns = self.of_tree(micro, first, node, temperature, targets)
                if record is not None:
                    passed = self.routers.take(logits=self.config.train.aux_loss_coef != 0)
                    _put(passed, torch.arange(len(tokens), device=self.device), record, len(tokens))
                if routed:
                    columns[Output.ROUTED_EXPERTS] = self.routers.chosen
            self.routers.set_cells(None, None)
            return columns
        for starts, length in self.batches(micro):
            rows = torch.tensor(starts[:, None] + np.arange(length), device=self.device)  # [S, L] token indices
            given_here = None if given is None else given[rows].flatten(0, 1)
            with self.routers.replaying(given_here, keep=routed, record=record is not None):
                shown = self.shown(micro, starts, length, pictures)
                named = () if targets is None else (targets[rows],)
                found = self.of_sequences(tokens[rows], temperature, shown, *named)
                if record is not None:
                    passed = self.routers.take(logits=self.config.train.aux_loss_coef != 0)
                    _put(passed, rows.flatten(), record, len(tokens))
                if routed:
                    chosen = self.routers.chosen
                    columns.setdefault(Output.ROUTED_EXPERTS, chosen.new_zeros(len(tokens), *chosen.shape[1:]))
                    columns[Output.ROUTED_EXPERTS][rows.flatten()] = chosen
            for output, values in found.items():
                column = columns.get(output, torch.zeros(len(tokens), *values.shape[2:], device=self.device))
                columns[output] = column.index_put((rows[:, 1:],), values)
        return columns

    def of_tree(
        self,
        micro: MicroBatch,
        first: torch.Tensor,
        node: torch.Tensor,
        temperature: float,
        targets: torch.Tensor | None,
    ) -> dict[Output, torch.Tensor]:
        """Outputs of sequences that begin alike, from one pass of the nodes of their tree, of `nodes_of`: each sees its
        own path from the root."""
        starts = torch.tensor(micro.cu_seqlens[:-1], device=self.device)
        paths = [*node.tensor_split(starts[1:].cpu())]
        seen = self.seen(paths, len(first))
        tokens, positions = (torch.tensor(each, device=self.device) for each in (micro.tokens, micro.positions))
        call = {
            "input_ids": tokens[first][None],
            "position_ids": positions[first][None],
            "attention_mask": torch.zeros(seen.shape, device=self.device).masked_fill(~seen, -1e30)[None, None],
            "use_cache": False,
        }
        later = torch.cat(
            [torch.arange(1, len(path), device=self.device) + start for path, start in zip(paths, starts, strict=True)]
        )
        following = (tokens if targets is None else targets)[later]
        if self.config.value_head:
            hidden = self.decoder(**call).last_hidden_state[0, node[later - 1]]
            found = {Output.VALUES: self.model.get_submodule(VALUE_HEAD)(hidden)[:, 0]}
        else:
            found = self.of_logits(self.model(**call).logits[0, node[later - 1]], temperature, following)
        return {
            output: torch.zeros(len(tokens), *values.shape[1:], device=self.device).index_put((later,), values)
            for output, values in found.items()
        }

    def seen(self, paths: Sequence[torch.Tensor], nodes: int) -> torch.Tensor:
        """[N, N] whether the node of a row sees that of a column, which is on its path."""
        seen = torch.zeros(nodes, nodes, dtype=torch.bool, device=self.device)
        for path in paths:
            for depth, each in enumerate(path, start=1):
                seen[each, path[:depth]] = True
        return seen

    def batches(self, micro: MicroBatch) -> Iterator[tuple[IntArray, int]]:
        """Where the sequences that are passed together begin, and their length: equally long ones, without pictures."""
        starts = micro.cu_seqlens[:-1]
        shows = np.add.reduceat(micro.columns.get(PICTURE, np.zeros_like(micro.tokens)) > 0, starts, dtype=np.int64) > 0
        for length in np.unique(micro.lengths):
            if len(together := starts[(micro.lengths == length) & ~shows]):
                yield together, length
        for start, length in zip(starts[shows], micro.lengths[shows], strict=True):
            yield np.array([start]), length

    def shown(
        self, micro: MicroBatch, starts: IntArray, length: int, pictures: Mapping[int, Picture]
    ) -> dict[str, torch.Tensor]:
        """What transformers' own class takes with the tokens of a sequence that shows pictures."""
        column = micro.columns.get(PICTURE, np.zeros_like(micro.tokens))[starts[0] : starts[0] + length]
        if self.picture_inputs is None or not column.any():
            return {}
        begins = column[np.flatnonzero(np.diff(column, prepend=0))]
        found = self.picture_inputs.inputs([pictures[number] for number in begins if number])
        given = {name: torch.tensor(np.array(each), device=self.device) for name, each in found.items()}
        slots = micro.tokens[starts[0] : starts[0] + length] == self.picture_inputs.placeholder
        kinds = torch.tensor((column > 0) & slots, device=self.device)[None].int()
        takes = inspect.signature(self.decoder.forward).parameters
        return {**given, **{name: kinds for name in ("mm_token_type_ids", "token_type_ids") if name in takes}}

    def fed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Sequences [S, L] with another last token where it is a placeholder, which the policy has sampled: that stands
        for no picture, and no output is computed at it."""
        if self.picture_inputs is None:
            return tokens
        last = torch.where(tokens[:, -1:] == self.picture_inputs.placeholder, OTHER, tokens[:, -1:])
        return torch.cat([tokens[:, :-1], last], dim=1)

    def of_sequences(
        self,
        tokens: torch.Tensor,
        temperature: float,
        shown: Mapping[str, torch.Tensor] = NOTHING,
        targets: torch.Tensor | None = None,
    ) -> dict[Output, torch.Tensor]:
        """Outputs [S, L - 1] for all but the first token of sequences [S, L], each computed at the token before it.
        Log-probs are of `targets`, [S, L] or [S, L, K], if there are any."""
        fed = self.fed(tokens)
        if self.config.value_head:
            hidden = self.decoder(input_ids=fed, use_cache=False, **shown).last_hidden_state
            return {Output.VALUES: self.model.get_submodule(VALUE_HEAD)(hidden)[:, :-1, 0]}
        logits = self.model(input_ids=fed, use_cache=False, **shown).logits[:, :-1]
        return self.of_logits(logits, temperature, (tokens if targets is None else targets)[:, 1:])

    def of_logits(
        self, logits: torch.Tensor, temperature: float, following: torch.Tensor
    ) -> dict[Output, torch.Tensor]:
        """Outputs of logits [..., V]; log-probs are of the tokens `following`, [...] or [..., K]."""
        logits = logits / temperature
        known = self.config.model.vocabulary or logits.shape[-1]
        logits[..., known:] = -1e30  # finite: a prompt may have such tokens
        distribution = torch.log_softmax(logits.float(), dim=-1)
        at_each = following.reshape(*logits.shape[:-1], -1).long()
        return {
            Output.LOGPROBS: distribution.gather(-1, at_each).reshape(following.shape),
            Output.ENTROPY: -(distribution.exp() * distribution).sum(-1),
        }

    def local_state(self, key: StateKey) -> Sequence[Chunk]:
        chunks: list[Chunk] = []
        for name, param in (self.params if key is StateKey.PARAM else self.trained).items():
            if key in (StateKey.PARAM, StateKey.MASTER):
                values = param.detach()
            else:
                values = moments(self.optimizer, param, self.adam_step)[key.value]
            chunks += local_chunks(self.boxes[name], (0,) * param.dim(), tuple(param.shape), values)
        return chunks

    def buffers(self) -> Sequence[Chunk]:
        return buffer_chunks(self.model, self.boxes, replica=False)

    def tensors(self, kind: MemoryKind) -> Iterable[torch.Tensor]:
        match kind:
            case MemoryKind.PARAM:
                return list(self.params.values())
            case MemoryKind.OPTIMIZER:
                return [value for state in self.optimizer.state.values() for value in state.values()]
            case _:
                return []  # parameters are their own masters, and gradients do not outlive a step

    def after_load(self, keys: Set[StateKey], adam_step: int | None) -> None:
        if adam_step is not None:
            set_adam_step(self.optimizer, adam_step)


def nodes_of(micro: MicroBatch) -> tuple[IntArray, IntArray]:
    """The tree of a micro-batch's sequences: [N] the first token that is each node, and [T] the node of each token."""
    first: list[int] = []
    node = np.zeros(len(micro.tokens), np.int64)
    assert micro.prefix_lengths is not None
    for sequence, (start, length, prefix) in enumerate(
        zip(micro.cu_seqlens[:-1], micro.lengths, micro.prefix_lengths, strict=True)
    ):
        before = micro.cu_seqlens[max(0, sequence - 1)]
        for depth in range(length):
            if depth < prefix:
                node[start + depth] = node[before + depth]
            else:
                node[start + depth] = len(first)
                first.append(start + depth)
    return np.array(first), node


def _put(part: Routed, rows: torch.Tensor, into: Routed, tokens: int) -> None:
    """Put what routers made of the tokens `rows` [t] into the record of all tokens."""
    for found, whole in ((part.logits, into.logits), (part.chosen, into.chosen)):
        for layer, values in enumerate(found):
            if layer == len(whole):
                whole.append(values.new_zeros(tokens, values.shape[-1]))
            whole[layer] = whole[layer].index_copy(0, rows, values)
