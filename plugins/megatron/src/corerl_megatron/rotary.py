"""Turn queries and keys of packed sequences by their positions: all sequences in one call.

Without TransformerEngine's kernel, megatron-core turns one sequence after the other: 0.17 and later with a dozen
operations for each, in each layer, for queries and for keys. A micro-batch of a hundred short samples then keeps the
host busy many times as long as the GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from attrs import field, frozen
from megatron.core.models.common.embeddings import rope_utils
from torch import Tensor

if TYPE_CHECKING:
    from corerl_megatron.packed import Split

BY_SEQUENCE = rope_utils._apply_rotary_pos_emb_thd


@frozen(eq=False)
class Turns:
    """Where the t tokens of a rank stand in their sequences, and the tables that layers turn them by, which are made
    once for all layers that turn alike."""

    positions: Tensor  # [t] int64, each token's in its own sequence
    longest: int  # tokens of the longest sequence
    split: Split | None  # over context-parallel ranks
    _tables: dict[Any, tuple[Tensor, ...]] = field(factory=dict, init=False)

    def tables(
        self, angles: Tensor, *, dtype: torch.dtype, scale: float, neighbors: bool
    ) -> tuple[Tensor, Tensor] | None:
        """Cosines and signed sines [t, 1, D], times `scale`, of angles [L, ..., D] by position, or by token if there
        are as many as tokens in all sequences; None if they are of something else."""
        # Recomputed layers get their angles as other tensors, in the same memory.
        key = angles.data_ptr(), angles.shape, dtype, scale, neighbors
        if key in self._tables:
            cosines, sines, _ = self._tables[key]
            return cosines, sines
        tokens = len(self.positions) if self.split is None else len(self.split.restore)
        if len(angles) == tokens:
            at = None if self.split is None else self.split.local
        elif len(angles) >= self.longest:
            at = self.positions
        else:
            return None
        flat = angles.flatten(1)
        found = [(part * scale).to(dtype) for part in (flat.cos(), _signed(flat.sin(), neighbors=neighbors))]
        cosines, sines = (part[:, None] if at is None else part.index_select(0, at)[:, None] for part in found)
        self._tables[key] = cosines, sines, angles  # kept, so that nothing else gets its memory
        return cosines, sines


def turn_all_at_once() -> None:
    """Have megatron-core turn packed sequences in one call, where `packed_params` describes them.

    megatron-core 0.16 to 0.19, megatron/core/models/common/embeddings/rope_utils.py of
    https://github.com/NVIDIA/Megatron-LM: `test_megatron_core_still_turns_one_sequence_after_the_other` fails when this
    is not needed any more.
    """
    rope_utils._apply_rotary_pos_emb_thd = turned


def turned(
    t: Tensor,
    cu_seqlens: Tensor,
    freqs: Tensor,
    *,
    rotary_interleaved: bool = False,
    mscale: float = 1.0,
    cp_group: Any = None,
    **latent: bool,
) -> Tensor:
    """t [t, heads, d], of which the first D of each head are turned by angles `freqs` [L, 1, 1, D].

    The arguments are those of megatron-core's own function. `latent`, which is `mla_rotary_interleaved`, or
    `multi_latent_attention` until 0.17, says that pairs are neighbors, and that the result has the first of all pairs,
    then the second; with `rotary_interleaved` neighbors stay where they are.
    """
    turns: Turns | None = getattr(cu_seqlens, "turns", None)
    found = None
    if turns is not None:
        found = turns.tables(freqs, dtype=t.dtype, scale=mscale, neighbors=rotary_interleaved)
    if found is None:
        return BY_SEQUENCE(
            t, cu_seqlens, freqs, rotary_interleaved=rotary_interleaved, mscale=mscale, cp_group=cp_group, **latent
        )
    cosines, sines = found
    width = cosines.shape[2]
    part, rest = (t, None) if width == t.shape[2] else (t[..., :width], t[..., width:])
    if any(latent.values()):
        part = part.unflatten(2, (-1, 2)).transpose(2, 3).flatten(2)
    if rotary_interleaved:
        other = part.unflatten(2, (-1, 2)).flip(3).flatten(2)
    else:
        other = torch.cat(part.chunk(2, dim=2)[::-1], dim=2)
    out = part * cosines + other * sines
    return out if rest is None else torch.cat([out, rest], dim=2)


def _signed(sines: Tensor, *, neighbors: bool) -> Tensor:
    """Negative where they turn the first of a pair."""
    if neighbors:
        return torch.stack([-sines[:, ::2], sines[:, 1::2]], dim=2).flatten(1)
    first, second = sines.chunk(2, dim=1)
    return torch.cat([-first, second], dim=1)
