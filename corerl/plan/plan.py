"""A run before its first process, in slices: each part of the run takes its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import frozen
from transformers import PreTrainedTokenizerBase

from corerl.config.schema import (
    CheckpointConfig,
    ClusterConfig,
    EvalConfig,
    ExtensionChoice,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    WeightsConfig,
)
from corerl.data.prompts import PromptSource
from corerl.engines.base import SamplingParams
from corerl.plan.algorithm import AlgorithmPlan
from corerl.plan.processes import ProcessPlan
from corerl.plan.sampler import MakeSampler
from corerl.plan.start import Start
from corerl.rollout.encoding import PromptCheck
from corerl.rollout.evaluation import EvalSet
from corerl.rollout.rewards.base import Reward
from corerl.rollout.scored import ScoredRollout


@frozen(kw_only=True)
class RolloutPlan:
    """How batches of samples come about."""

    settings: RolloutConfig
    rewarding: RewardConfig
    seed: int
    tokenizer: PreTrainedTokenizerBase
    prompts: PromptSource
    template_options: Mapping[str, Any]  # of the tokenizer's chat template
    check: PromptCheck | None  # of each prompt that is drawn; None if the run draws none
    context_length: int  # maximum tokens of a sample, prompt and response; 0: unlimited
    reward: Reward
    params: SamplingParams
    attempts: int  # batches drawn at most to replace groups of equal rewards; 0: they are kept
    spread_on: str  # the part of the reward that decides which are equal; "": the reward itself
    sampler: MakeSampler
    postprocess: Callable[[ScoredRollout], Any] | None
    vocab_size: int  # of the actor's model


@frozen(kw_only=True)
class Plan:
    """A fully resolved and checked run, before it touches Ray or a device."""

    title: str
    run: RunConfig
    start: Start
    algorithm: AlgorithmPlan
    processes: ProcessPlan
    rollout: RolloutPlan
    cluster: ClusterConfig
    weights: WeightsConfig
    checkpoint: CheckpointConfig
    eval: EvalConfig
    eval_sets: Sequence[EvalSet]  # that of data.held_out first, if there is one
    extensions: tuple[ExtensionChoice, ...]
    resized: Callable[[Sequence[str]], Plan]  # of this run with other sizes, as overrides say
    record: Mapping[str, Any]  # the config as plain data, as the run keeps it: with its plugins' tables resolved
    kept: Mapping[str, str]  # of what a role's export copies from its model's directory: role -> digest
    notices: tuple[str, ...]  # a line each, what a user may want to know before the first step

    @property
    def first_step(self) -> int:
        """Rollout steps already done; 0 for a run that only samples, which takes just the weights of a checkpoint."""
        return 0 if self.run.mode == "rollout-only" else int(self.start.state.get("rollout_step", 0))
