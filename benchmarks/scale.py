"""Measure what the driver does in a step of up to 100 million tokens for up to 1,024 ranks, none of which is there.

python -m benchmarks.scale --output benchmarks/results/cpu-scale.md     # 9 GiB of memory, ten minutes
python -m benchmarks.scale --tokens 1e6 --ranks 8 64

Everything that the driver computes is computed: the batch from what engines answer, its texts, metrics and advantages,
the plans, and all calls of a forward pass and of four optimizer steps, with their samples in Ray's object store. The
calls of all ranks go to one process, which opens what each is given and does nothing with it. Ranks are 8 to a node:
one dp rank ("dp = R / 8"), or 8 of them ("dp = R").
"""

from __future__ import annotations

import gc
import os
import pickle
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import ray
from attrs import define, field

from benchmarks.report import arguments, finish_page
from corerl.cluster.heartbeat import Pending
from corerl.cluster.runtime import ray_session
from corerl.config.schema import BackendChoice, Config, TrainConfig
from corerl.data.prompts import Prompt
from corerl.driver.advantages import compute_advantages
from corerl.driver.metrics import recomputed_mismatch, rollout_metrics, staleness_metrics
from corerl.engines.base import GenerateRequest, Generation, SamplingParams
from corerl.event_loop import EventLoop
from corerl.models.tokenizer import character_tokenizer
from corerl.plan.algorithm import plan_algorithm
from corerl.plan.resolve import plugins_of, resolve_tables
from corerl.plan.roles import plan_role
from corerl.plugin.spec import NoOptions
from corerl.rollout.sampler import PromptSampler, SamplerContext, assemble
from corerl.rollout.scored import ScoredRollout
from corerl.rollout.source import Policies
from corerl.trainer.group import StoredBatch, TrainGroup
from corerl.types import (
    ForwardResult,
    Metric,
    Output,
    ParallelLayout,
    SampleBatch,
    Step,
    TrainResult,
    offsets_of,
)

Row: TypeAlias = dict[str, float]  # by column

GROUP = 8  # samples of a prompt
PROMPT = (64, 257)  # tokens, from and to
RESPONSE = 8192  # tokens at most; all lengths are equally likely
NODE = 8  # ranks
MINI_BATCHES = 4
CONFIG = resolve_tables(
    Config(
        backend=BackendChoice(name="plain"),
        train=TrainConfig(mini_batches=MINI_BATCHES, tokens_per_micro_batch=16384),
        extensions=(),
    )
)
ALGORITHM = plan_algorithm(CONFIG, plugins_of(CONFIG))
METRICS = {f"metric_{number}": Metric(1.0) for number in range(8)}  # as many as a step of the clipped loss returns


def nbytes(batch: SampleBatch) -> int:
    arrays = (batch.tokens, batch.offsets, *batch.columns.values(), *batch.row_columns.values())
    return sum(array.nbytes for array in arrays)


def status(name: str) -> int:
    """Bytes that the kernel counts for this process: VmRSS now, VmHWM at most."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def forget_peak() -> None:
    """VmHWM starts again from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


@contextmanager
def timed(row: Row, part: str) -> Iterator[None]:
    """Adds the block's seconds to a part."""
    began = time.perf_counter()
    yield
    row[f"{part}, s"] = row.get(f"{part}, s", 0.0) + time.perf_counter() - began


# ---- the batch -------------------------------------------------------------------------------------------------------


def answers(tokens: int) -> tuple[list[Prompt], GenerateRequest, Generation]:
    """Prompts, and what engines answer to them."""
    rng = np.random.default_rng(0)
    prompts = max(round(tokens / (sum(PROMPT) / 2 + RESPONSE / 2) / GROUP), 1)
    asked = np.repeat(rng.integers(*PROMPT, prompts), GROUP)
    said = rng.integers(1, RESPONSE + 1, prompts * GROUP)
    request = GenerateRequest(
        tokens=rng.integers(3, 29, asked.sum()),
        offsets=offsets_of(asked),
        noise_keys=np.arange(len(asked)),
        params=SamplingParams(max_tokens=RESPONSE, stop_tokens=(2,)),
    )
    generation = Generation(
        tokens=rng.integers(3, 29, said.sum()),
        offsets=offsets_of(said),
        logprobs=-rng.random(said.sum(), dtype=np.float32),
        versions=np.ones(said.sum(), dtype=np.int64),
        truncated=said == RESPONSE,
    )
    return [Prompt(index=index, text="?", answer="") for index in range(prompts)], request, generation


