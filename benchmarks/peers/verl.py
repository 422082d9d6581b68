"""Compare colocated GRPO steps of CoreRL and of verl on one GPU: the same checkpoint, prompts, engine and sizes.

python -m benchmarks.peers.verl --case short ragged long --output found/verl.json
python -m benchmarks.peers.verl --case lora-8b lora-8b-adapters --keep kept --output found/verl-lora.json
python -m benchmarks.peers.verl --case ragged --side corerl --tiny                          # CoreRL alone, on a CPU
python -m benchmarks.peers.verl --case short --overrides                                    # what verl is given

Each side runs as its user starts it, `corerl train` and `python -m verl.trainer.main_ppo`. Both start at the same
time and wait with their first samples until all are there: then each has a turn of its own, in which the other does
nothing, CoreRL the first. A step samples 64 rows with SGLang, scores them, takes one optimizer step and sends the
weights to the engine; its seconds are those that each side reports (`time/step`, `timing_s/step`), without the first
steps. Sides and steps differ in how many tokens were sampled, so that what is compared are seconds by response token.
README.md lists what is equal.

With `--keep DIRECTORY` checkpoints, steps and logs are kept, and the steps of a side that are there are not made again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

from benchmarks.peers import work
from benchmarks.peers.work import CASES, Case
from benchmarks.report import Comparison, Number, Report, arguments, finish, joined
from benchmarks.runs import SERVER, Process, Watched, sglang, value

SIDES = ("corerl", "verl")
Steps = Sequence[Mapping[str, float]]
PROMPTS, SAMPLES = 8, 8  # of a step; samples are of each prompt
POLL_SECONDS = 0.2
# Metrics of a step that both sides have: seconds, but for the first, which are tokens of a sample.
NAMES = {
    "length": ("rollout/response_length", "response_length/mean"),
    "step": ("time/step", "timing_s/step"),
    "sampling": ("time/rollout", "timing_s/gen"),
    "training": ("time/train", "timing_s/update_actor"),
    "update": ("time/update_weights", "timing_s/update_weights"),
}
KEPT_OF_A_LOG = 6000  # characters of a side that failed
PACKAGES = ("verl", "torch", "transformers", "sglang", "ray", "peft", "tensordict")


def server_options(case: Case) -> dict[str, Any]:
    """What the engine's server is started with on both sides: a graph for as many rows as a step has, and no more, and
    a cache for all their tokens and a quarter more, whatever the memory that the other side left."""
    rows = PROMPTS * SAMPLES
    cached = rows * (case.new + work.LONGEST) * 5 // 4
    return {**SERVER, "cuda_graph_max_bs_decode": rows, "max_total_tokens": cached}


def corerl_settings(case: Case, args: argparse.Namespace, checkpoint: Path, data: Path) -> list[str]:
    """Of `corerl train`, added to an empty file."""
    common = [
        *("backend.name=fsdp", "roles.actor.ranks=1", "rollout.replicas=1", "algorithm.name=grpo"),
        *(f"model.path={checkpoint}", f"data.source={data}", "data.held_out=0"),
        # A sample's reward may wait for the turn.
        *("reward.name=benchmarks.peers.work:reward", f"reward.timeout={args.deadline * len(SIDES)}"),
        f"rollout.max_tokens={case.new}",
        *(f"rollout.prompts={PROMPTS}", f"rollout.samples={SAMPLES}", f"run.steps={case.warm + case.steps}"),
        *("train.mini_batches=1", "train.optimizer.lr=1e-6", f"train.tokens_per_micro_batch={case.micro_batch}"),
        *("eval.every=0", "checkpoint.every=0", "checkpoint.export=false"),
    ]
    if case.lora:
        common += [f"lora.rank={case.lora}", f"lora.alpha={case.lora}"]
        common += [f"weights.lora={'adapter' if case.adapters else 'merged'}"]
    if args.tiny:
        # The engine transformers merges adapters.
        kept = [each for each in common if not each.startswith("weights.lora")]
        return [*kept, "cluster.device=cpu", "rollout.engine=transformers", "cluster.offload=always"]
    engine = sglang(memory=case.memory, attention_backend=args.attention, server=server_options(case))
    # What `auto` comes to alone on the GPU, once two steps have shown that ranks and engine fit there together.
    stays = "cluster.offload=never"
    return [*common, "cluster.device=cuda", stays, "train.precision=bfloat16", *engine, *args.set]


def verl_overrides(case: Case, args: argparse.Namespace, checkpoint: Path, data: Path) -> list[str]:
    """Of verl's configuration `ppo_trainer`, in Hydra's syntax."""
    actor, model, rollout = (f"actor_rollout_ref.{part}" for part in ("actor", "model", "rollout"))
    work_of = [
        *(f"data.train_files=[{data}]", f"data.val_files=[{data}]", f"data.train_batch_size={PROMPTS}"),
        *(f"data.max_prompt_length={work.LONGEST}", f"data.max_response_length={case.new}"),
        *("data.dataloader_num_workers=0", f"trainer.total_training_steps={case.warm + case.steps}"),
        *("trainer.total_epochs=1000", "trainer.val_before_train=false", "trainer.test_freq=-1"),
        *("trainer.save_freq=-1", "trainer.resume_mode=disable", "trainer.logger=[console,file]"),
        *("trainer.nnodes=1", "trainer.n_gpus_per_node=1"),
        *(f"reward.custom_reward_function.path={work.__file__}", "reward.num_workers=2"),
        # GRPO without a KL term, critic or entropy bonus. The ratio's denominator are the engine's log-probs, as
        # CoreRL's are by default, which spares a pass.
        *("algorithm.adv_estimator=grpo", "algorithm.use_kl_in_reward=false"),
        *("algorithm.rollout_correction.bypass_mode=true", f"{actor}.use_kl_loss=false", f"{actor}.entropy_coeff=0"),
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
    ]
    trained = [
        *(f"{model}.path={checkpoint}", f"{model}.use_remove_padding=true"),
        f"{model}.enable_gradient_checkpointing=false",
        f"{model}.external_lib=benchmarks.peers.attention",
        f"+{model}.override_config.attn_implementation={work.ATTENTION}",
        # Without flash-attn's cross entropy verl would loop over tokens. Its kernels make no logits at all.
        *(f"{model}.use_fused_kernels=true", f"{model}.fused_kernel_options.impl_backend={case.fused}"),
        *(f"{actor}.strategy=fsdp2", f"{actor}.use_dynamic_bsz=true", f"{actor}.ppo_mini_batch_size={PROMPTS}"),
        *(f"{actor}.ppo_max_token_len_per_gpu={case.micro_batch}", f"{actor}.loss_agg_mode=token-mean"),
        *(f"{actor}.optim.lr=1e-6", f"{actor}.optim.betas=[0.9,0.95]", f"{actor}.optim.weight_decay=0.0"),
        # One rank holds all: nothing is gained by freeing parameters after a layer, or by moving them to the host.
        *(f"{actor}.fsdp_config.reshard_after_forward=false", f"{actor}.fsdp_config.param_offload=false"),
        f"{actor}.fsdp_config.optimizer_offload=false",
    ]
    sampled = [
        *(f"{rollout}.name=sglang", f"{rollout}.n={SAMPLES}", f"{rollout}.tensor_model_parallel_size=1"),
        *(f"{rollout}.gpu_memory_utilization={case.memory}", f"{rollout}.agent.num_workers=4"),
        *(
            f"+{rollout}.engine_kwargs.sglang.{name}={value(each)}"
            for name, each in {"attention_backend": args.attention, **server_options(case)}.items()
        ),
    ]
    if case.lora:
        trained += [f"{model}.lora_rank={case.lora}", f"{model}.lora_alpha={case.lora}"]
        # Weights that are not trained are held in half precision, adapters with them.
        trained += [f"{model}.lora.merge={value(not case.adapters)}", f"{actor}.fsdp_config.model_dtype=bf16"]
        if case.adapters:
            sampled += [f"{rollout}.load_format=safetensors"]  # the server reads the weights, and is sent none
    return [*work_of, *trained, *sampled, *args.verl_set]


@frozen
class Side:
    """One side's run, which waits for its turn in the reward of its first samples."""

    run: Process
    read: Callable[[], Steps]  # the metrics of each step so far, with the side's own names
    turn: Path  # a directory for work.ARRIVED and work.GO

    def wait(self, deadline: float, done: Callable[[], bool]) -> None:
        """Until `done`, or the run ended, or `deadline` seconds are over."""
        until = time.monotonic() + deadline
        while not done() and self.run.process.poll() is None and time.monotonic() < until:
            time.sleep(POLL_SECONDS)

    def take_turn(self, wanted: int, deadline: float) -> Steps:
        """All steps that it made. The caller kills the run: engines' processes may outlive it."""
        (self.turn / work.GO).touch()
        self.wait(deadline, lambda: len(self.read()) >= wanted)
        steps = self.read()
        if len(steps) < wanted:
            print(f"{len(steps)} steps of {wanted}:\n{self.run.output()[-KEPT_OF_A_LOG:]}", flush=True)
        return steps


