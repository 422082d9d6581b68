"""Compare the quickstart's training loop with TRL's GRPOTrainer on the same task, each in two processes, run after run.

The first time it creates a separate environment for TRL in benchmarks/.peers/trl. --torch-index, or TORCH_INDEX in the
environment, names the package index for torch.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import asdict
from transformers import AutoModelForCausalLM

from benchmarks.report import ROOT, Comparison, Number, Report, environment, finish, in_turns, parser
from corerl.config.load import load_config
from corerl.config.schema import Config
from corerl.data.load import load_prompts
from corerl.data.prompts import PromptStream
from corerl.models.config import hf_config
from corerl.models.initial import RandomSource
from corerl.models.tokenizer import load_tokenizer
from corerl.plan.algorithm import plan_algorithm
from corerl.plan.resolve import plugins_of, resolve_tables, settle_algorithm
from corerl.plugin.spec import ACTOR

EXAMPLE = ROOT / "examples" / "quickstart.toml"
PEERS = ROOT / "benchmarks" / "peers"
TRL = ROOT / "benchmarks" / ".peers" / "trl"


def overrides(steps: int, seed: int) -> list[str]:
    """The quickstart without what TRL is not asked to do; its only evaluation comes after the last step is reported."""
    return [
        f"run.steps={steps}",
        f"run.seed={seed}",
        f"eval.every={steps}",
        "eval.at_start=false",
        "algorithm.overlong=keep",
        "algorithm.overlong_buffer=0",
        "checkpoint.every=0",
        "checkpoint.background=false",
        "checkpoint.export=false",
        'extensions=[{name="jsonl"}]',
    ]


# ---- CoreRL ----------------------------------------------------------------------------------------------------------


def run_corerl(steps: int, seed: int, directory: Path) -> dict[str, float]:
    """Loop seconds, held-out exact match, and where the seconds went."""
    program = "import sys; from corerl.cli.main import main; sys.exit(main())"
    words = ["train", str(EXAMPLE), *overrides(steps, seed), f"run.dir={directory}"]
    _run([sys.executable, "-c", program, *words], directory.with_suffix(".log"))
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    done = [line for line in lines if "time/step" in line]
    assert len(done) == steps, f"{len(done)} steps in {directory}, wanted {steps}"
    phases = sorted({name for line in done for name in line if name.startswith("time/")})
    found = {name: sum(line.get(name) or 0.0 for line in done) for name in phases}
    return {**found, "exact_match": lines[-1]["eval/exact_match"]}


# ---- TRL -------------------------------------------------------------------------------------------------------------


def ensure_trl(torch_index: str) -> Path:
    """The python of an environment that has what peers/requirements.txt asks for."""
    python = TRL / "bin" / "python"
    requirements = PEERS / "requirements.txt"
    stamp = TRL / "installed.txt"
    if stamp.exists() and stamp.read_text() == requirements.read_text():
        return python
    if TRL.exists():
        shutil.rmtree(TRL)
    install = [str(python), "-m", "pip", "install", "-q", "--no-compile"]
    subprocess.run([sys.executable, "-m", "venv", str(TRL)], check=True)
    if torch_index:
        pinned = next(line for line in requirements.read_text().splitlines() if line.startswith("torch=="))
        subprocess.run([*install, "--index-url", torch_index, pinned], check=True)
    subprocess.run([*install, "-r", str(requirements)], check=True)
    stamp.write_text(requirements.read_text())
    return python


def write_task(config: Config, directory: Path) -> None:
    """What CoreRL begins with, for another program: settings, initial weights, tokenizer, prompts in their order."""
    directory.mkdir(parents=True)
    hf = hf_config(config.model)
    model = AutoModelForCausalLM.from_config(hf, dtype=torch.float32)
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    source = RandomSource(hf, shapes, seed=config.run.seed)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(source.read(name, (0,) * param.dim(), shapes[name]))
    model.save_pretrained(directory / "model")
    load_tokenizer(tokenizer=config.model.tokenizer, path="").save_pretrained(directory / "model")
    prompts = load_prompts(config.data, seed=config.run.seed)
    tables = {
        "train": PromptStream(prompts, config.run.seed).take(config.run.steps * config.rollout.prompts),
        "held_out": prompts.held_out_prompts(),
    }
    for name, chosen in tables.items():
        rows = [json.dumps({"prompt": prompt.text, "answer": prompt.answer}) for prompt in chosen]
        (directory / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    config = resolve_tables(settle_algorithm(config))
    loss = plan_algorithm(config, plugins_of(config)).objectives[ACTOR].loss
    settings = {
        "steps": config.run.steps * config.train.mini_batches,
        "prompts": config.rollout.prompts,
        "samples": config.rollout.samples,
        "mini_batches": config.train.mini_batches,
        "temperature": config.rollout.temperature,
        "max_tokens": config.rollout.max_tokens,
        "clip_low": loss.params["clip_low"],
        "clip_high": loss.params["clip_high"],
        "entropy_coef": config.algorithm.entropy_coef,
        "optimizer": asdict(config.train.optimizer),
        "schedule": asdict(config.train.schedule),
        "seed": config.run.seed,
    }
    (directory / "settings.json").write_text(json.dumps(settings, indent=1))


def run_trl(python: Path, config: Config, directory: Path) -> dict[str, Any]:
    """What peers/trl_grpo.py finds."""
    write_task(config, directory)
    torchrun = [str(python), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    _run([*torchrun, str(PEERS / "trl_grpo.py"), str(directory)], directory.with_suffix(".log"))
    result: dict[str, Any] = json.loads((directory / "result.json").read_text())
    return result


def _run(command: Sequence[str], log: Path) -> None:
    """Its output goes to `log`, and is shown where it fails."""
    done = subprocess.run(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    log.write_text(done.stdout)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-4000:]}")


# ---- both ------------------------------------------------------------------------------------------------------------


def measure(*, rounds: int, size: int, torch_index: str) -> Report:
    python = ensure_trl(torch_index)
    ours: list[dict[str, float]] = []
    others: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="corerl-quickstart-") as scratch:

        def corerl(number: int) -> float:
            ours.append(run_corerl(size, number, Path(scratch) / f"corerl-{number}"))
            return ours[-1]["time/step"]

        def trl(number: int) -> float:
            config = load_config(str(EXAMPLE), overrides(size, number))
            others.append(run_trl(python, config, Path(scratch) / f"trl-{number}"))
            return float(others[-1]["loop_seconds"])

        seconds, other = in_turns(rounds, corerl, trl)
    share = {name: ours[0][name] / ours[0]["time/step"] for name in ours[0] if name.startswith("time/")}
    phases = [name for name, part in share.items() if 0.001 < part < 1.0]
    return Report(
        name="quickstart",
        size=f"{size} rollout steps, seeds 0 to {rounds - 1}, one a round",
        comparisons=[
            Comparison(
                what="the training loop",
                against="TRL's GRPOTrainer, two processes (DDP)",
                ours=seconds,
                other=other,
                target=1.0,
            )
        ],
        numbers=[
            Number(what="held-out exact match: CoreRL", values=[each["exact_match"] for each in ours], unit=""),
            Number(what="held-out exact match: TRL", values=[each["exact_match"] for each in others], unit=""),
            *(
                Number(what=f"of CoreRL's loop: {name.removeprefix('time/')}", values=[e[name] for e in ours], unit="s")
                for name in phases
            ),
        ],
        note=(
            "CoreRL's loop (the sum of time/step in metrics.jsonl, from when all processes are up to the last step's "
            "report) includes the first push of weights and, in each step, sampling in two engines, rewards, "
            "advantages, two optimizer steps on two FSDP ranks, the weight update, and a metrics line. TRL's loop "
            "(on_train_begin to on_train_end) includes generation in both processes, rewards, advantages, log-probs of "
            "the old policy, two optimizer steps under DDP, and metrics kept once per rollout step; it samples from "
            "the weights that it trains, so none are sent. Neither includes start-up, the greedy evaluation of 256 "
            "held-out prompts at the end, or saving. Equal on both sides: model, initial weights, tokenizer, prompts "
            "and their order, reward, batch (64 x 8 samples, 256 per optimizer step, 128 per process), AdamW, "
            "clipping, entropy bonus, temperature and length, one thread per process. Different: TRL's warm-up begins "
            "at 5 % of the peak instead of 10 % (its decay ends at 5 %, as CoreRL's does), it normalizes the loss by "
            "half of the rollout batch's tokens instead of the mini-batch's own, splits the batch into mini-batches by "
            "sample instead of by prompt, and draws samples from another generator."
        ),
        versions={f"{name} (peer)": version for name, version in others[0]["versions"].items()},
    )


if __name__ == "__main__":
    command = parser(__doc__, rounds=3, size=250, unit="rollout steps")
    command.add_argument("--torch-index", default=os.environ.get("TORCH_INDEX", ""), help="for the peer's torch")
    args = command.parse_args()
    finish(measure(rounds=args.rounds, size=args.size, torch_index=args.torch_index), args.output)
