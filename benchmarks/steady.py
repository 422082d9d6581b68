"""Check whether a colocated run grows: GPU and host memory of each step, with every update verified.

python -m benchmarks.steady --output found/steady.json                                 # FSDP and SGLang on one GPU
python -m benchmarks.steady --backend megatron --set engines.sglang.attention_backend=fa3
python -m benchmarks.steady --tiny --steps 12                                          # on a CPU, engine transformers

The run is `corerl train` on the quickstart's task. Trainer and engine take turns in the memory of one GPU: sleep,
wake-up, an update by `ipc`, all sums compared (`weights.verify_every=1`). Memory is sampled from outside, fifty times a
second: that of the fullest GPU as the driver reports it, including this program's own context; the private memory of
the run's processes (RssAnon of each); and /dev/shm. A step's numbers are the largest and the smallest values seen in
it. Growth is the slope of a straight line through the steps after the first ten, in which pools and caches fill up.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from benchmarks.report import Number, Report, arguments, finish
from benchmarks.runs import Ended, Watched, say_steps, sglang

MIB = 2**20
SAMPLE_SECONDS = 0.02
WARM = 10  # steps, or a third of them where there are few
TARGET = 1.0  # MiB a step
UNTOLD = "cannot report what it has loaded"

# The quickstart's model in a size that SGLang's kernels take; in half precision.
SHAPE = [
    *("model.config.hidden_size=256", "model.config.intermediate_size=512", "model.config.head_dim=64"),
    "model.config.max_position_embeddings=2048",
]


class Watch:
    """Samples a run's memory in threads of its own: MiB by what it is of, and by step."""

    def __init__(self, run: Watched) -> None:
        self._run, self._step, self._over = run, 0, threading.Event()
        self.seen: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        self._pids: tuple[float, dict[int, str]] = 0.0, {}
        self._threads = [threading.Thread(target=self._sample, args=(read,)) for read in (self._gpu, self._host)]
        for thread in self._threads:
            thread.start()

    def step(self, run: Watched) -> None:
        self._step = sum("time/step" in line for line in run.lines())

    def close(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _sample(self, read: Callable[[], dict[str, float]]) -> None:
        while not self._over.wait(SAMPLE_SECONDS):
            for what, mib in read().items():
                self.seen[what][self._step].append(mib)

    def _gpu(self) -> dict[str, float]:
        pairs = [torch.cuda.mem_get_info(device) for device in range(torch.cuda.device_count())]
        return {"GPU": max((total - free) / MIB for free, total in pairs)} if pairs else {}

    def _host(self) -> dict[str, float]:
        """What all processes have for themselves, and what they share."""
        if time.monotonic() - self._pids[0] > 1.0:
            self._pids = time.monotonic(), self._run.processes()
        kib = 0
        for pid in self._pids[1]:
            try:
                lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            except OSError:  # it has ended meanwhile
                continue
            kib += sum(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))
        free = os.statvfs("/dev/shm")
        return {"host, all processes": kib / 1024, "/dev/shm": (free.f_blocks - free.f_bfree) * free.f_frsize / MIB}


def slope(values: list[float]) -> float:
    """MiB a step of a straight line through them."""
    if len(values) < 2:
        return float("nan")
    return float(np.polyfit(np.arange(len(values)), values, 1)[0])


def settings(args: argparse.Namespace) -> list[str]:
    common = [
        *(f"backend.name={args.backend}", f"run.steps={args.steps}", "weights.verify_every=1", "eval.every=0"),
        *("weights.transport=ipc", "cluster.offload=always", "checkpoint.every=0", "checkpoint.export=false"),
        *("roles.actor.ranks=1", "rollout.replicas=1"),
    ]
    if args.tiny:
        return [*common, "cluster.device=cpu", "rollout.prompts=8", *args.set]
    engine = sglang(memory=0.2, attention_backend=os.environ.get("ATTENTION", "triton"))
    return [*common, "cluster.device=cuda", "train.precision=bfloat16", *SHAPE, *engine, *args.set]


def report(args: argparse.Namespace, ended: Ended, watch: Watch, command: str) -> Report:
    steps = len(ended.steps)
    warm = min(WARM, steps // 3)
    rows = []
    for what, seen in watch.seen.items():
        for name, pick in (("largest", max), ("smallest", min)):
            if values := [pick(seen[step]) for step in range(warm, steps) if seen[step]]:
                rows.append(Number(what=f"{what}: {name} of each step", values=values, unit="MiB"))
                rows.append(Number(what="its growth a step", values=[slope(values)], unit="MiB", target=TARGET))
    verified = 0 if UNTOLD in " ".join(ended.output.split()) else steps + 1  # one before the first step
    rows.append(Number(what="steps done", values=[steps], unit="steps"))
    rows.append(Number(what="updates whose weights were verified in the engine", values=[verified], unit="updates"))
    rows.append(Number(what="seconds a step", values=[step["time/step"] for step in ended.steps[warm:]], unit="s"))
    return Report(
        name="steady",
        size=f"{steps} colocated steps, {args.backend}, {'a CPU' if args.tiny else 'one GPU'}",
        numbers=rows,
        note=f"`{command}`. Growth is over the last {steps - warm} steps. A run ends if its engine holds other weights "
        "than it was sent; this one " + ("ended well." if ended.status == 0 else f"ended with {ended.status}."),
    )


def main() -> int:
    command = arguments(__doc__, deadline=400.0, settings="more settings of the runs")
    command.add_argument("--backend", default="fsdp")
    command.add_argument("--steps", type=int, default=50)
    args = command.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="steady-") as directory,
        Watched(*settings(args), directory=Path(directory)) as run,
    ):
        watch = Watch(run)
        try:
            ended = run.wait(args.deadline, watch.step)
        finally:
            watch.close()
        if ended.status != 0:
            say_steps(ended, well=False)
        finish(report(args, ended, watch, run.command), args.output)
    return 0 if ended.status == 0 and len(ended.steps) == args.steps else 1


if __name__ == "__main__":
    raise SystemExit(main())
