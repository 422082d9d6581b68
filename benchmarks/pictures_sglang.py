"""Compare what SGLang says of prompts with pictures with transformers' own forward, for tiny models of five families.

python -m benchmarks.pictures_sglang --output found/pictures.json        # one GPU with 40 GiB, SGLang; 3 to 8 minutes
python -m benchmarks.pictures_sglang qwen3_vl --tiny                      # on a CPU, with a stand-in

Each family has a process with an engine as in a run: its server gets the config and the processor's files, the weights
by an update through files, and prompts as contracted tokens with files. It samples rows without pictures, with one,
with two, and all of these at once, twice, so that the second time finds prefixes and features in its caches; then it
sleeps, wakes up, gets its weights again and samples all once more. The other side is transformers' forward of each
sequence alone, in float32 with the same weights, rounded to bfloat16. All servers start at once. `ATTENTION` names
SGLang's attention of texts, by default Triton's; its towers' is torch's, since FlashAttention 3 is not everywhere.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.engine_sides import STAND_IN
from benchmarks.report import ROOT, Number, Report, arguments, finish
from benchmarks.runs import SERVER

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "gemma3", "mistral3")
TARGET = 2.0  # times the difference of rows without pictures
DEADLINE = 440.0  # seconds for one family
START_SECONDS = 360.0
ROWS = 8  # of each number of pictures
TOKENS = 32  # sampled for each, at most
SIZES = ((64, 64), (64, 32), (48, 64), (32, 32))  # (W, H)
# Small enough for five servers on one GPU.
SMALL = {
    **SERVER,
    "mm_attention_backend": "sdpa",
    "cuda_graph_max_bs_decode": 64,
    "max_total_tokens": 2**15,
    "max_running_requests": 64,
}
COLUMNS = {
    "text": "text",
    "one": "one picture",
    "two": "two pictures",
    "mixed": "all rows at once, those with pictures",
    "cached": "again",
    "slept": "after sleep",
}
NOTE = (
    "Means of |log-prob of the engine - log-prob of transformers in float32| over the sampled tokens. The last but two "
    "is the mean difference that a picture turned upside down makes in transformers: where it is small, the others say "
    "little of pictures. That the server reads the tokens of the row, placeholders and all, is compared by the engine, "
    "row by row, which fails otherwise."
)


# ---- one family, in a process of its own -----------------------------------------------------------------------------


class Found:
    """What a family's process has found, written after each finding: it may hang, or its server may end."""

    def __init__(self, file: Path) -> None:
        self.values: dict[str, Any] = {"errors": {}}
        self._file = file

    def tell(self, **values: Any) -> None:
        self.values |= values
        self._file.write_text(json.dumps(self.values))

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What fails in it is told, and others go on."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.tell(errors={**self.values["errors"], name: f"{type(error).__name__}: {error}"})


