"""What a rank does in tests of operations that ranks share: one process of a pool calls one of these."""

from __future__ import annotations

import torch
import torch.distributed as dist
from attrs import frozen
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from corerl.ops.clip import grad_norm
from corerl.ops.logprobs import token_logprobs

TOKENS, WIDTH = 11, 8


@frozen(kw_only=True)
class Head:
    """An output matrix of `vocab` real rows, padded with rows that a softmax would notice."""

    vocab: int
    rows: int
    dtype: torch.dtype
    temperature: float = 1.0
    bias: bool = False
    with_entropy: bool = True
    chunk: int | None = None
    targets: tuple[int, ...] = ()  # (K,) if a token has several, of which the last two are equal

    def made(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
        """hidden [T, H], weight [rows, H], bias [rows], targets [T, ...], and [2, T] to weigh the results with."""
        generator = torch.Generator().manual_seed(3)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype)

        hidden, weight, bias = random(TOKENS, WIDTH), random(self.rows, WIDTH), random(self.rows)
        weight[self.vocab :] *= 10
        targets = torch.randint(0, self.vocab, (TOKENS, *self.targets), generator=generator)
        targets[0], targets[1] = 0, self.vocab - 1
        if self.targets:
            targets[:, -1] = targets[:, -2]
        return hidden, weight, bias if self.bias else None, targets, random(2, TOKENS)


@frozen(kw_only=True)
class Found:
    logprobs: torch.Tensor
    entropy: torch.Tensor | None
    d_hidden: torch.Tensor
    d_weight: torch.Tensor
    d_bias: torch.Tensor | None


def found(head: Head) -> Found:
    """What this rank gets with its part of the rows; `hidden` has its part of the gradient."""
    hidden, weight, bias, targets, weigh = head.made()
    rows = head.rows // dist.get_world_size()
    own = slice(dist.get_rank() * rows, (dist.get_rank() + 1) * rows)
    hidden.requires_grad_()
    weight = weight[own].clone().requires_grad_()
    bias = None if bias is None else bias[own].clone().requires_grad_()
    logprobs, entropy = token_logprobs(
        hidden,
        weight,
        targets,
        bias=bias,
        temperature=head.temperature,
        with_entropy=head.with_entropy,
        chunk_tokens=head.chunk,
        group=dist.group.WORLD,
        vocab_size=head.vocab if head.vocab < head.rows else None,
    )
    loss = (logprobs.t() @ weigh[0].to(logprobs.dtype)).sum()
    if entropy is not None:
        loss = loss + entropy @ weigh[1].to(logprobs.dtype)
    loss.backward()
    assert hidden.grad is not None and weight.grad is not None
    return Found(
        logprobs=logprobs.detach(),
        entropy=None if entropy is None else entropy.detach(),
        d_hidden=hidden.grad,
        d_weight=weight.grad,
        d_bias=None if bias is None else bias.grad,
    )


def norm_of_replicas(off: float) -> float:
    """The norm of a gradient that each rank holds whole, as a replica; one of rank 1's numbers is larger by `off`."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replica", "shard"))
    values = torch.tensor([1.0 + off * dist.get_rank()])
    grad = DTensor.from_local(values, mesh, [Replicate(), Shard(0)], run_check=False)
    param = nn.Parameter(torch.zeros_like(grad))
    param.grad = grad
    return float(grad_norm([param]))


def collectives_of_a_pass(tokens: int, chunk: int) -> tuple[int, int]:
    """All-reduces of a forward and of a backward pass."""
    counts: list[int] = []
    plain = dist.all_reduce

    def counted(*args: object, **kwargs: object) -> object:
        counts.append(1)
        return plain(*args, **kwargs)

    dist.all_reduce = counted
    try:
        hidden = torch.ones(tokens, WIDTH, requires_grad=True)
        weight = torch.ones(4, WIDTH, requires_grad=True)
        targets = torch.zeros(tokens, dtype=torch.long)
        logprobs, _ = token_logprobs(
            hidden, weight, targets, temperature=1.0, chunk_tokens=chunk, group=dist.group.WORLD
        )
        forward = len(counts)
        logprobs.sum().backward()
        return forward, len(counts) - forward
    finally:
        dist.all_reduce = plain