def make_batch(tokens: int) -> tuple[SampleBatch, Row]:
    """The samples, and what the driver did before ranks come into it; memory is the most that its process held as it
    joined the engines' answers into a batch."""
    prompts, request, generation = answers(tokens)
    tokenizer, loop = character_tokenizer("abcdefghijklmnopqrstuvwxyz"), EventLoop("benchmark")
    context = SamplerContext(tokenizer=tokenizer, generate=_nobody, loop=loop, seed=0, params=request.params)
    sampler = PromptSampler(NoOptions(), context)
    row: Row = {"tokens": 0.0}
    gc.collect()
    forget_peak()
    with timed(row, "batch"):
        assemble(request, generation)
    peak = status("VmHWM")
    gc.collect()
    with timed(row, "texts"):
        rollout = sampler.rollout(prompts, request, generation)
    row["texts, s"] = max(row["texts, s"] - row["batch, s"], 0.0)  # which it makes too
    del request, generation
    rewards = np.random.default_rng(1).integers(0, 2, len(rollout.batch)).astype(np.float32)
    samples = rollout.batch.with_columns(old_logprobs=rollout.batch.columns["rollout_logprobs"])
    with timed(row, "metrics"):
        rollout_metrics(ScoredRollout(step=0, rollout=rollout, rewards=rewards, exact_match=None, seconds={}))
        staleness_metrics(rollout.batch, Policies(version=1))
        recomputed_mismatch(samples)
    with timed(row, "advantages"):
        estimate, how = ALGORITHM.estimate, ALGORITHM.settings
        samples = compute_advantages(samples, rewards, estimate, how, max_tokens=RESPONSE).samples
    return samples, {**row, "tokens": len(samples.tokens) / 1e6, "memory, GiB": peak / 2**30}


async def _nobody(*_: Any, **__: Any) -> Generation:
    raise NotImplementedError("the answers are made up")


# ---- the ranks -------------------------------------------------------------------------------------------------------


class Reader:
    """The process that is called in the place of all ranks."""

    def call(self, method: str, *args: Any) -> None:
        """The samples are there when this begins."""


@define(eq=False)
class Ranks:
    """In the place of a RayGroup: keeps what each rank was given last, and answers what a rank would."""

    layouts: Sequence[ParallelLayout]
    reader: Any
    given: Sequence[tuple[Any, ...]] = ()
    calling: float = 0.0  # seconds of the calls themselves
    answering: float = 0.0  # seconds in which the driver would wait for ranks
    ended = False
    pieces: dict[Any, int] = field(factory=dict)  # bytes of the samples by reference
    pulled: set[tuple[str, Any]] = field(factory=set)  # (node, reference)
    arguments: int = 0  # bytes of all calls, without the samples

    def count(self) -> None:
        """Adds up what was just given."""
        for node, (samples, *rest) in zip(self.nodes, self.given, strict=True):
            if samples not in self.pieces:
                self.pieces[samples] = nbytes(ray.get(samples))
            self.pulled.add((node, samples))
            self.arguments += len(pickle.dumps(rest, protocol=5))

    @property
    def nodes(self) -> list[str]:
        return [f"node {layout.rank // NODE}" for layout in self.layouts]

    def start_each(self, method: str, arguments: Sequence[tuple[Any, ...]], *, at: str = "") -> Pending:
        self.given = arguments
        began = time.perf_counter()
        refs = [self.reader.call.remote(method, *each) for each in arguments]
        self.calling += time.perf_counter() - began
        return Pending(method, 0, {}, tuple(refs))

    def wait(self, pending: Pending) -> list[Any]:
        began = time.perf_counter()
        ray.get(list(pending.refs))
        if pending.method.startswith("train"):
            results: list[Any] = [
                TrainResult(applied=True, metrics=METRICS, grad_norm=1.0, tokens=0) for _ in self.layouts
            ]
        else:
            results = [self._passed(*each) for each in zip(self.layouts, self.given, strict=True)]
        self.answering += time.perf_counter() - began
        return results

    def _passed(self, layout: ParallelLayout, given: tuple[Any, ...]) -> ForwardResult:
        samples, part = given[:2]
        real = ~np.repeat(part.filler, np.diff(part.offsets))
        if not layout.outputs or not real.any():
            return ForwardResult(rows=np.zeros(0, np.int64), offsets=np.zeros(1, np.int64), outputs={})
        offsets = offsets_of(ray.get(samples).lengths[part.rows[real]])
        column = np.full(offsets[-1], -1.0, dtype=np.float32)
        return ForwardResult(rows=part.rows[real], offsets=offsets, outputs={Output.LOGPROBS: column})


def medians(rounds: Sequence[Row]) -> Row:
    """Of seconds; memory and bytes are those of the last round."""
    seconds = {name: statistics.median(row[name] for row in rounds) for name in rounds[0] if name.endswith(", s")}
    return {**rounds[-1], **seconds}


