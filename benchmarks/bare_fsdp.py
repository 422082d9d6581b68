"""Training loops as one writes them by hand with transformers and `fully_shard`, to compare the FSDP backend with.

All begin with the plugin's weights, with each layer wrapped by `fully_shard` (and compiled, as the work's option
`compile` says) and fused AdamW. They differ in how a micro-batch passes through the model, see `LOOPS`.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM

from benchmarks.steps import OPTIMIZER, Plugin, QuickWeights, Work, clipped_loss
from corerl.models.attention import PACKED, register_packed_attention
from corerl.models.build import decoder_layers
from corerl.models.layouts import own_attention, packed_call
from corerl.models.names import hf_boxes
from corerl.ops.logprobs import token_logprobs
from corerl.ops.packing import PackedSequences
from corerl.types import MicroBatch, PackedBatch

VARLEN = "bare_varlen"
CHUNK = 2048  # tokens whose logits `Varlen` holds at a time


class Loop(nn.Module):
    """A model that ends in log-probs, and in entropy if asked: each [T - 1], of the micro-batch's tokens but
    its first one. Those of other sequences' first tokens mean nothing."""

    def __init__(self, model: Any, device: torch.device) -> None:
        super().__init__()
        self.model, self.device = model, device

    @staticmethod
    def attention(config: Any, device: torch.device) -> str:
        """The name of the model's attention."""
        raise NotImplementedError


class Varlen(Loop):
    """Packed sequences through torch's varlen attention; some tokens' logits at a time, computed again for backward."""

    @staticmethod
    def attention(config: Any, device: torch.device) -> str:
        AttentionInterface.register(VARLEN, varlen if device.type == "cuda" else by_sequence)
        AttentionMaskInterface.register(VARLEN, lambda *_, **__: None)
        return VARLEN

    def forward(self, micro: MicroBatch, temperature: float, entropy: bool) -> tuple[Tensor, Tensor | None]:
        tokens, positions = (torch.tensor(x, device=self.device) for x in (micro.tokens, micro.positions))
        bounds = torch.tensor(micro.cu_seqlens, dtype=torch.int32, device=self.device)
        longest = int(np.diff(micro.cu_seqlens).max())
        hidden = self.model.model(
            input_ids=tokens[None],
            position_ids=positions[None],
            use_cache=False,
            cu_seq_lens_q=bounds,
            cu_seq_lens_k=bounds,
            max_length_q=longest,
            max_length_k=longest,
        ).last_hidden_state[0]
        head = self.model.lm_head.weight.to(hidden.dtype)

        def part(states: Tensor, targets: Tensor) -> Tensor:
            logits = (states @ head.t()).float() / temperature
            logprobs = -F.cross_entropy(logits, targets, reduction="none")
            if not entropy:
                return logprobs[:, None]
            log_p = torch.log_softmax(logits, dim=-1)
            return torch.stack([logprobs, -(log_p.exp() * log_p).sum(-1)], dim=1)

        following = torch.cat([tokens[1:], tokens[:1]])  # after a sequence's last token comes one without a weight
        parts = zip(hidden.split(CHUNK), following.split(CHUNK), strict=True)
        found = torch.cat([checkpoint(part, *each, use_reentrant=False) for each in parts])[:-1]
        logprobs, *more = (column.clone() for column in found.unbind(1))  # fully_shard's outputs must not be views
        return logprobs, more[0] if more else None


class Packed(Loop):
    """Packed sequences through CoreRL's attention and log-probs."""

    @staticmethod
    def attention(config: Any, device: torch.device) -> str:
        register_packed_attention()
        return PACKED

    def forward(self, micro: MicroBatch, temperature: float, entropy: bool) -> tuple[Tensor, Tensor | None]:
        tokens, positions = (torch.tensor(x, device=self.device) for x in (micro.tokens, micro.positions))
        packing = PackedSequences.of(micro.cu_seqlens, self.device)
        hidden = self.model.get_decoder()(**packed_call(tokens, positions, packing)).last_hidden_state[0, :-1]
        head = self.model.get_output_embeddings().weight
        return token_logprobs(hidden, head, tokens[1:], temperature=temperature, with_entropy=entropy)


