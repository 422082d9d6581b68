"""Each sequence by itself through a transformers model, whole logits, torch's own AdamW and clipping."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set

import torch

from corerl.backend import Backend, LossInputs, MetricSum, StateKey, resolve_loss
from corerl.backend.adamw import adamw, moments, set_adam_step, set_lr
from corerl.backend.batches import OutputCollector
from corerl.config.schema import RoleConfig
from corerl.models.build import build_on_meta, materialize
from corerl.models.config import hf_config
from corerl.models.names import hf_boxes, local_chunks
from corerl.plugin.context import Context
from corerl.types import (
    ForwardResult,
    LossSpec,
    MemoryKind,
    MicroBatch,
    Output,
    PackedBatch,
    ParallelLayout,
    Step,
    TrainResult,
)
from corerl.weights.chunks import Chunk


class PlainBackend(Backend):
    def build(self, config: RoleConfig, context: Context) -> ParallelLayout:
        self.model = build_on_meta(hf_config(config.model), dtype=torch.float32, attention="eager")
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
        shapes = {name: tuple(param.shape) for name, param in self.params.items()}
        self.optimizer = adamw(self.params, shapes, config.train.optimizer, fused=False)
        self.applied = 0
        return ParallelLayout(rank=0, world_size=1, dp_rank=0, dp_size=1)

    @property
    def adam_step(self) -> int:
        return self.applied

    def train(self, batch: PackedBatch, loss: LossSpec, step: Step) -> TrainResult:
        loss_function = resolve_loss(loss)
        metrics = MetricSum()
        tokens = 0
        self.model.train()
        for micro in batch.micro_batches:
            outputs = self.outputs(micro, batch.temperature)
            columns = {name: torch.tensor(column, device=self.device) for name, column in micro.columns.items()}
            result = loss_function(
                LossInputs(logprobs=outputs[Output.LOGPROBS], entropy=outputs[Output.ENTROPY], columns=columns)
            )
            result.loss.backward()
            metrics.add(result.metrics)
            tokens += len(micro.tokens)
        clip_norm = self.config.train.optimizer.clip_norm or math.inf
        norm = torch.nn.utils.clip_grad_norm_(self.params.values(), clip_norm).item()
        applied = math.isfinite(norm)
        if applied:
            set_lr(self.optimizer, step.lr)
            self.optimizer.step()
            self.applied += 1
        self.optimizer.zero_grad()
        return TrainResult(applied=applied, metrics=metrics.finish(), grad_norm=norm, tokens=tokens)

    def forward(self, batch: PackedBatch, outputs: tuple[Output, ...], weights: str) -> ForwardResult:
        collector = OutputCollector()
        self.model.eval()
        with self.using(weights), torch.no_grad():
            for micro in batch.micro_batches:
                computed = self.outputs(micro, batch.temperature)
                collector.add(micro, {output: computed[output] for output in outputs})
        return collector.finish(outputs)

    def outputs(self, micro: MicroBatch, temperature: float) -> dict[Output, torch.Tensor]:
        """Log-probs and entropy [T] of every token; zeros at sequence starts and in padding."""
        total = len(micro.tokens)
        logprobs = [torch.zeros(total, device=self.device)]
        entropy = [torch.zeros(total, device=self.device)]
        for start, length in zip(micro.cu_seqlens[:-1].tolist(), micro.lengths.tolist(), strict=True):
            tokens = torch.tensor(micro.tokens[start : start + length], device=self.device)
            logits = self.model(input_ids=tokens[None], use_cache=False).logits[0, :-1] / temperature
            distribution = torch.log_softmax(logits.float(), dim=-1)
            chosen = distribution.gather(-1, tokens[1:, None])[:, 0]
            around = (start + 1, total - start - length)
            logprobs.append(torch.nn.functional.pad(chosen, around))
            entropy.append(torch.nn.functional.pad(-(distribution.exp() * distribution).sum(-1), around))
        return {Output.LOGPROBS: torch.stack(logprobs).sum(0), Output.ENTROPY: torch.stack(entropy).sum(0)}

    def local_state(self, key: StateKey) -> Sequence[Chunk]:
        chunks: list[Chunk] = []
        for name, param in self.params.items():
            if key in (StateKey.PARAM, StateKey.MASTER):
                values = param.detach()
            else:
                values = moments(self.optimizer, param, self.applied)[key.value]
            chunks += local_chunks(self.boxes[name], (0,) * param.dim(), tuple(param.shape), values)
        return chunks

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
            self.applied = adam_step
            set_adam_step(self.optimizer, adam_step)
