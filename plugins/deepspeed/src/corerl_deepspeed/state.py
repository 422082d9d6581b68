"""Access DeepSpeed's state: weights, masters, gradients. Its private names are used only here, in build and runtime."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from attrs import frozen
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch import Tensor

from corerl_deepspeed.build import Model


@frozen(eq=False)
class Piece:
    """A flat range of one parameter's elements on this rank."""

    name: str  # in the model
    shape: tuple[int, ...]  # of the whole parameter
    start: int  # index of its first element
    values: Tensor  # flat


@frozen(eq=False)
class Master:
    """A piece of a parameter, float32, in the flat tensor that AdamW steps."""

    piece: Piece
    flat: Tensor  # the key of the moments in AdamW's state
    offset: int  # where the piece begins in `flat`

    def of(self, values: Tensor) -> Piece:
        """The same piece of `values`, a moment that is as long as `flat`."""
        numel = self.piece.values.numel()
        return Piece(self.piece.name, self.piece.shape, self.piece.start, values.narrow(0, self.offset, numel))


def working(model: Model) -> list[Piece]:
    """The working weights, which forward passes read: in stage 3 this rank's share, otherwise all of them."""
    pieces = []
    for name, param in _parameters(model):
        if not partitioned(model):
            pieces.append(Piece(name, tuple(param.shape), 0, param.data.view(-1)))
            continue
        share = param.ds_tensor
        start = param.ds_zero_partition_rank * share.ds_numel
        numel = min(share.ds_numel, param.ds_numel - start)  # padding follows
        if numel > 0:
            pieces.append(Piece(name, tuple(param.ds_shape), start, share.data.narrow(0, 0, numel)))
    return pieces


def masters(model: Model) -> list[Master]:
    """The masters that this rank steps."""
    zero, found = model.engine.optimizer, []
    for name, param in _parameters(model):
        if name not in model.trains:
            continue
        if partitioned(model):
            group, offset, _ = zero.grad_position[zero.get_param_id(param)]
            flat = zero.fp32_partitioned_groups_flat[group]
            start = param.ds_zero_partition_rank * param.ds_tensor.ds_numel
            numel = min(param.ds_tensor.ds_numel, param.ds_numel - start)
            shape = tuple(param.ds_shape)
        else:
            mapping = param._hp_mapping
            if mapping is None:
                continue  # stepped only on other ranks
            flat = zero.single_partition_of_fp32_groups[mapping.param_group_index]
            offset, start = mapping.hp_fragment_address.start, mapping.lp_fragment_address.start
            numel, shape = mapping.lp_fragment_address.numel, tuple(param.shape)
        if numel > 0:
            found.append(Master(Piece(name, shape, start, flat.detach().narrow(0, offset, numel)), flat, offset))
    return found


def _parameters(model: Model) -> Iterator[tuple[str, Any]]:
    """The parameters, untyped because of the attributes that DeepSpeed adds to them."""
    yield from model.policy.model.named_parameters()


def partitioned(model: Model) -> bool:
    optimizer = getattr(model.engine, "optimizer", None)
    return isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3 | DeepSpeedZeRoOffload)


def flats(model: Model) -> list[Tensor]:
    """The tensors that AdamW steps."""
    zero = model.engine.optimizer
    return list(zero.fp32_partitioned_groups_flat if partitioned(model) else zero.single_partition_of_fp32_groups)


def release(model: Model) -> None:
    """Free gathered parameters. Local."""
    if partitioned(model):
        model.engine.optimizer.empty_partition_cache()  # the engine's method also runs gc for half a second


def spread(model: Model, pieces: list[Piece], held: list[Master]) -> None:
    """Copy the masters into the working weights. Called on every rank."""
    if not partitioned(model):
        model.engine.optimizer.update_lp_params()
        return
    working_of = {piece.name: piece.values for piece in pieces}
    for master in held:
        working_of[master.piece.name].copy_(master.piece.values)


def second_copies(model: Model) -> Iterator[Tensor]:
    """The second copies of parameters, if each node has one."""
    for _, param in _parameters(model):
        second = getattr(param, "ds_secondary_tensor", None)
        if second is not None:
            yield second


def drop_second_copies(model: Model) -> None:
    """Drop the second copies; the next forward pass makes them again from gathered parameters. DeepSpeed's own method
    drops those of parameters that it steps."""
    if partitioned(model) and model.optimizer is not None:
        for _, param in _parameters(model):
            param.ds_secondary_tensor = None


def drop_skipped_gradients(model: Model) -> None:
    """Drop the gradients of a skipped step. In stages 1 and 2 with offload, DeepSpeed sums those of bfloat16 weights in
    memory that it drops when it takes a step, but not when it skips one: all later steps would be skipped too."""
    if not partitioned(model):
        model.engine.optimizer.averaged_gradients.clear()


def let_go(model: Model) -> None:
    """Free a model that is no longer used: DeepSpeed's objects and parameters refer to each other in cycles that Python
    cannot collect, so they would keep their memory."""
    if model.engine is model.policy:
        return
    model.engine.destroy()
    params = [param for _, param in _parameters(model)]
    for each in (*params, model.engine.optimizer, model.engine):
        vars(each).clear()
    # For every stage 3 model trained in this process, DeepSpeed caches what to release after each module, and with that
    # the whole model.
    kept = inspect.getclosurevars(PartitionedParameterCoordinator._PartitionedParameterCoordinator__params_to_release)
    kept.nonlocals["func"].cache_clear()


def parameter_memory(model: Model) -> Iterator[Tensor]:
    for _, param in _parameters(model):
        yield param.ds_tensor if partitioned(model) else param.data
    yield from second_copies(model)


def gradient_memory(model: Model) -> Iterator[Tensor]:
    """Gradient buffers that outlive a step, although their contents do not."""
    zero = model.engine.optimizer
    for flat in flats(model):
        if flat.grad is not None:
            yield flat.grad
    for bucket in zero.ipg_buckets.values():
        yield from bucket.buffer if isinstance(bucket.buffer, list) else [bucket.buffer]
    if partitioned(model):
        yield zero.grad_partitions_flat_buffer
    elif zero.cpu_offload:
        yield from zero.accumulated_grads_in_cpu.values()
        yield from zero.param_buffer_of_bit16_for_cpu_offload_groups
        yield zero.temp_grad_buffer_for_cpu_offload
        yield zero.temp_grad_buffer_for_gpu_offload
