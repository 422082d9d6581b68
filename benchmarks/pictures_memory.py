"""Measure what the driver's memory takes more with pictures than with as many tokens of text, and count decoded files.

python -m benchmarks.pictures_memory --output benchmarks/results/pictures-memory.md     # ten minutes on two cores
python -m benchmarks.pictures_memory --prompts 4 --size 320x240 --steps 1

A step of this: prompts of a picture file each are read, checked and sampled by a run's own classes, their requests go
to engines, the samples to eight ranks for a forward pass and four optimizer steps, and so on with other files. All that
is sent is put into Ray's object store; one process is called in the place of all engines and ranks, and answers are
made up. Text and pictures are measured in processes of their own.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import ray
from attrs import define
from PIL import Image

import corerl_vision.reader
from benchmarks.report import ROOT, arguments, finish_page
from benchmarks.scale import Reader, Row, layouts_of, measure, status
from corerl.cluster.runtime import ray_session
from corerl.config import DataConfig, ModelConfig
from corerl.data.packing import pack, plan_forward
from corerl.data.prompts import PromptStream
from corerl.data.rows import load_prompts
from corerl.engines.base import GenerateRequest, Generation, SamplingParams
from corerl.event_loop import EventLoop
from corerl.models.tokenizer import character_tokenizer
from corerl.plugin.spec import NoOptions
from corerl.rollout.encoding import FIRST, PromptCheck, check_first
from corerl.rollout.sampler import PromptSampler, SamplerContext
from corerl.types import SampleBatch, offsets_of
from corerl_vision.files import File
from corerl_vision.reader import VisionReader
from corerl_vision.shapes import png
from corerl_vision.spec import VisionOptions

CASES = ("text", "pictures")
GROUP = 8  # samples of a prompt
REPLICAS = 8
RANKS = 8
RESPONSE = 64  # tokens
QUESTION = "rs="
ALLOWED = 0.5  # GB above text
FIELDS: Mapping[str, Any] = {  # of Qwen3-VL, as far as they decide how large a picture is shown
    "model_type": "qwen3_vl",
    "text_config": {"vocab_size": 32, "num_hidden_layers": 1},
    "vision_config": {"patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2},
    "image_token_id": 4,
}
TOKENIZER = character_tokenizer("#rs=0123")
LARGEST = 16_777_216  # pixels, as published for Qwen3-VL


def reader_of() -> VisionReader:
    model = ModelConfig(config=dict(FIELDS), pictures="vision", tower="trained")
    return VisionReader(VisionOptions(max_pixels=LARGEST), model, TOKENIZER)


def shown_tokens(width: int, height: int) -> int:
    """How many tokens stand for a picture file of this size."""
    file = File("a picture", png(np.zeros((height, width, 3), np.uint8)))
    reader = reader_of()
    return len(reader.expand(reader.read(file)))


def write_pictures(directory: Path, *, count: int, size: tuple[int, int]) -> None:
    """Photograph-like JPEG files, no two alike."""
    rng = np.random.default_rng(0)
    for number in range(count):
        coarse = rng.integers(256, size=(size[1] // 16 + 1, size[0] // 16 + 1, 3)).astype(np.uint8)
        Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC).save(directory / f"{number}.jpg", quality=90)


def write_rows(directory: Path, case: str, *, count: int, tokens: int) -> Path:
    """Prompts of equally many tokens, with pictures or without."""
    path = directory / f"{case}.jsonl"
    with path.open("w") as file:
        for number in range(count):
            shown = {"prompt": f"<image>{QUESTION}", "images": [f"{number}.jpg"]}
            text = {"prompt": (QUESTION * tokens)[-tokens:], "number": number}
            file.write(json.dumps({**(shown if case == "pictures" else text), "answer": "0"}) + "\n")
    return path


@define(eq=False)
class Memory:
    """The most that this process has held since it began, in bytes, looked at a hundred times a second."""

    own: int = 0  # anonymous pages
    all: int = 0  # with the pages of Ray's object store that it has written or read, and those of files

    def watch(self) -> None:
        while True:
            self.own, self.all = max(self.own, status("RssAnon")), max(self.all, status("VmRSS"))
            time.sleep(0.01)


@define(eq=False)
class Engines:
    """In the place of a fleet: each request goes to a process, an eighth to a replica; answers are made up."""

    process: Any

    async def __call__(self, request: GenerateRequest, **_: Any) -> Generation:
        for ref in [self.process.call.remote("generate", part) for part in request.parts(REPLICAS)]:
            await ref
        count = len(request)
        return Generation(
            tokens=np.random.default_rng(0).integers(5, 12, count * RESPONSE),
            offsets=offsets_of([RESPONSE] * count),
            logprobs=np.full(count * RESPONSE, -1.0, np.float32),
            versions=np.zeros(count * RESPONSE, np.int64),
            truncated=np.ones(count, np.bool_),
        )


def run_case(case: str, path: Path, *, prompts: int, steps: int) -> Row:
    """The steps of one case in this process."""
    decoded, own = [0], corerl_vision.reader.pixels_of

    def counting(file: Any) -> Any:
        decoded[0] += 1
        return own(file)

    corerl_vision.reader.pixels_of = counting
    reader = reader_of() if case == "pictures" else None
    source = load_prompts(DataConfig(source=str(path), held_out=0), seed=0, pictures=reader)
    check = PromptCheck(tokenizer=TOKENIZER, longest=100_000, pictures=reader)
    check_first(source, check, seed=0)
    at_start, loop = decoded[0], EventLoop("benchmark")
    params = SamplingParams(max_tokens=RESPONSE, stop_tokens=(2,))
    with ray_session(address="", cpus=1):
        process: Any = ray.remote(Reader).remote()
        context = SamplerContext(
            tokenizer=TOKENIZER, generate=Engines(process), loop=loop, seed=0, params=params, pictures=reader
        )
        sampler, stream, rows = PromptSampler(NoOptions(), context), PromptStream(source, 0, check=check), []
        gc.collect()
        memory = Memory()
        threading.Thread(target=memory.watch, daemon=True).start()
        for step in range(steps):
            began = time.perf_counter()
            taken = stream.take(prompts)
            reading = time.perf_counter() - began
            rollout = loop.run(sampler.sample(taken, rollout_step=step, samples=GROUP, params=params))
            ones = np.ones(len(rollout.batch.tokens), np.float32)
            samples = rollout.batch.with_columns(advantages=ones)
            rows.append({"reading": reading, "shown": len(samples.pictures), "encoded": encoded_by(samples)})
            measure(samples, process, ranks=RANKS, dp_size=RANKS)
            tokens, held = len(samples.tokens), sum(picture.pixels.nbytes for picture in samples.pictures)
            del rollout, samples, taken
    return {
        "tokens of a step, millions": tokens / 1e6,
        "pictures of a step": rows[-1]["shown"],
        "their pixels, GB": held / 1e9,
        "files decoded before the first step": at_start,
        f"files decoded in {steps} steps": decoded[0] - at_start,
        "pictures that the ranks encode in a pass": rows[-1]["encoded"],
        "reading and checking the prompts of a step, s": rows[-1]["reading"],
        "memory, GB": memory.own / 1e9,
        "with what it has of the object store, GB": memory.all / 1e9,
    }


def encoded_by(samples: SampleBatch) -> int:
    """How many pictures all ranks together are given for a forward pass: one that two ranks show counts twice."""
    layouts = layouts_of(RANKS, RANKS)
    plan = plan_forward(samples, layouts[0], tokens_per_micro_batch=16384)
    parts = [pack(samples, plan.share_of(layout.dp_rank), sequence_multiple=1) for layout in layouts]
    return sum(len(part.pictures) for part in parts)


ABOUT = f"""
A step: {{prompts}} prompts, each with a JPEG file of {{size}} and `{QUESTION}`, {GROUP} samples of {RESPONSE} tokens,
{RANKS} ranks on one node, {REPLICAS} engines; or prompts of as many tokens of text. Steps show other files, at
the size at which Qwen3-VL sees them. *memory*: the most anonymous memory of the driver while it samples, packs and
sends. *with what it has of the object store*: its resident memory, with pages of files and those of Ray's store, into
which each picture is put for the engines that show it and for the ranks of each pass. Files of
the first {FIRST} prompts are decoded before the first step, as these prompts are checked, and not again. A picture that
several ranks show is encoded on each of them.
"""


def report(found: Mapping[str, Row], args: argparse.Namespace) -> None:
    text, pictures = (found[case] for case in CASES)
    lines = ["| | text | pictures |", "| --- | --- | --- |"]
    lines += [f"| {name} | {text[name]:.3g} | {pictures[name]:.3g} |" for name in text]
    more = pictures["memory, GB"] - text["memory, GB"]
    verdict = "met" if more <= ALLOWED else "**not met**"
    about = ABOUT.strip().format(prompts=args.prompts, size=args.size)
    finish_page(
        "The driver's memory with pictures",
        [about, "\n".join(lines), f"Pictures take {more:.2f} GB more than text; at most {ALLOWED} GB: {verdict}."],
        args.output,
        packages={"Ray": ray.__version__, "numpy": np.__version__},
        command="benchmarks.pictures_memory",
    )


def main() -> None:
    parser = arguments(__doc__, tiny=False, output="the markdown file; without it, it is printed")
    parser.add_argument("--prompts", type=int, default=64, help="of a step (64)")
    parser.add_argument("--size", default="1920x1080", help="of the files, in pixels (1920x1080)")
    parser.add_argument("--steps", type=int, default=3, help="(3)")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)  # in a process of its own
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(run_case(args.case, args.rows, prompts=args.prompts, steps=args.steps)))
        return
    width, height = map(int, args.size.split("x"))
    count, found = args.prompts * args.steps, {}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_pictures(directory, count=count, size=(width, height))
        tokens = len(QUESTION) + shown_tokens(width, height)
        for case in CASES:
            path = write_rows(directory, case, count=count, tokens=tokens)
            words = [f"--case={case}", f"--rows={path}", f"--prompts={args.prompts}", f"--steps={args.steps}"]
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.pictures_memory", *words],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            found[case] = json.loads(done.stdout.splitlines()[-1])
    report(found, args)


if __name__ == "__main__":
    main()
