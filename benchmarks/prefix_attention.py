"""Measure attention of one layer over samples that begin alike: CoreRL's kernel call on copies of keys and values,
against FlexAttention with a block mask, and against each sample by itself.

python -m benchmarks.prefix_attention --output found/prefix_attention.json
python -m benchmarks.prefix_attention --tiny

All sides compute the same outputs and gradients, of 16 samples of one prompt unless `--shape` says otherwise; what each
is apart from float32 is in the notes. Samples by themselves are gathered from the same tokens, in the time that is
measured. FlexAttention is compiled, and its mask is made once, outside of it, as for a pass over layers. One GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.report import Comparison, Number, Report, arguments, finish, in_turns, joined, table
from benchmarks.steps import timed
from corerl.ops import PackedSequences, packed_attention
from corerl.types import IntArray, offsets_of

HEADS, KEYS, SIZE = 16, 8, 128
SHAPES = {"2048+256": (2048, 256), "512+512": (512, 512), "256+2048": (256, 2048), "8192+256": (8192, 256)}
SAMPLES = 16
ALLOWED = 2e-2  # of the largest number: what bfloat16 rounds, with a margin

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def sides(packing: PackedSequences, device: torch.device) -> Mapping[str, Attention]:
    """What computes attention of the N tokens of a packing with prefixes; each takes q [N, H, D], k, v [N, Hkv, D]."""
    shared = packing.prefixes
    assert shared is not None

    def apart(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (each.index_select(0, shared.place) for each in (q, k, v))
        return packed_attention(q, k, v, shared.sequences).index_select(0, shared.token)

    # A token is seen by those that come after it in the order of the tree, up to the end of what its sequence begins.
    ends = torch.full((packing.tokens,), packing.tokens, device=device)
    first = int(packing.bounds[1])
    prompt = int((np.diff(shared.sequences.bounds) - np.diff(packing.bounds))[1])
    bounds = torch.tensor(packing.bounds, device=device)
    own = torch.searchsorted(bounds, torch.arange(packing.tokens, device=device), right=True)
    ends[first:] = bounds[own[first:]]
    ends[prompt:first] = first

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < ends[key])

    mask = create_block_mask(seen, None, None, packing.tokens, packing.tokens, device=device)
    compiled: Any = torch.compile(flex_attention, dynamic=False)

    def flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (each.transpose(0, 1)[None] for each in (q, k, v))
        out: Tensor = compiled(q, k, v, block_mask=mask, enable_gqa=True)
        return out[0].transpose(0, 1)

    found: dict[str, Attention] = {
        "CoreRL": partial(packed_attention, packing=packing),
        "each sample by itself": apart,
    }
    return {**found, "FlexAttention": flex} if device.type == "cuda" else found  # it has no backward pass on CPUs


def passed(attention: Attention, given: tuple[Tensor, ...], slope: Tensor) -> list[Tensor]:
    """The output, and the gradients in q, k and v."""
    q, k, v = (each.detach().requires_grad_() for each in given)
    out = attention(q, k, v)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), slope)]


def measure(prompt: int, answer: int, *, rounds: int, device: torch.device) -> Report:
    lengths: IntArray = np.full(SAMPLES, prompt + answer)
    shared = np.full(SAMPLES, prompt)
    shared[0] = 0
    packing = PackedSequences.of(offsets_of(lengths), device).sharing(shared)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(0)
    q, k, v, slope = (
        torch.randn(packing.tokens, heads, SIZE, generator=generator, device=device).to(dtype)
        for heads in (HEADS, KEYS, KEYS, HEADS)
    )
    every = sides(packing, device)
    exact = passed(every["CoreRL"], (q.float(), k.float(), v.float()), slope.float())
    notes = []
    for name, attention in every.items():
        found = [passed(attention, (q, k, v), slope) for _ in range(3)][-1]
        apart = [float((a.float() - b).abs().max() / b.abs().max()) for a, b in zip(found, exact, strict=True)]
        notes.append(f"{name}: " + ", ".join(f"{each:.1e}" for each in apart))
        if max(apart) > ALLOWED:
            raise SystemExit(f"{name}: output and gradients are {apart} of their largest number from float32's")

    def seconds(name: str, _: int) -> float:
        times = 20 if device.type == "cuda" else 1
        return timed(device, lambda: [passed(every[name], (q, k, v), slope) for _ in range(times)]) / times

    what = f"{SAMPLES} x {prompt} + {answer} tokens, forward and back"
    comparisons = []
    for name in list(every)[1:]:
        ours, other = in_turns(rounds, partial(seconds, "CoreRL"), partial(seconds, name))
        comparisons.append(Comparison(what=what, against=name, ours=ours, other=other, target=1.0))
    return Report(
        name="prefix_attention",
        size=f"{HEADS} heads of {SIZE}, {KEYS} of keys, {dtype}",
        comparisons=comparisons,
        numbers=[Number(what=f"{what}: tokens that go through", values=[packing.tokens], unit="")],
        note=f"{what}: output, dq, dk, dv differ from float32, by so much of the largest number: {'; '.join(notes)}.",
        versions={"torch": torch.__version__},
    )


def main() -> None:
    parser = arguments(__doc__, rounds=5)
    parser.add_argument("--shape", nargs="*", choices=SHAPES, default=list(SHAPES), help="of prompt and answers")
    args = parser.parse_args()
    device = torch.device("cpu" if args.tiny else "cuda")
    reports = []
    for name in args.shape:
        prompt, answer = (max(8, each // 64) if args.tiny else each for each in SHAPES[name])
        reports.append(measure(prompt, answer, rounds=args.rounds, device=device))
        print(f"{table(reports[-1:])}\n\n{reports[-1].note}\n", flush=True)
        torch.compiler.reset()
    if args.output:
        finish(joined("prefix_attention", reports), args.output)


if __name__ == "__main__":
    main()