def start_corerl(case: Case, args: argparse.Namespace, checkpoint: Path, directory: Path) -> Side:
    data, _ = data_of(case, args, directory)
    config = directory / "run.toml"
    config.write_text("")
    settings = corerl_settings(case, args, checkpoint, data)
    turn = {work.TURN: str(directory)}
    run = Watched(*settings, directory=directory / "ours", config=config, environment=turn)
    return Side(run, lambda: [line for line in run.lines() if NAMES["step"][0] in line], directory)


def start_verl(case: Case, args: argparse.Namespace, checkpoint: Path, directory: Path) -> Side:
    _, data = data_of(case, args, directory)
    metrics = directory / "metrics.jsonl"
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *verl_overrides(case, args, checkpoint, data)]
    environment = {
        work.TURN: str(directory),
        "VERL_FILE_LOGGER_PATH": str(metrics),
        "HF_HOME": str(directory / "cache"),
        "HYDRA_FULL_ERROR": "1",
    }
    run = Process([*command, f"hydra.run.dir={directory}"], directory=directory, environment=environment)
    return Side(run, lambda: read_verl(metrics), directory)


STARTS = {"corerl": start_corerl, "verl": start_verl}


def read_verl(metrics: Path) -> list[dict[str, float]]:
    """The metrics of each step, as verl's logger `file` writes them."""
    lines = metrics.read_text().split("\n")[:-1] if metrics.exists() else []
    return [json.loads(line)["data"] for line in lines]


