"""The quickstart with SGLang on GPUs: scenarios, one after the other, and a line of JSON for each.

    python -m plugins.sglang.tests.gpu_quickstart                          # all that this machine has GPUs for
    python -m plugins.sglang.tests.gpu_quickstart colocated-fsdp kill-update --steps 20 --deadline 240
    python -m plugins.sglang.tests.gpu_quickstart kill-generation --tiny   # on a CPU, with the stand-in: does it run?

Wants SGLang, CoreRL and the backends installed, and the repository as the working directory. Each scenario is a run of
`corerl train` with a deadline of its own, whatever became of the others. It leaves its output, its metrics and the
servers' logs under $OUT, or under the working directory. Ends with status 1 where one is not as it should be: all steps
done, every batch of full size, the mean |log-prob difference| under its bound, held-out reward higher than before, a
killed or stopped server replaced. `ATTENTION` names SGLang's attention; without it that is Triton's.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import frozen

from benchmarks.runs import SMALL_SHAPE, Ended, Watched, sglang

OUT = Path(os.environ.get("OUT", "runs")).absolute() / "gpu_quickstart"
PROMPTS, SAMPLES = 64, 8
BOUND = 0.02  # of the mean |log-prob difference| over all steps
WARM = 3  # steps that are left out of the seconds
TWO_STARTS = 430.0  # seconds: a server starts twice
STAND_IN = "plugins.sglang.tests.stand_in"
APART = "cluster.placement=disaggregated"
ASYNCHRONOUS = "rollout.source=asynchronous"
SILENT = "engines.sglang.health_timeout=30"
EXPERTS = (
    *("model.config.model_type=qwen3_moe", "model.config.num_experts=8", "model.config.num_experts_per_tok=2"),
    *("model.config.moe_intermediate_size=256", "model.config.norm_topk_prob=true"),
    "model.config.tie_word_embeddings=false",
    "algorithm.old_logprobs=recompute",
)


LORA = ("lora.rank=8", "train.optimizer.lr=0.01")


def model(model_type: str, **fields: object) -> tuple[str, ...]:
    """The settings of a model of another type."""
    asked = {"model_type": model_type, **fields}
    return tuple(f"model.config.{name}={toml(value)}" for name, value in asked.items())


def toml(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {toml(each)}" for name, each in value.items()) + "}"
    return json.dumps(value)


SPARSE = {"num_experts_per_tok": 2, "moe_intermediate_size": 256, "tie_word_embeddings": False}
IN_TURNS = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
PLAIN_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
STATES = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
LATENT = {  # with the sizes of published heads, for which the kernels are made
    "kv_lora_rank": 512,
    "q_lora_rank": 192,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
FAMILIES = {  # by what they contain
    "gemma3": model("gemma3_text", **IN_TURNS),
    "granite": model("granite", logits_scaling=2.0),  # scales
    "gpt-oss": model(  # sinks, windows, experts
        "gpt_oss",
        num_local_experts=8,
        num_experts_per_tok=2,
        tie_word_embeddings=False,
        **{**IN_TURNS, "sliding_window": 1024},  # longer than all samples: by Triton SGLang drops a token of it
        **PLAIN_ROPE,
    ),
    "glm4-moe": model("glm4_moe", **SPARSE, n_routed_experts=8, first_k_dense_replace=1),  # its biases are in buffers
    "deepseek-v3": model("deepseek_v3", **SPARSE, **LATENT, n_routed_experts=8),
    "qwen3-5": model("qwen3_5_text", **STATES),
    "qwen3-next": model("qwen3_next", **STATES, **SPARSE, num_experts=8, shared_expert_intermediate_size=256),
    "minimax-m2": model("minimax_m2", num_local_experts=8, num_experts_per_tok=2, tie_word_embeddings=False),
}
REPLAYED = ("algorithm.routing_replay=engine", "engines.sglang.routed_experts=true")


def in_generation(run: Watched) -> bool:
    """Whether a server has begun to draw for the third step or a later one, as its log says."""
    log = run.directory / "logs" / "engine-0.log"
    steps = sum("time/step" in line for line in run.lines())
    begun = log.read_text(errors="replace").count("Prefill batch") if log.exists() else 0
    before = SEEN.setdefault((str(run.directory), steps), begun)
    return steps >= 2 and begun > before


def in_update(run: Watched) -> bool:
    """Whether the ranks of a server have been told to take weights, after the second step. Looks without a pause for a
    while: an update of a small model takes some milliseconds."""
    asked, until = f"{run.temporary}/corerl-sglang-*/asked-*.pickle", time.monotonic() + LOOKED_FOR
    while sum("time/step" in line for line in run.lines()) >= 2 and time.monotonic() < until:
        if any(any(glob.iglob(asked)) for _ in range(POLLS)):
            return True
    return False


LOOKED_FOR = 1.0  # seconds
POLLS = 200  # between two readings of the metrics
SEEN: dict[tuple[str, int], int] = {}  # what a log said when a step had been done, by run and step


@frozen(kw_only=True)
class Scenario:
    gpus: int = 1
    ranks: int = 1
    replicas: int = 1
    backend: str = "fsdp"
    tensor_parallel: int = 1
    settings: Sequence[str] = ()
    kill: Callable[[Watched], bool] | None = None  # says when a server is to be killed, once
    signal: int = signal.SIGKILL  # SIGSTOP leaves a server that never answers again
    deadline: float = 280.0  # seconds, the start included
    bound: float | None = BOUND  # of the mean |log-prob difference|


SCENARIOS = {
    "colocated-fsdp": Scenario(),
    "colocated-megatron": Scenario(backend="megatron"),
    "colocated-deepspeed": Scenario(backend="deepspeed"),
    "kill-generation": Scenario(kill=in_generation, deadline=TWO_STARTS),
    # Not verified in it: what ranks are asked then looks like an update.
    "kill-update": Scenario(kill=in_update, settings=("weights.verify_every=0",), deadline=TWO_STARTS),
    "hang-generation": Scenario(kill=in_generation, signal=signal.SIGSTOP, settings=(SILENT,), deadline=TWO_STARTS),
    "hang-update": Scenario(
        kill=in_update, signal=signal.SIGSTOP, settings=("weights.verify_every=0", SILENT), deadline=TWO_STARTS
    ),
    "lora": Scenario(settings=LORA),
    "lora-adapter": Scenario(settings=(*LORA, "weights.lora=adapter")),
    "lora-kill-update": Scenario(kill=in_update, settings=(*LORA, "weights.verify_every=0"), deadline=TWO_STARTS),
    "lora-adapter-kill-generation": Scenario(
        kill=in_generation, settings=(*LORA, "weights.lora=adapter"), deadline=TWO_STARTS
    ),
    # The engine's choice of experts, taken by the trainer; and each choosing by itself, to compare.
    "experts-megatron": Scenario(backend="megatron", settings=(*EXPERTS, *REPLAYED), bound=None),
    "experts-fsdp": Scenario(settings=(*EXPERTS, *REPLAYED), bound=None),
    "experts-by-themselves": Scenario(backend="megatron", settings=EXPERTS, bound=None),
    # Near ties of routers fall either way, so that families with experts have no bound of their own but the gate's.
    **{
        name: Scenario(
            settings=(*own, "algorithm.old_logprobs=recompute"),
            bound=None if any("num_experts_per_tok" in each for each in own) else BOUND,
        )
        for name, own in FAMILIES.items()
    },
    "apart": Scenario(gpus=2, settings=(APART,)),
    "apart-streamed": Scenario(gpus=2, settings=(APART, "rollout.source=streamed")),
    # Of older weights, whose log-probs differ as they should.
    "apart-asynchronous": Scenario(gpus=2, settings=(APART, ASYNCHRONOUS), bound=None),
    "apart-kill-update": Scenario(
        gpus=2,
        settings=(APART, ASYNCHRONOUS, "weights.verify_every=0"),
        kill=in_update,
        deadline=TWO_STARTS,
        bound=None,
    ),
    "tensor-parallel": Scenario(gpus=4, ranks=4, replicas=2, tensor_parallel=2),
    # Each stage of the trainer sends its layers, to an engine on each of the other two.
    "apart-senders": Scenario(
        gpus=4,
        ranks=2,
        replicas=2,
        backend="megatron",
        settings=(APART, "backends.megatron.pipeline_parallel=2"),
    ),
}


def settings(scenario: Scenario, *, steps: int, tiny: bool) -> list[str]:
    verified = (
        [] if any(each.startswith("weights.verify_every") for each in scenario.settings) else ["weights.verify_every=1"]
    )
    common = [
        *(f"backend.name={scenario.backend}", f"run.steps={steps}", "eval.every=1000", "rollout.save=true"),
        *(f"roles.actor.ranks={scenario.ranks}", f"rollout.replicas={scenario.replicas}"),
        *("checkpoint.every=0", "checkpoint.export=false", *verified, *scenario.settings),
    ]
    if tiny:
        engine = sglang(launcher=STAND_IN, tensor_parallel=scenario.tensor_parallel, requests=4)
        return [*common, "cluster.device=cpu", "rollout.prompts=4", "cluster.offload=auto", "data.held_out=8", *engine]
    attention = os.environ.get("ATTENTION", "triton")
    # A small KV cache, so that several scenarios find room on the same GPU.
    engine = sglang(
        tensor_parallel=scenario.tensor_parallel,
        memory=0.5,
        attention_backend=attention,
        server={"max_total_tokens": 2**17},
    )
    return [*common, "cluster.device=cuda", "train.precision=bfloat16", *SMALL_SHAPE, *engine]


class Killer:
    """Sends a run's first server the scenario's signal once, when it is time."""

    def __init__(self, scenario: Scenario) -> None:
        self._when = scenario.kill
        self._signal = scenario.signal
        self._servers: list[int] = []  # known beforehand: to find them takes longer than an update
        self.killed = 0

    def __call__(self, run: Watched) -> None:
        if self._when is None or self.killed:
            return
        if not self._servers and run.lines():
            self._servers = run.servers()
        if self._servers and self._when(run):
            self.killed = self._servers[0]
            os.kill(self.killed, self._signal)


def found(
    name: str, scenario: Scenario, ended: Ended, run: Watched, killed: int, *, steps: int, prompts: int
) -> dict[str, Any]:
    """What the scenario gave, as plain data."""
    sizes = []
    for path in sorted((run.directory / "rollouts").glob("step-*.npz")):
        with np.load(path) as arrays:
            sizes.append(len(arrays["offsets"]) - 1)
    told = " ".join(ended.output.split())
    first, last = (ended.evaluations[0], ended.evaluations[-1]) if ended.evaluations else ({}, {})
    difference = ended.mean("rollout/logprob_diff")
    problems = []
    if ended.status != 0:
        problems.append("the deadline ended it" if ended.status is None else f"status {ended.status}")
    if len(ended.steps) != steps:
        problems.append(f"{len(ended.steps)} of {steps} steps")
    if wrong := [size for size in sizes if size != prompts * SAMPLES]:
        problems.append(f"{len(wrong)} batches of another size than {prompts * SAMPLES}, the first {wrong[0]}")
    if scenario.bound is not None and not difference < scenario.bound:
        problems.append(f"mean |log-prob difference| {difference:.4f}, wanted under {scenario.bound}")
    if "cannot report what it has loaded" in told:
        problems.append("the engine did not tell what it holds")
    if scenario.kill and not killed:
        problems.append("no server was killed")
    if scenario.kill and "is replaced" not in told:
        problems.append("no engine was replaced")
    if steps >= 20 and not last.get("eval/reward", 0.0) > first.get("eval/reward", 1.0):
        problems.append("held-out reward is not higher than before")
    return {
        "scenario": name,
        "good": not problems,
        "problems": problems,
        "steps": len(ended.steps),
        "reward": [first.get("eval/reward"), last.get("eval/reward")],
        "exact_match": [first.get("eval/exact_match"), last.get("eval/exact_match")],
        "logprob_diff": difference,
        "logprob_diff_largest": max((step.get("rollout/logprob_diff_max", 0.0) for step in ended.steps), default=None),
        "staleness_max": max((step.get("rollout/staleness_max", 0.0) for step in ended.steps), default=None),
        "batches": len(sizes),
        "seconds": {phase: round(each, 4) for phase, each in ended.phases(after=WARM).items()},
        "seconds_in_all": round(ended.seconds, 1),
    }


def play(
    name: str, scenario: Scenario, *, steps: int, deadline: float, tiny: bool, more: Sequence[str]
) -> dict[str, Any]:
    with Watched(*settings(scenario, steps=steps, tiny=tiny), *more, directory=OUT / name) as run:
        (OUT / name / "command").write_text(run.command)
        killer = Killer(scenario)
        ended = run.wait(deadline, killer)
        return found(name, scenario, ended, run, killer.killed, steps=steps, prompts=4 if tiny else PROMPTS)


def main() -> int:
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("scenarios", nargs="*", metavar="SCENARIO", help=f"of {', '.join(SCENARIOS)}; all, if none")
    command.add_argument("--steps", type=int, default=40)
    command.add_argument("--deadline", type=float, help="seconds that each has, its start included, for its own")
    command.add_argument("--set", nargs="*", default=[], help="more settings of the runs")
    command.add_argument("--tiny", action="store_true", help="on a CPU, with a stand-in for SGLang")
    args = command.parse_args()
    if unknown := set(args.scenarios) - SCENARIOS.keys():
        command.error(f"no scenario {sorted(unknown)[0]!r}; there are {', '.join(SCENARIOS)}")
    good = True
    for name in args.scenarios or SCENARIOS:
        scenario = SCENARIOS[name]
        if not args.tiny and torch.cuda.device_count() < scenario.gpus:
            line: dict[str, Any] = {"scenario": name, "good": True, "left out": f"wants {scenario.gpus} GPUs"}
        else:
            try:
                line = play(
                    name,
                    scenario,
                    steps=args.steps,
                    deadline=args.deadline or scenario.deadline,
                    tiny=args.tiny,
                    more=args.set,
                )
            except Exception as error:  # the others still have something to say
                traceback.print_exc()
                line = {"scenario": name, "good": False, "problems": [f"{type(error).__name__}: {error}"]}
        good = good and line["good"]
        print(json.dumps(line), flush=True)
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
