"""Measure log-probs and entropy, forward and backward, against their matrix products and against torch's operators.

python -m benchmarks.logprobs --output found/logprobs.json
python -m benchmarks.logprobs --tiny

16k tokens of Qwen3's vocabulary, in bfloat16; hidden states are 1024 wide as in the 0.6B shape and 4096 as in the 8B
one. The products are those of the logits, twice since the backward pass recomputes them, of the gradient of the hidden
states, and of the weight's gradient, which is accumulated in float32; in chunks of as many tokens.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from unittest import mock

import torch
from torch import Tensor

from benchmarks.report import Comparison, Number, Report, finish, in_turns
from benchmarks.steps import GIB
from corerl.ops import logprobs as ops
from corerl.ops import softmax

TOKENS, WORDS, WIDTHS = 16384, 151936, (1024, 4096)
REPEATS = 3  # in a measured round


class Head:
    """One output matrix, and the hidden states and targets that it is asked about."""

    def __init__(self, width: int, *, tokens: int, words: int, device: torch.device, chunk: int | None) -> None:
        generator = torch.Generator(device).manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16).mul_(0.05)

        self.device = device
        self.hidden, self.weight = random(tokens, width).requires_grad_(), random(words, width).requires_grad_()
        self.targets = torch.randint(0, words, (tokens,), generator=generator, device=device)
        self.weigh = torch.rand(2, tokens, generator=generator, device=device)
        self.chunk = chunk or ops.chunk_of(self.hidden, words)

    def ours(self, *, with_entropy: bool) -> None:
        logprobs, entropy = ops.token_logprobs(
            self.hidden,
            self.weight,
            self.targets,
            temperature=0.9,
            with_entropy=with_entropy,
            chunk_tokens=self.chunk,
        )
        loss = logprobs @ self.weigh[0] + (entropy @ self.weigh[1] if entropy is not None else 0)
        torch.autograd.grad(loss, (self.hidden, self.weight))

    def by_torch(self, *, with_entropy: bool) -> None:
        with mock.patch.object(softmax, "kernels_for", new=_none):
            self.ours(with_entropy=with_entropy)

    @torch.no_grad()
    def products(self) -> None:
        d_hidden = torch.empty_like(self.hidden)
        d_weight = torch.zeros_like(self.weight, dtype=torch.float32)
        for rows, out in zip(self.hidden.split(self.chunk), d_hidden.split(self.chunk), strict=True):
            torch.nn.functional.linear(rows, self.weight)
            z = torch.nn.functional.linear(rows, self.weight)
            torch.mm(z, self.weight, out=out)
            ops._add_product(d_weight, z.t(), rows)
        d_weight.to(self.weight.dtype)

    def seconds(self, work: Callable[[], None], _: int = 0) -> float:
        self._wait()
        began = time.perf_counter()
        for _ in range(REPEATS):
            work()
        self._wait()
        return (time.perf_counter() - began) / REPEATS

    def peak(self, work: Callable[[], None]) -> float:
        """GiB that torch had at most, beyond what was there before."""
        if self.device.type != "cuda":
            return 0.0
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        return (torch.cuda.max_memory_allocated() - before) / GIB

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def _none(logits: Tensor) -> None:
    """A mock would keep the logits that it was called with."""


def measure(
    *, rounds: int, widths: tuple[int, ...], tokens: int, words: int, device: torch.device, chunk: int | None
) -> Report:
    comparisons, numbers = [], []
    for width in widths:
        head = Head(width, tokens=tokens, words=words, device=device, chunk=chunk)
        for what, with_entropy in ((f"H {width}, log-probs", False), (f"H {width}, log-probs and entropy", True)):
            ours, by_torch = (partial(work, with_entropy=with_entropy) for work in (head.ours, head.by_torch))
            for against, other in (("the matrix products", head.products), ("by torch's operators", by_torch)):
                for work in (ours, other):
                    work()
                mine, theirs = in_turns(rounds, partial(head.seconds, ours), partial(head.seconds, other))
                comparisons.append(Comparison(what=what, against=against, ours=mine, other=theirs))
            peaks = [head.peak(ours), head.peak(by_torch)]
            for name, value in zip(("", ", by torch's operators"), peaks, strict=True):
                numbers.append(Number(what=f"{what}{name}: peak", values=[value], unit="GiB"))
    return Report(
        name="logprobs",
        size=f"{tokens:,} tokens, {words:,} words, chunks of {head.chunk} tokens",
        comparisons=comparisons,
        numbers=numbers,
        note="Forward and backward, with the gradients of the hidden states and of the weight.",
        versions={"GPU": torch.cuda.get_device_name(device)} if device.type == "cuda" else {},
    )


def main() -> None:
    parsed = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parsed.add_argument("--rounds", type=int, default=6)
    parsed.add_argument("--chunk", type=int, help="tokens whose logits exist at a time; otherwise as many as in a run")
    parsed.add_argument("--tiny", action="store_true", help="on a CPU, to see that it runs")
    parsed.add_argument("--output", help="a JSON file for what was found; without it a table is printed")
    args = parsed.parse_args()
    widths, tokens, words = ((8, 16), 64, 100) if args.tiny else (WIDTHS, TOKENS, WORDS)
    device = torch.device("cpu" if args.tiny else "cuda")
    found = measure(rounds=args.rounds, widths=widths, tokens=tokens, words=words, device=device, chunk=args.chunk)
    finish(found, args.output)


if __name__ == "__main__":
    main()