def measure_family(family: str, found: Found, directory: Path, *, tiny: bool) -> None:
    import torch
    from attrs import evolve
    from transformers import AutoModelForImageTextToText

    from corerl.config import ModelConfig
    from corerl.pictures import Picture
    from corerl.weights import bit_sums
    from corerl_sglang.start import start_engine
    from corerl_vision.processor import VisionInputs
    from plugins.sglang.tests.checkpoints import write_readable
    from plugins.sglang.tests.picture_rows import apart, rows_of, send, tensors_of

    torch.backends.cudnn.allow_tf32 = False
    model = ModelConfig(path=str(write_readable(family, directory / "model", larger=not tiny)), pictures="vision")
    options, context = how(directory, tiny=tiny)
    count = 2 if tiny else ROWS
    rows = {name: rows_of(model, prompts(count, pictures)) for pictures, name in enumerate(("text", "one", "two"))}
    every = [row for part in rows.values() for row in part]
    began = time.perf_counter()
    engine = start_engine(model, options, context)
    found.tell(start=time.perf_counter() - began)
    try:
        own: Any = AutoModelForImageTextToText.from_pretrained(model.path, dtype=torch.bfloat16)
        tensors = {name: tensor.clone() for name, tensor in tensors_of(own, model).items()}
        if tiny:
            tensors = {name: tensor.float() for name, tensor in tensors.items()}
        own, inputs = own.eval().float().to(context.device), VisionInputs(model)
        difference = partial(mean_difference, engine, partial(apart, own, inputs), 8 if tiny else TOKENS)

        def update(version: int) -> None:
            if error := send(engine, tensors, version, directory / "weights"):
                raise RuntimeError(f"update {version} failed: {error}")
            (dtype,) = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}
            sums, sent = engine.weight_sums(dtype) or {}, bit_sums(tensors)
            found.tell(weights=[sum(sums.get(name) == each for name, each in sent.items()), len(sent)])

        with found.part("update"):
            update(0)
        for name, part in rows.items():
            with found.part(name):
                found.tell(**{name: difference(part)[0]})
        with found.part("turned"):
            turned = [
                evolve(row, pictures=[Picture(each.pixels[::-1]) for each in row.pictures]) for row in rows["one"]
            ]
            right, wrong = difference(rows["one"], turned)
            found.tell(turned=wrong, upright=right)
        for name in ("mixed", "cached"):
            with found.part(name):
                found.tell(**{name: difference(every)[0]})
        with found.part("slept"):
            engine.sleep()
            engine.wake_up()
            update(1)
            found.tell(slept=difference(every)[0])
    finally:
        engine.close()


def mean_difference(
    engine: Any, apart: Callable[..., Any], tokens: int, rows: Sequence[Any], *others: Sequence[Any]
) -> list[float]:
    """Of what is sampled after these rows: to transformers with the same rows, and with other ones in their place. Of
    rows with pictures, if there are any."""
    import numpy as np

    from corerl.engines import SamplingParams
    from plugins.sglang.tests.picture_rows import request_of

    stops = (5, 6, 7, 8)  # tokens that stand for pictures, or are around them
    sampled = engine.generate(request_of(rows, SamplingParams(max_tokens=tokens, stop_tokens=stops)))
    counted = [bool(row.pictures) for row in rows]
    counted = counted if any(counted) else [True] * len(rows)
    return [
        float(np.concatenate([each for each, yes in zip(apart(side, sampled), counted, strict=True) if yes]).mean())
        for side in (rows, *others)
    ]


