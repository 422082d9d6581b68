"""Measure the overhead of sampling through CoreRL: the same requests through its sampler and SGLang's offline engine.

python -m benchmarks.engine_throughput 0.6b --output found/throughput.json         # one GPU
python -m benchmarks.engine_throughput 8b --rows 256 --new 512
python -m benchmarks.engine_throughput 0.6b --tiny                                  # on a CPU, with a stand-in

One side uses the parts of a run: `Sampler.sample` encodes the prompts and calls the fleet (Ray), which calls the
engine's actor, which calls its server over HTTP. Tokens, log-probs and versions are laid out as a batch, and texts are
decoded. The other side is one call of `sglang.Engine(...).generate` with the same token ids, in a separate process;
what it returns is not processed. Both have the same server arguments, log-probs enabled, and fixed lengths: no token
ends a sample. Weights are random on both sides. Both engines stay on the GPU, and each is idle while the other one
works.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.engine_sides import STAND_IN, Peer, arguments_of
from benchmarks.report import Comparison, Number, Report, arguments, finish, in_turns
from benchmarks.runs import LARGE, QUICKSTART, sglang, shape_settings
from benchmarks.shapes import SHAPES
from corerl.config.load import load_config
from corerl.config.schema import Config
from corerl.config.structuring import structure
from corerl.data.prompts import Prompt
from corerl.driver.launch import launch
from corerl.engines.base import EngineContext, GenerateRequest, SamplingParams
from corerl.plan.make import make_plan
from corerl.rollout.sampler import PromptSampler
from corerl_sglang.config import SglangConfig

TARGET = 1 / 0.97
# Rounds that do not count. After the first one prompts are in the caches; rows still begin in batches of other sizes
# each time, for which a side may compile or load another kernel.
WARM_UP = 5
DIGITS = "0123456789"
TINY = {"prompt": 7, "rounds": 2, "requests": 2, "rows": 6, "new": 4}


def as_offline(request: GenerateRequest) -> dict[str, Any]:
    """The same request, as SGLang's own engine takes it."""
    params = request.params
    shape = {"temperature": params.temperature, "top_p": params.top_p, "max_new_tokens": params.max_tokens}
    return {
        "input_ids": [row.tolist() for row in request.by_row()],
        "sampling_params": [{**shape, "ignore_eos": True, "stop_token_ids": []} for _ in range(len(request))],
        "return_logprob": True,
    }


def config_of(args: argparse.Namespace, directory: Path) -> Config:
    """A run that samples and does not train."""
    common = [
        *(f"run.dir={directory / 'run'}", "run.steps=0", "roles.actor.ranks=1", "rollout.replicas=1", "extensions=[]"),
        "checkpoint.background=false",
    ]
    if args.tiny:
        engine = sglang(launcher=STAND_IN, requests=args.requests)
        return load_config(QUICKSTART, [*common, "cluster.device=cpu", "train.precision=float32", *engine])
    engine = sglang(
        requests=args.requests,
        memory=args.memory,
        attention_backend=os.environ.get("ATTENTION", "triton"),
        server={"cuda_graph_max_bs_decode": args.rows},
    )
    return load_config(QUICKSTART, [*common, *LARGE, *shape_settings(args.shape, micro_batch=16384), *engine])


def other_side(config: Config, directory: Path, args: argparse.Namespace) -> Peer:
    """SGLang's offline engine, with the arguments of the run's server."""
    options = structure(config.engines["sglang"], SglangConfig, path="engines.sglang")
    device = str(config.cluster.device)
    context = EngineContext(name="offline", index=0, device=device, precision=config.train.precision)
    arguments = arguments_of(options, context, config.model.config, directory)
    return Peer("generating", arguments, args.tiny)


def measure(args: argparse.Namespace) -> Report:
    rows, new = args.rows, args.new
    texts = ["".join(DIGITS[(row + place * place) % 10] for place in range(args.prompt)) for row in range(rows)]
    prompts = [Prompt(index=row, text=text, answer="") for row, text in enumerate(texts)]
    params = SamplingParams(temperature=1.0, max_tokens=new)
    with tempfile.TemporaryDirectory(prefix="throughput-") as directory:
        config = config_of(args, Path(directory))
        with launch(make_plan(config)) as run:
            assert isinstance(run.sampling.sampler, PromptSampler) and run.engines is not None
            sampler, fleet = run.sampling.sampler, run.engines.fleet
            run.push_weights()
            run.sleep_ranks()
            other = other_side(config, Path(directory), args)
            tokens: set[int] = set()
            step = 0

            def ours(_: int) -> float:
                nonlocal step
                step += 1
                began = time.perf_counter()
                rollout = fleet.loop.run(sampler.sample(prompts, rollout_step=step, samples=1, params=params))
                took = time.perf_counter() - began
                tokens.add(int(rollout.batch.row_columns["response_length"].sum()))
                return took

            def theirs(_: int) -> float:
                request = sampler.request(prompts, rollout_step=step, samples=1, params=params)
                took, count = other.ask(as_offline(request))
                tokens.add(count)
                return float(took)

            in_turns(args.warm, ours, theirs)
            took, others = in_turns(args.rounds, ours, theirs)
            other.close()
    if tokens != {rows * new}:
        raise AssertionError(
            f"samples were not of fixed length: {sorted(tokens)} tokens, wanted {rows * new} each time"
        )
    return Report(
        name="engine_throughput",
        size=f"{'tiny ' if args.tiny else ''}{args.shape} shape, {rows} samples of {args.prompt + 1} + {new} tokens, "
        f"{args.requests} HTTP requests",
        comparisons=[
            Comparison(
                what="a rollout through the sampler",
                against="the stand-in, called" if args.tiny else "sglang.Engine.generate",
                ours=took,
                other=others,
                target=TARGET,
            )
        ],
        numbers=[
            Number(what="CoreRL", values=[rows * new / each for each in took], unit="tokens/s"),
            Number(what="the other", values=[rows * new / each for each in others], unit="tokens/s"),
        ],
        note="The prompts are the same in each round, and both sides have processed them before the first one.",
    )


def main() -> None:
    command = arguments(__doc__, rounds=7)
    command.add_argument("shape", choices=SHAPES)
    command.add_argument("--rows", type=int, default=256, help="samples at once")
    command.add_argument("--prompt", type=int, default=63, help="tokens of a prompt, without the first one")
    command.add_argument("--new", type=int, default=256, help="tokens that are sampled for each")
    command.add_argument("--warm", type=int, default=WARM_UP, help="rounds before them that do not count")
    command.add_argument("--requests", type=int, default=SglangConfig().requests, help="engines.sglang.requests")
    command.add_argument(
        "--memory", type=float, default=0.35, help="share of what is free that each side's engine takes"
    )
    args = command.parse_args()
    if args.tiny:
        args = argparse.Namespace(**{**vars(args), **TINY})
    finish(measure(args), args.output)


if __name__ == "__main__":
    main()