def layouts_of(ranks: int, dp_size: int) -> list[ParallelLayout]:
    """Ranks of one dp rank are neighbors."""
    width = ranks // dp_size
    return [
        ParallelLayout(rank=rank, world_size=ranks, dp_rank=rank // width, dp_size=dp_size, outputs=rank % width == 0)
        for rank in range(ranks)
    ]


def measure(samples: SampleBatch, reader: Any, *, ranks: int, dp_size: int) -> Row:
    """A step of this batch for so many ranks."""
    row: Row = {"tokens": len(samples.tokens) / 1e6, "ranks": ranks, "dp": dp_size}
    processes = Ranks(layouts_of(ranks, dp_size), reader)
    group = TrainGroup(
        processes,  # type: ignore[arg-type]  # all that a group asks of its processes
        plan_role("actor", CONFIG, plugins_of(CONFIG), device="cpu"),
    )
    group.layouts = list(processes.layouts)
    ray.get([reader.call.remote("nothing") for _ in range(20)])  # Ray leases and connects
    gc.collect()
    forget_peak()
    with timed(row, "samples to ranks"):
        passing = group.forward(samples, Output.LOGPROBS)
    processes.count()
    with timed(row, "results"):
        found = passing.result()
    samples = samples.with_columns(old_logprobs=found[Output.LOGPROBS])
    with timed(row, "plans"):
        plans = group.plan_steps(samples, seed=0)
    shared, steps = StoredBatch(samples), []
    for number, plan in enumerate(plans):
        step = Step(optimizer_step=number, rollout_step=0, lr=1e-6)
        with timed(row, "samples to ranks"):
            steps.append(group.train(shared, plan, ALGORITHM.objectives["actor"].loss, step))
        processes.count()
    with timed(row, "results"):
        for each in steps:
            each.result()
    row["samples to ranks, s"] -= processes.calling
    row["results, s"] -= processes.answering
    row["calls, s"] = processes.calling
    nodes: Counter[str] = Counter()
    for node, piece in processes.pulled:
        nodes[node] += processes.pieces[piece]
    return {
        **row,
        "all, s": sum(seconds for name, seconds in row.items() if name.endswith(", s")),
        "put, GB": sum(processes.pieces.values()) / 1e9,
        "a node pulls, MB": max(nodes.values()) / 1e6,
        "arguments, MB": processes.arguments / 1e6,
        "memory, GiB": status("VmHWM") / 2**30,
    }


# ---- the tables ------------------------------------------------------------------------------------------------------

ABOUT = f"""
One step: {MINI_BATCHES} optimizer steps and a forward pass of GRPO, in groups of {GROUP}, prompts of {PROMPT[0]} to
{PROMPT[1] - 1} tokens and responses of 1 to {RESPONSE:,}. Nodes have {NODE} ranks, and none of them is there: one
process is called in the place of all, and does nothing with what it is given. Seconds are medians of the rounds; tokens
are millions. *texts*: responses decoded, by a tokenizer of one token a character. *samples to ranks*: the plan of the
forward pass, cutting the batch into what each node reads, and putting that into Ray's object store. *calls*: Ray's
submission of all calls. *results*: the log-probs of all ranks as one column, and merged metrics. *put*: bytes in
the store. *arguments*: of all calls, without the samples. *memory*: the most that the driver held, with what it put
into the store.
"""


def table(rows: Sequence[Row]) -> str:
    lines = [list(rows[0]), ["---"] * len(rows[0]), *([_short(each) for each in row.values()] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def main() -> None:
    parser = arguments(__doc__, rounds=3, tiny=False, output="the markdown file; without it, it is printed")
    parser.add_argument("--tokens", type=float, nargs="+", default=[1e6, 1e7, 1e8], help="of a batch (1e6 1e7 1e8)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 256, 1024], help="(8 64 256 1024)")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    batches: list[Row] = []
    rows: list[Row] = []
    with ray_session(address="", cpus=1):
        reader: Any = ray.remote(Reader).remote()
        for tokens in args.tokens:
            before = [make_batch(int(tokens))[1] for _ in range(args.rounds - 1)]
            samples, last = make_batch(int(tokens))
            batches.append(medians([*before, last]))
            for ranks in args.ranks:
                for dp_size in (ranks // NODE, ranks):
                    found = [measure(samples, reader, ranks=ranks, dp_size=dp_size) for _ in range(args.rounds)]
                    rows.append(medians(found))
                    print(table(rows[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
            del samples
    packages = {"Ray": ray.__version__, "numpy": np.__version__, "load average before": f"{load:.1f}"}
    parts = [ABOUT.strip(), "## Before ranks come into it", table(batches), "## By number of ranks", table(rows)]
    finish_page("The driver's work in a step", parts, args.output, packages=packages, command="benchmarks.scale")


if __name__ == "__main__":
    main()