def prompts(rows: int, pictures: int) -> list[tuple[str, list[bytes]]]:
    """Texts with so many marks, and files for them; two rows share a picture."""
    from plugins.sglang.tests.picture_rows import squares

    found = []
    for row in range(rows):
        files = [squares(*SIZES[(row // 2 + at) % len(SIZES)], seed=row // 2 + 10 * at) for at in range(pictures)]
        found.append((f"{row}{'<image>' * min(pictures, 1)}a+b={'<image>' * max(0, pictures - 1)}, how many? ", files))
    return found


def how(directory: Path, *, tiny: bool) -> tuple[Any, Any]:
    """The engine's options, and where it runs."""
    from corerl.config import ClusterInfo
    from corerl.engines import EngineContext
    from corerl_sglang.config import SglangConfig
    from corerl_sglang.spec import environment

    options = SglangConfig(
        memory=0.3,
        attention_backend=os.environ.get("ATTENTION", "triton"),
        start_timeout=START_SECONDS,
        requests=1,
        server=SMALL,
    )
    if tiny:
        options = SglangConfig(launcher=STAND_IN, requests=1)
    context = EngineContext(
        name="engine-0",
        index=0,
        device="cpu" if tiny else "cuda",
        precision="float32" if tiny else "bfloat16",
        run_dir=str(directory / "run"),
    )
    os.environ.update(environment(options, ClusterInfo(device=context.device, ranks=1)))
    return options, context


# ---- all of them -----------------------------------------------------------------------------------------------------


def found_of(family: str, directory: Path, *, tiny: bool) -> dict[str, Any]:
    """What a family's process has found by its end, or until it was ended."""
    file = directory / f"{family}.json"
    command = [sys.executable, "-m", "benchmarks.pictures_sglang", family, "--only", str(file)]
    with (directory / f"{family}.log").open("w") as log:
        process = subprocess.Popen([*command, *(["--tiny"] if tiny else [])], cwd=ROOT, stdout=log, stderr=log)
        try:
            status: int | None = process.wait(DEADLINE)
        except subprocess.TimeoutExpired:
            process.kill()  # its server ends with it
            status = process.wait() and None
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"errors": {}}
    if status != 0:
        last = (directory / f"{family}.log").read_text(errors="replace").strip()[-1500:]
        why = f"not done in {DEADLINE:.0f} s" if status is None else f"ended with status {status}"
        found["errors"]["process"] = f"{why}; its last words:\n{last}"
    return found


def ratio(found: Mapping[str, Any]) -> float | None:
    """The largest difference of rows with pictures, in differences of rows without."""
    shown = [found[name] for name in COLUMNS if name != "text" and name in found]
    return max(shown) / found["text"] if shown and found.get("text") else None


def table(every: Mapping[str, Mapping[str, Any]]) -> str:
    heads = ["family", "prompt ids equal", *COLUMNS.values(), "largest / text", "upside down", "weights told", "start"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for family, found in every.items():
        unequal = [name for name, error in found["errors"].items() if "its server reads" in error]
        same = "**no**: " + ", ".join(unequal) if unequal else "yes" if "two" in found else "?"
        numbers = [f"{found[name]:.2g}" if name in found else "-" for name in COLUMNS]
        times = (
            "-"
            if (largest := ratio(found)) is None
            else f"{largest:.2f}"
            if largest <= TARGET
            else f"**{largest:.2f}**"
        )
        turned = f"{found['turned']:.2g}" if "turned" in found else "-"
        told = "{} of {}".format(*found["weights"]) if "weights" in found else "-"
        start = f"{found['start']:.0f} s" if "start" in found else "-"
        lines.append("| " + " | ".join([family, same, *numbers, times, turned, told, start]) + " |")
    errors = [
        f"{family}, {name}: {error}" for family, found in every.items() for name, error in found["errors"].items()
    ]
    return "\n".join([*lines, *errors])


def report_of(every: Mapping[str, Mapping[str, Any]]) -> Report:
    numbers: list[Number] = []
    for family, found in every.items():
        for name, words in COLUMNS.items():
            if name in found:
                numbers.append(Number(what=f"{family}, {words}", values=[found[name]], unit="nats"))
        if (largest := ratio(found)) is not None:
            numbers.append(Number(what=f"{family}, largest / text", values=[largest], unit="times", target=TARGET))
    errors = [
        f"{family}, {name}: {error}" for family, found in every.items() for name, error in found["errors"].items()
    ]
    return Report(
        name="pictures_sglang",
        size=f"tiny models of {', '.join(every)}; {3 * ROWS} rows of up to {TOKENS} sampled tokens",
        numbers=numbers,
        note="\n".join([NOTE, *errors]),
    )


def main() -> None:
    command = arguments(__doc__)
    command.add_argument("families", nargs="*", choices=[[], *FAMILIES], help="default: all")
    command.add_argument("--only", metavar="FILE", help=argparse.SUPPRESS)  # of the process of one family
    args = command.parse_args()
    with tempfile.TemporaryDirectory(prefix="pictures-") as directory:
        if args.only:
            found = Found(Path(args.only))
            with found.part("start"):
                measure_family(args.families[0], found, Path(directory), tiny=args.tiny)
            return
        families = args.families or FAMILIES
        with ThreadPoolExecutor(2 if args.tiny else len(families)) as threads:
            each = threads.map(lambda family: found_of(family, Path(directory), tiny=args.tiny), families)
            every = dict(zip(families, each, strict=True))
    print(table(every), flush=True)
    report = report_of(every)
    if args.output:
        finish(report, args.output)
    if any(found["errors"] for found in every.values()):
        sys.exit("something failed; see above")


if __name__ == "__main__":
    main()