def data_of(case: Case, args: argparse.Namespace, directory: Path) -> tuple[Path, Path]:
    """Files of prompts, enough for each step to have its own."""
    vocabulary = work.fields_of(case, tiny=args.tiny)["vocab_size"]
    longest = work.SHORTEST if args.tiny else work.LONGEST
    texts = work.prompts(PROMPTS * (case.warm + case.steps), vocabulary=vocabulary, longest=longest)
    return work.write_prompts(directory, texts)


def common(side: str, step: Mapping[str, float]) -> dict[str, float]:
    """What both sides measure of a step, under the names in NAMES."""
    place = SIDES.index(side)
    return {name: step[names[place]] for name, names in NAMES.items() if names[place] in step}


def rate(steps: Steps) -> float:
    """Response tokens a second of these steps. Where samples end by themselves a step's tokens differ by a tenth and
    its seconds by less, since the longest sample decides: one step beside one step says little there."""
    return PROMPTS * SAMPLES * sum(step["length"] for step in steps) / sum(step["step"] for step in steps)


def report(name: str, case: Case, steps: Mapping[str, Steps]) -> Report:
    """Of one case; a side of which nothing is known is left out. `steps` with the names in NAMES."""
    counted = {side: each[case.warm :] for side, each in steps.items() if len(each) > case.warm}
    comparisons, numbers = [], []
    if len(counted) == len(SIDES):
        rounds = list(zip(*([rate([step]) for step in counted[side]] for side in SIDES), strict=False))
        comparisons = [
            Comparison(
                what=f"{name}: a step by response token",
                against="verl's",
                ours=[1e3 / own for own, _ in rounds],  # of 1,000 tokens
                other=[1e3 / theirs for _, theirs in rounds],
                target=round(1 / case.target, 3),
            )
        ]
        ratios = {"each step": [own / theirs for own, theirs in rounds]}
        ratios["all steps together"] = [rate(counted["corerl"]) / rate(counted["verl"])]
        what = f"{name}: CoreRL's tokens a second over verl's"
        numbers = [Number(what=f"{what}, {of}", values=values, unit="x") for of, values in ratios.items()]
    for side, each in counted.items():
        numbers += [
            Number(what=f"{name}, {side}", values=[rate([step]) for step in each], unit="tokens/s"),
            Number(what=f"{name}, {side}: a sample", values=[step["length"] for step in each], unit="tokens"),
            *(
                Number(what=f"{name}, {side}: {part}", values=values, unit="s")
                for part in list(NAMES)[1:]
                if (values := [step[part] for step in each if part in step])
            ),
        ]
    sizes = f"{name}: {case.shape} shape, {PROMPTS} x {SAMPLES} samples of at most {case.new} tokens"
    return Report(
        name="peers.verl",
        size=sizes,
        comparisons=comparisons,
        numbers=numbers,
        note=f"Without the first steps ({name}: {case.warm}). Seconds by token are of 1,000 tokens of responses.",
        versions=versions(),
    )


