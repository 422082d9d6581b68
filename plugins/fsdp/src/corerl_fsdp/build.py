"""Build a transformers model sharded over the ranks: each rank allocates its share of parameters, but loads nothing."""

from __future__ import annotations

from collections import Counter
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from transformers import PretrainedConfig

from corerl.config import LoraConfig
from corerl.errors import Unsupported
from corerl.models import (
    Policy,
    attention_in_pieces,
    decoder_layers,
    make_policy,
    materialize,
    move_buffers,
    put_adapters,
    recompute_layers,
)
from corerl.ops import one_kernel, why_unbuildable
from corerl.pictures import PictureInputs
from corerl_fsdp.compiled import compile_forward, keep_compiled
from corerl_fsdp.config import FsdpConfig
from corerl_fsdp.one_rank import OneRankReduce
from corerl_fsdp.spec import NO_WHOLE_COMPILE


def build_mesh(device: torch.device, *, ranks: int, shard_size: int) -> DeviceMesh:
    """A mesh on which all ranks share one copy, or groups of `shard_size` do; the groups' n-th ranks are replicas."""
    if shard_size in (0, ranks):
        return init_device_mesh(device.type, (ranks,), mesh_dim_names=("shard",))
    return init_device_mesh(device.type, (ranks // shard_size, shard_size), mesh_dim_names=("replicate", "shard"))


def build_policy(
    hf: PretrainedConfig,
    *,
    value_head: bool,
    vocabulary: int,
    mesh: DeviceMesh,
    device: torch.device,
    precision: str,
    frozen: bool,
    lora: LoraConfig | None,
    recompute: bool,
    layout: str,
    options: FsdpConfig,
    pictures: PictureInputs | None = None,
) -> Policy:
    """Build a policy, or a critic with `value_head`; `layout` is `train.layout`. What is trained is float32, all else
    is in `precision`: everything if it is `frozen`, what `lora` leaves as it is. Layers compute in that, and gradients
    are reduced in float32. The tower that encodes `pictures` is left as it is: on meta, in no shard."""
    dtype: torch.dtype = getattr(torch, precision)
    held = dtype if frozen or lora is not None else torch.float32
    policy = make_policy(
        hf,
        dtype=held,
        layout=layout,
        value_head=value_head,
        compute=dtype,
        vocabulary=vocabulary,
        pictures=pictures,
    )
    if lora is not None:
        put_adapters(policy.model, lora, dtype=torch.float32)
    if options.compile is True and policy.rectangular:
        raise Unsupported(NO_WHOLE_COMPILE)
    attention = not policy.rectangular and one_kernel(device, dtype) and not attention_in_pieces(policy.decoder)
    # Both change a layer's own forward; FSDP's hooks are outside of it, so they are neither traced nor recomputed.
    if options.compile is True or (options.compile == "auto" and attention and not why_unbuildable()):
        keep_compiled(options.compile_cache)
        compile_forward(decoder_layers(policy.model), attention=attention)
        policy.routers.can_record = False  # else they would be left out of what is compiled
    if recompute:
        recompute_layers(policy.model)
    on_host = options.offload == "parameters"
    shard(
        policy,
        mesh=mesh,
        # Inputs keep the model's dtypes: hidden states in `precision`, some models' rotary tables in float32.
        mixed=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False),
        offload=CPUOffloadPolicy(pin_memory=device.type == "cuda") if on_host else OffloadPolicy(),
        keep_gathered=keeps_gathered(policy, options, dtype),
    )
    held_on = torch.device("cpu") if on_host else device
    params = policy.model.named_parameters()
    materialize(policy.model, {name: nn.Parameter(torch.empty_like(param, device=held_on)) for name, param in params})
    # FSDP's load hook takes over replaced parameters and pads uneven shards; later, that would move their memory.
    policy.load_state_dict({}, strict=False)
    move_buffers(policy, device)
    return policy


def shard(
    policy: Policy,
    *,
    mesh: DeviceMesh,
    mixed: MixedPrecisionPolicy,
    offload: OffloadPolicy,
    keep_gathered: bool,
) -> None:
    """Shard one unit per decoder layer, one for an untied embedding, and the root with all the rest: final norm, head.

    The root stays gathered from forward to backward, so that log-probs can be computed from what it holds in chunks.
    What shares parameters with the head or with another unit, as a tied embedding does, belongs to the root, which
    covers all of their uses.
    """
    model = policy.model
    as_unit = partial(fully_shard, mesh=mesh, mp_policy=mixed, offload_policy=offload)
    units = [*dict.fromkeys(decoder_layers(model)), model.get_input_embeddings()]
    owners = Counter(id(param) for unit in units for param in unit.parameters())
    owners.update(id(param) for param in policy.head_parameters)
    for unit in units:
        if all(owners[id(param)] == 1 for param in unit.parameters()):
            as_unit(unit, reshard_after_forward=not keep_gathered)
    as_unit(policy, reshard_after_forward=False)
    if mesh.size() == 1:
        for module in policy.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(OneRankReduce())  # type: ignore[arg-type]  # its base is torch's own


def keeps_gathered(policy: Policy, options: FsdpConfig, dtype: torch.dtype) -> bool:
    """Whether weights stay gathered for a step, in the `dtype` of its passes."""
    return options.keeps_gathered(sum(param.numel() for param in policy.model.parameters()), dtype.itemsize)


def end_pass(policy: nn.Module) -> None:
    """Free what a forward pass without backward has gathered, also if it raised. Gradients stay."""
    # Units in which a pass raised would keep what they have gathered, such as a snapshot's weights, and only a backward
    # pass empties the list of units that were passed. Older versions of torch cannot be told.
    if isinstance(policy, FSDPModule) and hasattr(policy, "reset_iter_state"):
        policy.reset_iter_state()
    reshard(policy)


def reshard(policy: nn.Module) -> None:
    """Free parameters that are still gathered, before memory is released."""
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
