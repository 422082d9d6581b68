"""The halves of an optimizer step, and a pass without gradients, through megatron-core's pipeline schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import tee
from typing import Any, TypeAlias

import torch
from attrs import define, frozen
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from torch import Tensor

from corerl.backend import (
    DeviceBatch,
    MetricSum,
    OutputCollector,
    metrics_of_load,
    require_balance,
    resolve_loss,
    to_device,
)
from corerl.config import OptimizerConfig
from corerl.errors import ModelError
from corerl.models import VALUE_HEAD
from corerl.ops import token_logprobs
from corerl.types import TARGETS, ForwardResult, GradientResult, LossSpec, MicroBatch, Output, PackedBatch, StepResult
from corerl_megatron import optimizer
from corerl_megatron.balance import Balance
from corerl_megatron.build import Model, reduce_gradients, scheduled
from corerl_megatron.model import PackedModel
from corerl_megatron.packed import Split, gather_tokens, packed_params
from corerl_megatron.parallel import Groups
from corerl_megatron.replay import Routing


@frozen(kw_only=True)
class Packed:
    """One micro-batch on its way through the stages."""

    micro: MicroBatch
    inputs: DeviceBatch
    split: Split | None  # over context-parallel ranks

    def local(self, tokens: Tensor) -> Tensor:
        """The part of [T, ...] that this rank computes."""
        return tokens if self.split is None else tokens[self.split.local]


# Processes the last stage's hidden states [t, 1, hidden].
Finish: TypeAlias = Callable[[Packed, PackedModel, Tensor], Any]


@frozen(kw_only=True)
class Pipeline:
    """This rank's stages, and everything that a pass through them needs."""

    model: Model
    routing: Routing
    groups: Groups
    balance_coef: float  # weight of the balancing loss; 0 leaves it out
    vocabulary: int  # token ids that log-probs and entropy are over
    device: torch.device

    def run(
        self,
        micro_batches: Iterable[MicroBatch],
        count: int,
        finish: Finish,
        *,
        backward: bool,
        balance: Balance | None = None,
        chosen: Sequence[list[Tensor]] = (),
    ) -> None:
        """Pass every micro-batch through every stage; called on every rank. With `backward`, `finish` returns the loss.
        `chosen`, a list for each part of the stage, gets the experts of each micro-batch."""
        parts = {id(chunk): part for part, chunk in enumerate(self.model.chunks)}

        def forward_step(micros: Iterator[MicroBatch], chunk: Any) -> tuple[Tensor, Callable[..., Any]]:
            packed = self._packed(next(micros))
            inputs, split, part = packed.inputs, packed.split, parts[id(chunk)]
            positions = packed.local(inputs.positions)
            with self.routing.passing(part, packed.micro, inputs, split, trains=backward, balance=balance):
                hidden = chunk(
                    packed.local(inputs.tokens)[None],
                    positions[None],
                    None,
                    packed_seq_params=packed_params(inputs.packing, split, positions),
                )
            if chosen:
                chosen[part].append(self.routing.chosen(part, len(inputs.tokens), split))
            return hidden, partial(finished, packed, chunk)

        def finished(packed: Packed, chunk: Any, hidden: Tensor, non_loss_data: bool = False) -> Any:
            module = self.model.modules[parts[id(chunk)]]
            if chunk is not module and chunk.ddp_config.overlap_param_gather and module.head.requires_grad:
                # The head's weight is read here, but its module is never called, so its hook does not wait for it.
                chunk.param_to_bucket_group[module.head].finish_param_sync()
            result = finish(packed, module, hidden)
            # The second is the number of tokens to divide by, which is not used: see build.finalize.
            return result if non_loss_data else (result, torch.zeros((), dtype=torch.int), {})

        self.routing.begin()
        chunks = list(self.model.chunks)
        interleaved = len(chunks) > 1
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=list(tee(micro_batches, len(chunks))) if interleaved else iter(micro_batches),
            model=chunks if interleaved else chunks[0],
            num_microbatches=count,
            seq_length=1,  # not read: lengths vary
            micro_batch_size=1,
            forward_only=not backward,
            collect_non_loss_data=not backward,
        )
        for module in self.model.modules:
            module.set_input_tensor(None)  # else the last micro-batch's input, and its gradient, stay for good

    def outputs(
        self, packed: Packed, module: PackedModel, hidden: Tensor, wanted: Sequence[Output], temperature: float
    ) -> dict[Output, Tensor]:
        """Outputs from the last stage's hidden states [t, 1, hidden]: each [T] float32 over all tokens, entry t for
        token t, equal on all tensor-parallel and context-parallel ranks. Log-probs have the shape of the column
        `targets`, if there is one."""
        critic = hasattr(module, VALUE_HEAD)
        if (Output.VALUES in wanted) != critic or (critic and len(wanted) > 1):
            gives = "values" if critic else f"{Output.LOGPROBS}, {Output.ENTROPY}"
            what = "critic" if critic else "policy"
            raise ModelError(f"a {what} was asked for {', '.join(wanted)}, but returns only {gives}")
        hidden = self._whole(hidden, partial_grads=not critic)[:, 0]
        tokens, rows = packed.inputs.tokens, packed.inputs.packing.continuations
        found: dict[Output, Tensor | None] = {}
        if critic:
            found[Output.VALUES] = torch.nn.functional.linear(hidden.float(), module.head.float())[:, 0]
        else:
            # Token t + 1 is predicted at token t; a sequence's last token predicts nothing.
            named = packed.inputs.columns.get(TARGETS, tokens)
            following = torch.zeros_like(named).index_copy(0, rows - 1, named[rows])
            found[Output.LOGPROBS], found[Output.ENTROPY] = token_logprobs(
                hidden,
                module.head,
                packed.local(following),
                temperature=temperature * module.logits_scale,
                with_entropy=Output.ENTROPY in wanted,
                group=self.groups.tensor,
                vocab_size=self.vocabulary,
            )
        results = {}
        for output in wanted:
            values = found[output]
            assert values is not None
            if packed.split is not None:
                values = gather_tokens(values, packed.split, self.groups.context)
            results[output] = torch.zeros_like(values).index_copy(0, rows, values[rows - 1])
        return results

    def _packed(self, micro: MicroBatch) -> Packed:
        inputs = to_device(micro, self.device)
        context = self.groups.context
        split = None
        if context.size() > 1:
            bounds = inputs.packing.bounds
            split = Split.of(bounds, rank=context.rank(), ranks=context.size(), device=self.device)
        return Packed(micro=micro, inputs=inputs, split=split)

    def _whole(self, hidden: Tensor, *, partial_grads: bool) -> Tensor:
        """The hidden states of this context-parallel rank's tokens, on every tensor-parallel rank. With `partial_grads`
        each rank's gradient is part of a sum; otherwise each has the whole."""
        if self.model.config.sequence_parallel:
            gathered: Tensor = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=partial_grads)
            return gathered
        copied: Tensor = copy_to_tensor_model_parallel_region(hidden) if partial_grads else hidden
        return copied


