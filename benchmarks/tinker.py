"""Compare a recipe of the Tinker cookbook on `corerl serve` with `corerl train` at the same batch.

python -m benchmarks.tinker --client CLIENT/bin/python --output found/tinker.json      # one GPU with 80 GiB, SGLang
python -m benchmarks.tinker --client CLIENT/bin/python --tiny --steps 4                # on a CPU

CLIENT is an environment with the SDK and the cookbook, as `make test-tinker` installs it; without the option it is the
variable TINKER_PYTHON. `math_rl` with
`loss_fn=importance_sampling` takes `--steps` steps, then `corerl train` takes as many with GRPO on prompts of the same
texts: random weights, LoRA of rank 32, equally many samples of at most `--new` tokens that end at the same text, one
optimizer step for each batch, and the log-probs of sampling as the old ones. Weights reach the same engine after each
step. The first step of each does not count. With `--keep DIRECTORY` the steps of a side that are there are not made
again, and `--side` makes one alone.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import Comparison, Number, Report, arguments, finish
from benchmarks.runs import ENVIRONMENT, MAIN, Watched, say_steps, sglang, shape_settings, value
from plugins.tinker.tests.recipes import workplace

RANK = 32
TARGET = 1.1
# Parts of a step.
RECIPE = ("sampling", "train_step", "save_checkpoint_and_get_sampling_client")
RUN = ("rollout", "train", "update_weights")
DEADLINE = 420.0  # seconds, of each side with its start


def reward(prompt: Any, response: str) -> float:
    """1 for the answer in a box, as the recipe's."""
    return float(f"\\boxed{{{prompt.answer}}}" in response)


def model(args: argparse.Namespace, directory: Path) -> list[str]:
    """Settings that both sides have."""
    tokenizer = directory / workplace.MODEL
    fields = json.loads((tokenizer / "config.json").read_text())
    own = {name: fields[name] for name in ("vocab_size", "eos_token_id")}
    if args.tiny:
        fields |= {"hidden_size": 64, "num_hidden_layers": 2}
        kept = (
            *("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
            *("num_key_value_heads", "head_dim", "max_position_embeddings", "tie_word_embeddings"),
        )
        placed = [f"model.config.{name}={value(fields[name])}" for name in kept]
        placed += ["cluster.device=cpu", "rollout.engine=transformers", "weights.transport=disk"]
    else:
        placed = [
            "model.config.model_type=qwen3",
            *shape_settings("4b", micro_batch=args.micro_batch),
            *("cluster.placement=colocated", "cluster.offload=never", "backends.fsdp.shard_size=0"),
            *sglang(
                memory=args.memory,
                attention_backend=os.environ.get("ATTENTION", "triton"),
                # Above, a pass of the 4B shape takes twice as long: the CPU starts each kernel.
                server={"cuda_graph_max_bs_decode": args.prompts * args.samples},
            ),
        ]
    optimizer = ["betas=[0.9,0.95]", "eps=1e-8", "weight_decay=0.0", "clip_norm=0.0"]
    return [
        *placed,
        *(f"model.config.{name}={value(each)}" for name, each in own.items()),
        *(f"model.tokenizer={tokenizer}", "backend.name=fsdp", f"lora.rank={RANK}", "lora.alpha=32"),
        *(f"train.optimizer.{each}" for each in optimizer),
        *("roles.actor.ranks=1", "rollout.replicas=1", f"rollout.max_tokens={args.new}"),
        *args.set,
    ]


def served(args: argparse.Namespace, directory: Path) -> list[dict[str, float]]:
    """The metrics of the recipe's steps."""
    config = directory / "server.toml"
    config.write_text("")
    name = f"serve.name={workplace.MODEL}"
    words = [sys.executable, "-c", MAIN, "serve", str(config), name, "serve.port=0", *model(args, directory)]
    environment = {**os.environ, **ENVIRONMENT}
    with (directory / "server.txt").open("wb") as sink:
        server = subprocess.Popen(words, cwd=directory, env=environment, stdout=sink, stderr=sink)
    try:
        given = exported(server, directory / "server.txt")
        recipe = [
            *(args.client, "-m", "tinker_cookbook.recipes.math_rl.train", f"model_name={workplace.MODEL}"),
            *("env=gsm8k", "loss_fn=importance_sampling", "learning_rate=1e-6", f"lora_rank={RANK}"),
            *(f"group_size={args.samples}", f"groups_per_batch={args.prompts}", f"max_tokens={args.new}"),
            *(f"max_steps={args.steps}", "eval_every=0", "save_every=0", "log_path=log"),
        ]
        own = {**environment, **given, "TINKER_TELEMETRY": "0", "HF_HOME": str(directory / "cache")}
        own["PYTHONPATH"] = args.client_path
        subprocess.run(recipe, cwd=directory, env=own, check=True, timeout=DEADLINE, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired as late:  # with the steps that there are
        print(f"the recipe was ended: {late}", flush=True)
    finally:
        print((directory / "server.txt").read_text()[-2000:], flush=True)
        server.terminate()
        try:
            server.wait(60.0)
        except subprocess.TimeoutExpired:
            server.kill()
    return [json.loads(line) for line in (directory / "log" / "metrics.jsonl").read_text().splitlines()]


def exported(server: subprocess.Popen[bytes], log: Path) -> Mapping[str, str]:
    """What the server prints for clients."""
    deadline = time.monotonic() + DEADLINE
    while len(found := dict(re.findall(r"^export (TINKER_\w+)=(\S+)$", log.read_text(), re.MULTILINE))) < 2:
        if server.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the server does not serve: {log.read_text()[-4000:]}")
        time.sleep(0.2)
    return found


def trained(args: argparse.Namespace, directory: Path) -> Sequence[Mapping[str, float]]:
    """The metrics of the run's steps."""
    data = directory / "prompts.jsonl"
    asked, answered = workplace.EXAMPLE  # with which the recipe begins each prompt
    rows = [
        {
            "prompt": f"User: {asked}\n\nAssistant: {answered}\n\nUser: {workplace.legs(animal)}\n\nAssistant:",
            "answer": str(number),
        }
        for animal, number in workplace.LEGS.items()
    ]
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows * 100))
    settings = [
        *(f"run.steps={args.steps}", f"rollout.prompts={args.prompts}", f"rollout.samples={args.samples}"),
        *(f"data.source={data}", "data.held_out=0", "eval.every=0", "checkpoint.every=0", "checkpoint.export=false"),
        *("reward.name=benchmarks.tinker:reward", "algorithm.old_logprobs=rollout", "train.mini_batches=1"),
        *("algorithm.overlong=keep", "algorithm.overlong_buffer=0", "train.optimizer.lr=1e-6"),
        r'rollout.stop=["\n\nUser:"]',  # as the recipe's renderer asks for it
    ]
    config = directory / "run.toml"
    config.write_text("")
    with Watched(*settings, *model(args, directory), directory=directory / "run", config=config) as run:
        ended = run.wait(DEADLINE)
        say_steps(ended, well=ended.status == 0)
        return ended.steps


