"""What the ranks of a role return from one verb, as one result. Whoever finds that they disagree raises
ContractError."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
from attrs import frozen

from corerl.errors import ContractError
from corerl.plan.roles import RolePlan
from corerl.types import (
    Array,
    ForwardResult,
    GradientResult,
    InitResult,
    IntArray,
    Metric,
    Output,
    ParallelLayout,
    SampleBatch,
    TrainResult,
    UpdateResult,
    merge_metrics,
)
from corerl.weights.manifest import Manifest


@frozen(kw_only=True)
class Gradients:
    """What one `forward_backward` added, over all ranks of a group."""

    metrics: Mapping[str, Metric]  # without the step's `scale`
    tokens: int  # that went through the model
    outputs: Mapping[Output, Array]  # each [N, ...]


def merge_inits(results: Sequence[InitResult], plan: RolePlan) -> InitResult:
    """That of all ranks of `plan`, which have the same state, and layouts that fit together."""
    dp_size = results[0].layout.dp_size
    for rank, result in enumerate(results):
        for what in ("optimizer_step", "weights_version"):
            if getattr(result, what) != getattr(results[0], what):
                raise ContractError(
                    f"{plan.role}: ranks disagree on {what}: rank 0 reports {getattr(results[0], what)}, "
                    f"rank {rank} reports {getattr(result, what)}; all ranks must load the same checkpoint"
                )
        if result.layout.rank != rank or result.layout.dp_size != dp_size:
            raise ContractError(
                f"{plan.role}: the layout of rank {rank} has rank {result.layout.rank} and dp_size "
                f"{result.layout.dp_size}, expected rank {rank} and the dp_size {dp_size} of rank 0; "
                "correct InitResult.layout"
            )
    if dp_size != plan.data_parallel:
        raise ContractError(
            f"{plan.role}: the ranks form {dp_size} data-parallel groups, but the backend's spec announced "
            f"{plan.data_parallel}; dp_size in InitResult.layout and BackendSpec.data_parallel must agree"
        )
    if fault := _fault([result.layout for result in results]):
        raise ContractError(f"{plan.role}: {fault}; correct InitResult.layout")
    return results[0]


def _fault(layouts: Sequence[ParallelLayout]) -> str:
    """What is wrong with the ranks' layouts taken together; "" if nothing."""
    for dp_rank in range(layouts[0].dp_size):
        ranks = [layout.rank for layout in layouts if layout.dp_rank == dp_rank and layout.outputs]
        if len(ranks) != 1:
            return f"dp rank {dp_rank} has output ranks {ranks}, expected exactly one"
    for what in ("sequence_multiple", "micro_batch_multiple", "rectangular", "shares_prefixes"):
        if len(found := {getattr(layout, what) for layout in layouts}) > 1:
            return f"ranks disagree on {what}: {sorted(found)}"
    return ""


def merge_train_results(results: Sequence[TrainResult], *, role: str) -> TrainResult:
    """Metrics are merged over ranks, tokens summed."""
    if len({result.applied for result in results}) != 1:
        applied = [rank for rank, result in enumerate(results) if result.applied]
        raise ContractError(f"{role}: ranks {applied} applied the step, but the others did not")
    norms = [result.grad_norm for result in results]
    if results[0].applied and not math.isfinite(norms[0]):
        raise ContractError(f"{role}: a step with gradient norm {norms[0]} was applied; all ranks must skip it")
    if results[0].applied and any(norm != norms[0] for norm in norms):
        raise ContractError(
            f"{role}: ranks disagree on the gradient norm: {norms}; each must report that of the whole model"
        )
    # A backend's metrics come from output ranks only, an extension's from every rank it measures on.
    return TrainResult(
        applied=results[0].applied,
        metrics=merge_metrics(result.metrics for result in results),
        grad_norm=results[0].grad_norm,
        compilations=max(result.compilations for result in results),
        tokens=sum(result.tokens for result in results),
    )


