"""Compare a recipe of the Tinker cookbook on `corerl serve` with `corerl train` at the same batch.

python -m benchmarks.tinker --client CLIENT/bin/python --output found/tinker.json      # one GPU with 80 GiB, SGLang
python -m benchmarks.tinker --client CLIENT/bin/python --tiny --steps 4                # on a CPU

CLIENT is an environment with the SDK and the cookbook, as `make test-tinker` installs it; without the option it is the
variable TINKER_PYTHON. `math_rl` with
`loss_fn=importance_sampling` takes `--steps` steps, then `corerl train` takes as many with GRPO on prompts of the same
texts: random weights, LoRA of rank 32, equally many samples of at most `--new` tokens that end at the same text, one
optimizer step for each batch, and the log-probs of sampling as the old ones. Weights reach the same engine after each
step. The first step of each does not count. `--side` measures one of the two alone.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import Comparison, Number, Report, arguments, finish
from benchmarks.runs import MAIN, Process, Watched, say_steps, sglang, shape_settings, value
from benchmarks.shapes import SIZES
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
        kept = ("model_type", *SIZES[1:], "max_position_embeddings", "tie_word_embeddings")
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
    words = ["serve", str(config), f"serve.name={workplace.MODEL}", "serve.port=0", *model(args, directory)]
    with Process([sys.executable, "-c", MAIN, *words], directory=directory / "server", cwd=directory) as server:
        while len(given := dict(re.findall(r"^export (TINKER_\w+)=(\S+)$", server.output(), re.MULTILINE))) < 2:
            if server.process.poll() is not None or server.now() > DEADLINE:
                raise SystemExit(f"the server does not serve: {server.output()[-4000:]}")
            time.sleep(0.2)
        recipe = [
            *(args.client, "-m", "tinker_cookbook.recipes.math_rl.train", f"model_name={workplace.MODEL}"),
            *("env=gsm8k", "loss_fn=importance_sampling", "learning_rate=1e-6", f"lora_rank={RANK}"),
            *(f"group_size={args.samples}", f"groups_per_batch={args.prompts}", f"max_tokens={args.new}"),
            *(f"max_steps={args.steps}", "eval_every=0", "save_every=0", "log_path=log"),
        ]
        own = {**given, "TINKER_TELEMETRY": "0", "HF_HOME": str(directory / "cache"), "PYTHONPATH": args.client_path}
        with Process(recipe, directory=directory, environment=own, cwd=directory) as client:
            while client.process.poll() is None and client.now() < DEADLINE:  # later, with the steps that there are
                time.sleep(0.2)
            if client.process.poll() != 0:
                print(f"the recipe ended with {client.process.poll()}:\n{client.output()[-4000:]}", flush=True)
        print(server.output()[-2000:], flush=True)
    metrics = directory / "log" / "metrics.jsonl"
    return [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []


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


def of(steps: Sequence[Mapping[str, float]], name: str) -> list[float]:
    """A metric of all steps but the first."""
    return [step[name] for step in steps[1:] if name in step]


def main() -> None:
    command = arguments(__doc__, settings="further settings of both")
    command.add_argument(
        "--client", default=os.environ.get("TINKER_PYTHON", ""), help="a Python that has the SDK and the cookbook"
    )
    command.add_argument("--client-path", default="", help="its PYTHONPATH")
    for name, number in {"steps": 7, "prompts": 16, "samples": 8, "new": 256, "micro-batch": 16384}.items():
        command.add_argument(f"--{name}", type=int, default=number)
    command.add_argument("--memory", type=float, default=0.35, help="SGLang's share of the GPU")
    command.add_argument("--side", choices=("served", "trained"), help="this one alone")
    args = command.parse_args()
    if not args.client:
        command.error("--client: a Python with the SDK and the cookbook is needed, as `make test-tinker` installs it")
    with tempfile.TemporaryDirectory(prefix="tinker-") as name:
        directory = Path(name)
        workplace.write(directory)
        sides: dict[str, Callable[..., Any]] = {"trained": trained, "served": served}
        steps = {side: make(args, directory) for side, make in sides.items() if args.side in (None, side)}
    recipe = [step for step in steps.get("served", ()) if "time/total" in step]
    run = steps.get("trained", ())
    ours, other = of(recipe, "time/total"), of(run, "time/step")
    what, rounds = "a step of math_rl on corerl serve", min(len(ours), len(other))
    both = {"ours": ours[:rounds], "other": other[:rounds]}
    # Rows end where their random weights say, so that the sides' batches differ.
    lengths = [of(recipe, "env/all/ac_tokens_per_turn"), of(run, "rollout/response_length")]
    by_token = {
        side: [each / n for each, n in zip(both[side], of, strict=False)]
        for side, of in zip(both, lengths, strict=True)
    }
    numbers = [
        *(("the recipe", name, of(recipe, f"time/{name}"), "s") for name in RECIPE),
        *(("the run", name, of(run, f"time/{name}"), "s") for name in RUN),
        ("the recipe", "tokens of a response", lengths[0], "tokens"),
        ("the run", "tokens of a response", lengths[1], "tokens"),
    ]
    report = Report(
        name="tinker",
        size=f"{args.prompts * args.samples} samples of at most {args.new} tokens a step",
        comparisons=[
            Comparison(what=what, against="of corerl train", target=TARGET, **both),
            Comparison(what=f"{what}, for each sampled token of a row", against="the same", target=TARGET, **by_token),
        ]
        if rounds
        else [],
        numbers=[
            Number(what=f"{side}: {name}", values=values, unit=unit) for side, name, values, unit in numbers if values
        ],
        note="The first step of each is left out.",
    )
    for step in recipe:
        print({name: each for name, each in step.items() if re.match("time/|tokens/|env/all/", name)}, flush=True)
    finish(report, args.output)


if __name__ == "__main__":
    main()
