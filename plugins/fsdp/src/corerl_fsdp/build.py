"""A transformers model sharded over the ranks, its parameters allocated (each rank its share) and not yet loaded."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig

from corerl.models.attention import PACKED
from corerl.models.build import build_on_meta, materialize
from corerl.models.policy import CausalPolicy

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def build_policy(
    hf: PretrainedConfig, *, mesh: DeviceMesh, device: torch.device, precision: str, reshard_after_forward: bool
) -> CausalPolicy:
    """Master weights are float32; layers compute in `precision` and gradients are reduced in float32."""
    policy = CausalPolicy(build_on_meta(hf, dtype=torch.float32, attention=PACKED))
    shard(
        policy,
        mesh=mesh,
        mixed=MixedPrecisionPolicy(param_dtype=DTYPES[precision], reduce_dtype=torch.float32),
        reshard_after_forward=reshard_after_forward,
    )
    materialize(policy.model, {name: allocate(param, device) for name, param in policy.model.named_parameters()})
    # In its load hook FSDP takes over replaced parameters and pads uneven shards; later it would move their memory.
    policy.load_state_dict({}, strict=False)
    for module in policy.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module.register_buffer(name, buffer.to(device), persistent=name not in module._non_persistent_buffers_set)
    return policy


def shard(policy: CausalPolicy, *, mesh: DeviceMesh, mixed: MixedPrecisionPolicy, reshard_after_forward: bool) -> None:
    """One unit a decoder layer, one for an untied embedding, and the root: final norm and head.

    The root stays gathered from forward to backward, so log-probs can be computed straight from the head's weight in
    chunks. A tied embedding belongs to the root, which both of its uses are inside of.
    """
    model = policy.model
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    for layer in model.get_decoder().layers:
        fully_shard(layer, mesh=mesh, mp_policy=mixed, reshard_after_forward=reshard_after_forward)
    if head.weight is not embedding.weight:
        fully_shard(embedding, mesh=mesh, mp_policy=mixed, reshard_after_forward=reshard_after_forward)
    fully_shard(policy, mesh=mesh, mp_policy=mixed, reshard_after_forward=False)


def allocate(param: nn.Parameter, device: torch.device) -> nn.Parameter:
    """This rank's share of a parameter on meta, as memory of its own."""
    assert isinstance(param, DTensor)
    local = torch.empty(param.to_local().shape, dtype=param.dtype, device=device)
    sharded = DTensor.from_local(
        local, param.device_mesh, param.placements, shape=param.shape, stride=param.stride(), run_check=False
    )
    return nn.Parameter(sharded)


def reshard(policy: nn.Module) -> None:
    """Free what units still hold gathered: after a forward pass without backward, and before memory is given back."""
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