@define
class Gradients:
    """What the buffers hold of a step that is not taken yet."""

    begun: bool = False  # some; until then they are those of an earlier step
    reduced: bool = False  # over ranks, so that nothing more can be added


def forward_backward(
    pipeline: Pipeline,
    gradients: Gradients,
    batch: PackedBatch,
    loss: LossSpec,
    outputs: tuple[Output, ...],
    *,
    last: bool,
) -> GradientResult:
    """Add gradients to the buffers, and reduce them if this is the step's `last` call. Called on every rank, inside
    `calling_megatron`."""
    routing = pipeline.routing
    require_balance(pipeline.balance_coef, layers=routing.layers, tokens=batch.step_tokens)
    loss_function = resolve_loss(loss)
    metrics, collector = MetricSum(), OutputCollector()
    computed = tuple(dict.fromkeys((*loss.outputs, *outputs)))
    micro_batches, tokens = batch.micro_batches, 0

    def finish(packed: Packed, module: PackedModel, hidden: Tensor) -> Tensor:
        found = pipeline.outputs(packed, module, hidden, computed, batch.temperature)
        result = loss_function(packed.inputs.loss_inputs({output: found[output] for output in loss.outputs}))
        metrics.add(result.metrics)
        if outputs and pipeline.groups.outputs:
            collector.add(packed.micro, {output: found[output] for output in outputs})
        return result.loss

    def counted() -> Iterator[MicroBatch]:
        nonlocal tokens
        for micro in micro_batches:
            tokens += len(micro.tokens)
            yield micro

    first = not gradients.begun
    for chunk in pipeline.model.chunks:
        chunk.train()
        if first:
            chunk.zero_grad_buffer()
    balance = None
    if pipeline.balance_coef:
        balance = Balance(
            coef=pipeline.balance_coef * routing.topk / routing.layers, tokens=batch.step_tokens, topk=routing.topk
        )
    gradients.begun, gradients.reduced = True, last
    with scheduled(pipeline.model, first=first, last=last):
        pipeline.run(counted(), batch.count, finish, backward=True, balance=balance)
    found = {**metrics.finish(), **(balance.metrics(routing.layers) if balance else {})}
    if routing.layers:
        found |= metrics_of_load(routing.load(pipeline.device))
    return GradientResult(
        metrics=found,
        tokens=tokens,
        outputs=collector.finish(outputs) if outputs else None,
    )


def optimizer_step(pipeline: Pipeline, gradients: Gradients, *, settings: OptimizerConfig, scale: float) -> StepResult:
    """Step with the gradients times `scale`. Called on every rank, inside `calling_megatron`."""
    if not gradients.reduced:
        reduce_gradients(pipeline.model)
    gradients.begun = gradients.reduced = False
    applied, norm = optimizer.step(pipeline.model, settings=settings, scale=scale)
    return StepResult(applied=applied, grad_norm=norm)


@torch.no_grad()
def forward_pass(pipeline: Pipeline, batch: PackedBatch, wanted: tuple[Output, ...]) -> ForwardResult:
    """Compute outputs without gradients. Called on every rank, inside `calling_megatron`."""
    collector, routing = OutputCollector(), pipeline.routing
    of_tokens = tuple(output for output in wanted if output is not Output.ROUTED_EXPERTS)
    chosen: Sequence[list[Tensor]] = ()
    if of_tokens != wanted:
        if not routing.layers:
            raise ModelError(f"{Output.ROUTED_EXPERTS} was requested, but the model has no experts")
        chosen = [[] for _ in pipeline.model.chunks]
    passed: list[tuple[MicroBatch, dict[Output, Tensor]]] = []

    def finish(packed: Packed, module: PackedModel, hidden: Tensor) -> None:
        outputs = pipeline.outputs(packed, module, hidden, of_tokens, batch.temperature) if of_tokens else {}
        if pipeline.groups.outputs:
            passed.append((packed.micro, outputs))

    for chunk in pipeline.model.chunks:
        chunk.eval()
    pipeline.run(batch.micro_batches, batch.count, finish, backward=False, chosen=chosen)
    experts = [routing.whole(parts, pipeline.device) for parts in zip(*chosen, strict=True)]
    for index, (micro, outputs) in enumerate(passed):
        collector.add(micro, {**outputs, **({Output.ROUTED_EXPERTS: experts[index]} if experts else {})})
    return collector.finish(wanted)
