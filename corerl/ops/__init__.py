"""Pure torch operations for backends to call: packed attention, chunked log-probs and entropy."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from corerl.ops.attention import one_kernel as one_kernel
    from corerl.ops.attention import packed_attention as packed_attention
    from corerl.ops.buildable import why_unbuildable as why_unbuildable
    from corerl.ops.clip import clip_factor as clip_factor
    from corerl.ops.clip import grad_norm as grad_norm
    from corerl.ops.clip import scale_grads as scale_grads
    from corerl.ops.logprobs import token_logprobs as token_logprobs
    from corerl.ops.noise import gumbel as gumbel
    from corerl.ops.noise import hash_key as hash_key
    from corerl.ops.noise import hash_keys as hash_keys
    from corerl.ops.packing import PackedSequences as PackedSequences
    from corerl.ops.packing import upload as upload
else:
    from corerl.imports import on_demand

    __getattr__, __dir__ = on_demand(__name__, __file__)
