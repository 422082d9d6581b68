"""The training step written out by hand with torch and transformers alone: what every backend has to come out at.

Nothing here is CoreRL's: each sequence passes through the model by itself, all of its logits are kept, and the
objective is spelled term by term.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

CLIP_LOW, CLIP_HIGH, ENTROPY, KL = 0.2, 0.28, 0.01, 0.05
BETAS, EPS, DECAY, CLIP_NORM = (0.85, 0.97), 1e-5, 0.1, 0.5


@dataclass
class BareRun:
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    weights: dict[str, np.ndarray] = field(default_factory=dict)  # by the names of transformers' modules


@dataclass
class Sample:
    """One sample: its tokens and what is said of each of them."""

    tokens: torch.Tensor
    chosen: torch.Tensor  # whether the policy chose the token
    advantages: torch.Tensor
    old: torch.Tensor
    reference: torch.Tensor


@dataclass(frozen=True)
class Settings:
    """Of AdamW and of clipping, in one step."""

    betas: tuple[float, float] = BETAS
    eps: float = EPS
    decay: float = DECAY
    clip_norm: float = CLIP_NORM


def train(
    directory: Path,
    batches: Sequence[Sequence[Sample]],
    rates: Sequence[float],
    temperatures: Sequence[float],
    settings: Sequence[Settings] = (),
) -> BareRun:
    """One AdamW step for each batch, at its learning rate and temperature, and with its settings if there are any."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").train()
    matrices = [param for param in model.parameters() if param.ndim > 1]
    others = [param for param in model.parameters() if param.ndim <= 1]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": others}])
    decayed, kept = optimizer.param_groups
    run = BareRun()
    every = settings or [Settings()] * len(batches)
    for batch, rate, temperature, own in zip(batches, rates, temperatures, every, strict=True):
        count = sum(int(sequence.chosen.sum()) for sequence in batch)
        loss = torch.stack([objective(model, sequence, temperature) for sequence in batch]).sum() / count
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), own.clip_norm)
        decayed["weight_decay"], kept["weight_decay"] = own.decay, 0.0
        for group in optimizer.param_groups:
            group["lr"], group["betas"], group["eps"] = rate, own.betas, own.eps
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(loss.item())
        run.grad_norms.append(norm.item())
    run.weights = {name: param.detach().numpy() for name, param in model.named_parameters()}
    return run


def objective(model: Any, sequence: Sample, temperature: float) -> torch.Tensor:
    """Summed over the tokens that the policy chose: PPO's clipped term, an entropy bonus, and k3 to the reference,
    an expectation over the policy by its ratio to the old one."""
    logits = model(input_ids=sequence.tokens[None], use_cache=False).logits[0]
    total = torch.zeros(())
    for t in range(1, len(sequence.tokens)):
        if not sequence.chosen[t]:
            continue
        probabilities = torch.softmax(logits[t - 1] / temperature, dim=0)
        logprob = torch.log(probabilities[sequence.tokens[t]])
        entropy = -(probabilities * torch.log(probabilities)).sum()
        ratio = torch.exp(logprob - sequence.old[t])
        gain = torch.minimum(
            ratio * sequence.advantages[t],
            torch.clip(ratio, 1 - CLIP_LOW, 1 + CLIP_HIGH) * sequence.advantages[t],
        )
        apart = sequence.reference[t] - logprob
        total = total - gain - ENTROPY * entropy + KL * ratio * (torch.exp(apart) - 1 - apart)
    return total


def sequences(tokens: np.ndarray, offsets: np.ndarray, columns: Mapping[str, np.ndarray]) -> Iterator[Sample]:
    """Ragged arrays cut into their samples."""
    for start, end in itertools.pairwise(offsets.tolist()):

        def part(name: str, start: int = start, end: int = end) -> torch.Tensor:
            return torch.tensor(columns[name][start:end])

        yield Sample(
            tokens=torch.tensor(tokens[start:end]),
            chosen=part("loss_mask"),
            advantages=part("advantages"),
            old=part("old_logprobs"),
            reference=part("ref_logprobs"),
        )
