"""Plan and pack a large rollout batch, against a numpy copy of the same arrays."""

from __future__ import annotations

import gc
import time
from pathlib import Path

import numpy as np

from benchmarks.report import Comparison, Number, Report, finish, in_turns, parser
from benchmarks.samples import make_batch, plan_one_step
from corerl.data.packing import pack
from corerl.types import Array, SampleBatch

DP_SIZE = 8
TOKENS_PER_MICRO_BATCH = 16384


def arrays_of(batch: SampleBatch) -> list[Array]:
    return [batch.tokens, batch.offsets, *batch.columns.values(), *batch.rows.values()]


def status(name: str) -> int:
    """Bytes that the kernel counts for this process: VmRSS now, VmHWM at most."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def forget_peak() -> None:
    """VmHWM starts again from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def measure(*, rounds: int, size: int) -> Report:
    before = status("VmRSS")
    lengths = np.random.default_rng(1).integers(1000, 2001, size)
    batch = make_batch(lengths, prompt=100, vocab=150_000)
    held = sum(array.nbytes for array in arrays_of(batch))
    planning: list[float] = []
    peaks: list[float] = []

    def ours(_: int) -> float:
        gc.collect()
        forget_peak()
        began = time.perf_counter()
        plan = plan_one_step(batch, dp_size=DP_SIZE, tokens_per_micro_batch=TOKENS_PER_MICRO_BATCH)
        planned = time.perf_counter()
        tokens = 0
        for dp_rank in range(DP_SIZE):
            for micro in pack(batch, plan.share(dp_rank), sequence_multiple=1).micro_batches:
                tokens += len(micro.tokens) if micro.samples[0] >= 0 else 0
        ended = time.perf_counter()
        assert tokens == len(batch.tokens), (tokens, len(batch.tokens))
        planning.append(planned - began)
        peaks.append((status("VmHWM") - before) / held)
        return ended - began

    def copies(_: int) -> float:
        gc.collect()
        began = time.perf_counter()
        for array in arrays_of(batch):
            array.copy()
        return time.perf_counter() - began

    seconds, others = in_turns(rounds, ours, copies)
    return Report(
        name="packing",
        size=f"{size:,} samples, {len(batch.tokens) / 1e6:.1f} M tokens, {held / 1e9:.2f} GB, dp {DP_SIZE}",
        comparisons=[Comparison(what="plan and pack", against="numpy's copy", ours=seconds, other=others)],
        numbers=[
            Number(what="plan and pack", values=seconds, unit="s", target=2.0),
            Number(what="of that the plan, which alone runs on the driver", values=planning, unit="s"),
            Number(what="peak memory of it, the arrays included", values=peaks, unit="x the arrays", target=3.0),
        ],
        note=(
            "Samples of 1000 to 2000 tokens, with loss_mask, two columns of log-probs, advantages and versions. They "
            f"are planned as one optimizer step and packed in this process for all {DP_SIZE} dp ranks, in "
            f"micro-batches of {TOKENS_PER_MICRO_BATCH} tokens that are dropped as soon as they are built. In a run "
            "each rank packs its own share, one micro-batch at a time. The other side copies each array as a whole."
        ),
    )


if __name__ == "__main__":
    args = parser(__doc__, rounds=5, size=100_000, unit="samples").parse_args()
    finish(measure(rounds=args.rounds, size=args.size), args.output)