def versions() -> dict[str, str]:
    """Of the packages that are there: a side that does not run here lacks its own."""
    return {each: version(each) for each in PACKAGES if find_spec(each)}


def make(name: str, case: Case, args: argparse.Namespace, keep: Path, checkpoint: Path) -> dict[str, Steps]:
    """The steps of each side with the names in NAMES; those that are kept are read."""
    files = {side: keep / f"{name}-{side}.json" for side in SIDES}
    missing = [side for side in SIDES if args.side in (side, "both") and not files[side].exists()]
    steps = {side: json.loads(file.read_text()) for side, file in files.items() if file.exists()}
    with ExitStack() as stack:
        sides, ends = {}, {}
        for side in missing:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"{side}-")))
            sides[side] = STARTS[side](case, args, checkpoint, directory)
            ends[side] = stack.enter_context(ExitStack())
            ends[side].enter_context(sides[side].run)
        for side in missing:
            sides[side].wait(args.deadline, (sides[side].turn / work.ARRIVED).exists)
            print(f"{name}, {side}: waits for its turn after {sides[side].run.now():.0f} s", flush=True)
        for side in missing:
            made = sides[side].take_turn(case.warm + case.steps, args.deadline)
            steps[side] = [common(side, step) for step in made]
            (keep / f"{name}-{side}.log").write_text(sides[side].run.output())
            ends[side].close()
            for number, step in enumerate(steps[side]):
                print(f"{name}, {side}, step {number}: {step}", flush=True)
            if len(steps[side]) >= case.warm + case.steps:
                files[side].write_text(json.dumps(steps[side]))
    return steps


def main() -> int:
    command = arguments(__doc__, deadline=420.0, settings="more settings of CoreRL's run")
    command.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    command.add_argument("--side", choices=(*SIDES, "both", "none"), default="both", help="none: of kept steps alone")
    command.add_argument("--steps", type=int, help="that count, in place of the case's")
    command.add_argument("--warm", type=int, help="steps before them, in place of the case's")
    command.add_argument("--attention", default="triton", help="SGLang's attention backend, on both sides")
    command.add_argument("--verl-set", nargs="*", default=[], help="more overrides of verl's configuration")
    command.add_argument("--keep", type=Path, help="a directory for checkpoints and steps")
    command.add_argument("--overrides", action="store_true", help="print verl's overrides, one a line, and end")
    args = command.parse_args()
    if args.tiny and args.side in ("verl", "both"):
        command.error("--tiny: verl needs a GPU, add --side corerl")
    whole, reports = True, []
    with tempfile.TemporaryDirectory(prefix="peers-") as temporary:
        keep = args.keep or Path(temporary)
        keep.mkdir(parents=True, exist_ok=True)
        for name in args.case:
            given = {key: each for key in ("warm", "steps") if (each := getattr(args, key)) is not None}
            case = evolve(work.tiny_case(CASES[name]) if args.tiny else CASES[name], **given)
            checkpoint = keep.resolve() / f"{case.shape}-{case.ends_every}{'-tiny' * args.tiny}"
            if args.overrides:
                print("\n".join(verl_overrides(case, args, checkpoint, data_of(case, args, keep.resolve())[1])))
                continue
            if args.side != "none":
                fields = work.fields_of(case, tiny=args.tiny)
                work.write_checkpoint(checkpoint, fields, device="cpu" if args.tiny else "cuda")
            steps = make(name, case, args, keep, checkpoint)
            whole = whole and all(len(each) >= case.warm + case.steps for each in steps.values())
            reports.append(report(name, case, steps))
            if args.output:  # after each case: a later one may run out of time
                finish(joined("peers.verl", reports), args.output)
    if reports and not args.output:
        finish(joined("peers.verl", reports), None)
    return 0 if whole else 1


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    raise SystemExit(main())
