"""Everything about a run that can be known, and be wrong, before its first process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from transformers import PreTrainedConfig

from corerl.checkpoint.commit import latest, read_state
from corerl.checkpoint.reader import CheckpointSource
from corerl.cluster.placement import Seating, arrange
from corerl.config.check import require_valid
from corerl.config.schema import ClusterInfo, Config
from corerl.data.prompts import PromptSource, PromptStream, load_prompts
from corerl.errors import CheckpointError, ConfigError
from corerl.models.build import build_on_meta
from corerl.models.config import hf_config
from corerl.models.names import hf_boxes
from corerl.models.tokenizer import load_tokenizer
from corerl.plugin.options import check_spec, resolve_tables
from corerl.plugin.registry import Kind, Loaded, load
from corerl.rollout.engine import SamplingParams
from corerl.rollout.rewards import Reward, resolve_reward
from corerl.rollout.sampler import sampling_params
from corerl.trainer.assign import RolePlan, plan_role
from corerl.weights.transports import require_transport

ACTOR = "actor"


@frozen(kw_only=True)
class Prepared:
    """All that a run is before its first process: nothing here has touched Ray or a device."""

    config: Config  # plugins' tables resolved
    device: str
    run_dir: Path
    resume: Path | None  # a checkpoint that fits this run
    state: dict[str, Any]  # the driver's part of it; empty where the run begins
    actor: RolePlan
    engine: Loaded
    seating: Seating
    tokenizer: Any
    prompts: PromptSource
    reward: Reward
    params: SamplingParams


def prepare(config: Config) -> Prepared:
    """Resolve and check everything that can be checked without a process. Raises UserError."""
    config = resolve_tables(config)
    require_valid(config)
    device = resolve_device(config.cluster.device)
    run_dir = Path(config.run.dir).absolute()
    resume = resume_from(config, run_dir)
    state = read_state(resume) if resume else {}
    model = hf_config(config.model)
    if resume:
        require_same_model(resume, model)
    require_transport(config.weights.transport)
    tokenizer = load_tokenizer(tokenizer=config.model.tokenizer, path=config.model.path)
    engine = load(Kind.ENGINES, config.rollout.engine)
    engines = ClusterInfo(device=device, ranks=config.rollout.replicas)
    check_spec(engine, config.engines[engine.name], engines)
    actor = plan_role(ACTOR, config, device=device, run_dir=str(run_dir), resume=str(resume / ACTOR) if resume else "")
    resources = (actor.resources, engine.spec.resources(config.engines[engine.name], engines))
    data = config.data
    prompts = load_prompts(
        source=data.source,
        prompt_key=data.prompt_key,
        answer_key=data.answer_key,
        held_out=data.held_out,
        seed=config.run.seed,
    )
    if state:
        PromptStream(prompts, config.run.seed).restore(state["source"]["prompts"])  # raises where it does not fit
    return Prepared(
        config=config,
        device=device,
        run_dir=run_dir,
        resume=resume,
        state=state,
        actor=actor,
        engine=engine,
        seating=arrange(
            ranks=config.roles.actor.ranks,
            engines=config.rollout.replicas,
            placement=config.cluster.placement,
            cpus=max(each.cpus for each in resources),
            gpus=max(each.gpus for each in resources),
        ),
        tokenizer=tokenizer,
        prompts=prompts,
        reward=resolve_reward(config.reward.name, config.reward.options),
        params=sampling_params(config.rollout, tokenizer),
    )


def resolve_device(device: str) -> str:
    """`auto` takes cuda where torch sees one; raises ConfigError where cuda is asked for and there is none."""
    import torch

    there = torch.cuda.is_available()
    if device == "cuda" and not there:
        raise ConfigError("cluster.device: 'cuda', and torch sees no CUDA device here; use 'cpu' or 'auto'")
    return "cuda" if there and device != "cpu" else "cpu"


def resume_from(config: Config, run_dir: Path) -> Path | None:
    """The checkpoint that the run goes on from. Raises ConfigError rather than train over other checkpoints."""
    resume = config.checkpoint.resume
    newest = latest(run_dir)
    if resume == "auto":
        return newest
    chosen = None if resume == "never" else Path(resume).absolute()
    # Retention would take what is there for this run's own, and the next resume would go on from whatever is newest.
    if newest is not None and (chosen is None or chosen.resolve() != newest.resolve()):
        raise ConfigError(
            f"run.dir: {run_dir} already holds a run ({newest.name}); go on with it by checkpoint.resume=auto, "
            "or give another run.dir"
        )
    return chosen


def require_same_model(checkpoint: Path, model: PreTrainedConfig) -> None:
    """Raises CheckpointError where the checkpoint lacks a tensor of the model, or has it in another shape."""
    held = CheckpointSource(checkpoint / ACTOR, "master").shapes
    built = build_on_meta(model, dtype=torch.float32, attention="eager")
    for box in (box for boxes in hf_boxes(built).values() for box in boxes):
        found = held.get(box.name)
        if found != box.shape:
            what = "lacks" if found is None else f"has {list(found)} for"
            raise CheckpointError(
                f"{checkpoint} {what} {box.name!r}, this run's model wants {list(box.shape)}; "
                "resume with the [model] that it was trained with, or give another run.dir and start anew"
            )


def title(prepared: Prepared) -> str:
    config = prepared.config
    model = Path(config.model.path).name if config.model.path else f"{config.model.config['model_type']} from scratch"
    return (
        f"{config.algorithm.name} on {config.data.source}: {model}, "
        f"{config.roles.actor.ranks} {prepared.actor.backend.name} ranks, "
        f"{config.rollout.replicas} {prepared.engine.name} engines, {prepared.device}"
    )