def kept(directory: Path | None, side: str) -> list[dict[str, float]]:
    """The steps of a side that an earlier call made; empty without one."""
    file = directory / f"{side}.json" if directory is not None else None
    return json.loads(file.read_text()) if file is not None and file.exists() else []


def keep(directory: Path | None, side: str, steps: Sequence[Mapping[str, float]]) -> Sequence[Mapping[str, float]]:
    """The steps of a side, for later calls too."""
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"{side}.json").write_text(json.dumps([dict(step) for step in steps]))
    return steps


def of(steps: Sequence[Mapping[str, float]], name: str) -> list[float]:
    """A metric of all steps but the first."""
    return [step[name] for step in steps[1:] if name in step]


def main() -> None:
    command = arguments(__doc__)
    command.add_argument(
        "--client", default=os.environ.get("TINKER_PYTHON", ""), help="a Python that has the SDK and the cookbook"
    )
    command.add_argument("--client-path", default="", help="its PYTHONPATH")
    command.add_argument("--steps", type=int, default=7)
    command.add_argument("--prompts", type=int, default=16)
    command.add_argument("--samples", type=int, default=8)
    command.add_argument("--new", type=int, default=256)
    command.add_argument("--micro-batch", type=int, default=16384)
    command.add_argument("--memory", type=float, default=0.35, help="SGLang's share of the GPU")
    command.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="further settings of both")
    command.add_argument("--side", choices=("served", "trained"), help="make the steps of this side, and no report")
    command.add_argument("--keep", type=Path, metavar="DIRECTORY", help="where the steps of each side are kept")
    command.add_argument("--output", metavar="FILE")
    args = command.parse_args()
    if not args.client:
        command.error("--client: a Python with the SDK and the cookbook is needed, as `make test-tinker` installs it")
    with tempfile.TemporaryDirectory(prefix="tinker-") as name:
        directory = Path(name)
        workplace.write(directory)
        sides = {"trained": trained, "served": served}
        steps = {
            side: kept(args.keep, side) or keep(args.keep, side, make(args, directory))
            for side, make in sides.items()
            if args.side in (None, side)
        }
    if args.side:
        return
    recipe, run = steps["served"], steps["trained"]
    recipe = [step for step in recipe if "time/total" in step]
    ours, other = of(recipe, "time/total"), of(run, "time/step")
    report = Report(
        name="tinker",
        size=f"{args.prompts * args.samples} samples of at most {args.new} tokens a step",
        comparisons=[
            Comparison(
                what="a step of math_rl on corerl serve",
                against="of corerl train",
                ours=ours,
                other=other[: len(ours)],
                target=TARGET,
            )
        ],
        numbers=[
            *(Number(what=f"{name}, the recipe", values=of(recipe, f"time/{name}"), unit="s") for name in RECIPE),
            *(Number(what=f"{name}, the run", values=of(run, f"time/{name}"), unit="s") for name in RUN),
            Number(what="tokens of a response, train", values=of(run, "rollout/response_length"), unit="tokens"),
        ],
        note="The first step of each is left out.",
    )
    for step in recipe:
        print({name: each for name, each in step.items() if re.match("time/|tokens/|env/all/", name)}, flush=True)
    finish(report, args.output)


if __name__ == "__main__":
    main()