class Padded(Loop):
    """Plain transformers: right-padded rows, its own attention, log_softmax of all logits."""

    @staticmethod
    def attention(config: Any, device: torch.device) -> str:
        return own_attention(config)

    def forward(self, micro: MicroBatch, temperature: float, entropy: bool) -> tuple[Tensor, Tensor | None]:
        width = int(micro.lengths.max())
        cells = np.repeat(np.arange(len(micro.lengths)) * width, micro.lengths) + micro.positions
        rows = np.zeros(len(micro.lengths) * width, dtype=np.int64)
        rows[cells] = micro.tokens
        tokens = torch.tensor(rows.reshape(-1, width), device=self.device)
        # Padding lies to the right, so under a causal mask no token sees it.
        logits = self.model(input_ids=tokens, use_cache=False).logits.float() / temperature
        log_p = torch.log_softmax(logits, dim=-1)
        logprobs = log_p.gather(-1, tokens.roll(-1, dims=1)[..., None]).flatten()
        at = torch.tensor(cells[1:] - 1, device=self.device).clamp(min=0)  # of each token, the one before it
        return logprobs[at], -(log_p.exp() * log_p).sum(-1).flatten()[at] if entropy else None


LOOPS: dict[str, type[Loop]] = {"bare": Varlen, "packed": Packed, "padded": Padded}


class Bare:
    """Called in the process group. With adapters in the work it passes alone, without any gradient of a weight."""

    def __init__(self, work: Work, device: torch.device, plugin: Plugin | None) -> None:
        self._device, loop = device, LOOPS[work.loop]
        config = AutoConfig.for_model(**work.fields)
        with device:
            model = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation=loop.attention(config, device)
            )
        boxes = hf_boxes(model)  # the plugin's weights have these names: of each expert, where one parameter has all
        weights = QuickWeights({box.name: box.shape for each in boxes.values() for box in each}, device)
        with torch.no_grad():
            for name, param in model.named_parameters():
                for box in boxes[name]:
                    box.view(param).copy_(weights.whole(box.name))
        if work.lora is not None:  # frozen: what the loss depends on begins after the embedding
            model.to(getattr(torch, work.precision)).requires_grad_(False)
            model.model.embed_tokens.register_forward_hook(lambda _, given, states: states.requires_grad_())
        if work.recompute == "full":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        mixed = MixedPrecisionPolicy(param_dtype=getattr(torch, work.precision), reduce_dtype=torch.float32)
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for layer in decoder_layers(model):
            if work.options.get("compile", False):
                layer.compile()
            fully_shard(layer, mesh=mesh, mp_policy=mixed)
        self._model = loop(model.train(), device)
        fully_shard(self._model, mesh=mesh, mp_policy=mixed)
        self._params = [param for param in self._model.parameters() if param.requires_grad]
        if self._params:  # the fastest of torch's three implementations on DTensors, on a CPU too
            self._optimizer = torch.optim.AdamW(
                self._params, lr=OPTIMIZER.lr, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps, weight_decay=0.0, fused=True
            )

    def train(self, batch: PackedBatch, *, entropy: bool) -> float:
        """The gradient's norm before it is clipped."""
        for micro in batch.micro_batches:
            logprobs, entropies = self._model(micro, batch.temperature, entropy)
            loss = clipped_loss(logprobs, entropies, micro, self._device)
            (loss * dist.get_world_size()).backward()  # fully_shard averages over ranks
        if not self._params:
            return math.nan
        norm = nn.utils.clip_grad_norm_(self._params, OPTIMIZER.clip_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(norm.full_tensor())  # type: ignore[attr-defined]  # a DTensor's

    def close(self) -> None:
        pass  # it ends with its process


def varlen(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, **packing: Any
) -> tuple[Tensor, None]:
    """query [1, H, T, D], key and value [1, Hkv, T, D]; returns [1, T, H, D]. Heads are repeated: torch 2.11 requires
    it, and the limit was measured with it."""
    from torch.nn.attention.varlen import varlen_attn  # registers CUDA operators

    groups = query.shape[1] // key.shape[1]
    q, k, v = (
        x[0].transpose(0, 1).contiguous() for x in (query, *(x.repeat_interleave(groups, 1) for x in (key, value)))
    )
    bounds, longest = packing["cu_seq_lens_q"], packing["max_length_q"]
    out = varlen_attn(q, k, v, bounds, bounds, longest, longest, window_size=(-1, 0))  # back without end: causal
    assert isinstance(out, Tensor)  # a pair only where the softmax's normalizer is asked for
    return out[None], None


def by_sequence(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, **packing: Any
) -> tuple[Tensor, None]:
    """The same on a CPU, which has no such kernel."""
    parts = []
    for start, end in itertools.pairwise(packing["cu_seq_lens_q"].tolist()):
        q, k, v = (x[:, :, start:end] for x in (query, key, value))
        parts.append(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
    return torch.cat(parts, dim=2).transpose(1, 2), None