def merge_gradients(
    results: Sequence[GradientResult],
    *,
    outputs: tuple[Output, ...],
    batch: SampleBatch,
    members: IntArray,
    role: str,
) -> Gradients:
    """Of the rows `members` of `batch`, with these outputs."""
    found = [each.outputs for each in results if each.outputs is not None]
    columns = assemble_columns(found, outputs, batch, members, role=role, verb="forward_backward") if outputs else {}
    return Gradients(
        metrics=merge_metrics(result.metrics for result in results),
        tokens=sum(result.tokens for result in results),
        outputs=columns,
    )


def common_manifest(manifests: Sequence[Manifest], *, role: str) -> Manifest:
    if any(manifest != manifests[0] for manifest in manifests):
        raise ContractError(f"{role}: ranks disagree on the manifest; their chunk maps differ in order or shape")
    return manifests[0]


def merge_updates(results: Sequence[UpdateResult]) -> UpdateResult:
    engines: dict[str, str] = {}
    for result in results:
        for name, error in result.engines.items():
            engines[name] = engines.get(name) or error
    return UpdateResult(
        bytes=sum(result.bytes for result in results),
        seconds=max(result.seconds for result in results),
        engines=engines,
        sums={name: value for result in results for name, value in result.sums.items()},
    )


def assemble_columns(
    results: Sequence[ForwardResult],
    outputs: tuple[Output, ...],
    batch: SampleBatch,
    once: IntArray | None = None,
    *,
    role: str,
    verb: str = "forward",
) -> dict[Output, Array]:
    """Arrange the outputs of all ranks as columns [N, ...] in the order of the batch. Raises ContractError unless every
    row, or each of `once` and no other, came back exactly once, with its length and every output, of equal dtype and
    shape on all ranks."""
    columns: dict[Output, Array] = {}
    times, all_lengths = np.zeros(len(batch), dtype=np.int64), batch.lengths
    for result in results:
        if not len(result.rows):  # not an output rank, or it only got fillers
            continue
        if result.rows.min() < 0 or result.rows.max() >= len(batch):
            raise ContractError(f"{role}: {verb} returned rows outside its batch of {len(batch)}")
        np.add.at(times, result.rows, 1)
        if not np.array_equal(np.diff(result.offsets), all_lengths[result.rows]):
            raise ContractError(f"{role}: {verb} returned rows whose lengths differ from the batch")
        # Sample by sample: an index for every token would take more memory than the columns, and longer.
        into = [slice(*batch.offsets[row : row + 2].tolist()) for row in result.rows.tolist()]
        parts = [slice(*bounds) for bounds in pairwise(result.offsets.tolist())]
        for output in outputs:
            values = result.outputs.get(output)
            tokens = int(result.offsets[-1])
            if values is None or len(values) != tokens:
                got = "no" if values is None else len(values)
                raise ContractError(f"{role}: {verb} returned {got} {output}, expected {tokens}: one for each token")
            column = columns.setdefault(output, np.zeros((len(batch.tokens), *values.shape[1:]), values.dtype))
            if (column.shape[1:], column.dtype) != (values.shape[1:], values.dtype):
                kinds = [f"{each.dtype} {list(each.shape[1:])} per token" for each in (column, values)]
                raise ContractError(
                    f"{role}: {verb} returned {output} as {' on one rank and as '.join(kinds)} on another"
                )
            for place, part in zip(into, parts, strict=True):
                column[place] = values[part]
    expected = np.ones_like(times)
    if once is not None:
        expected[:] = 0
        expected[once] = 1
    if (times != expected).any():
        row = int(np.flatnonzero(times != expected)[0])
        wanted = "exactly once" if expected[row] else "never, as it is not in the plan"
        raise ContractError(f"{role}: {verb} returned row {row} {times[row]} times, expected {wanted}")
    # Without samples, no rank reports a dtype or shape.
    return {output: columns.get(output, np.zeros(len(batch.tokens), np.float32)) for output in outputs}
