"""A run's algorithm: whether the rest of the config fits it, its forward passes, and what each role is trained on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from attrs import evolve, fields, frozen

from corerl.algorithms.base import (
    REFERENCE,
    SNAPSHOTS,
    Advantages,
    Algorithm,
    Estimate,
    ForwardPass,
    Objective,
    Postprocess,
)
from corerl.algorithms.functions import users_estimate, users_postprocess
from corerl.algorithms.registry import find_loss, policy_loss
from corerl.config.functions import imported
from corerl.config.problems import Problems
from corerl.config.schema import KL_ESTIMATOR, AlgorithmConfig, Config, RewardConfig, TrainConfig
from corerl.errors import ContractError, PluginBroken
from corerl.messages import one_line
from corerl.plan.resolve import ROLES, algorithm_spec, check_spec, role_kinds
from corerl.plan.roles import CLIPPED
from corerl.plan.sampler import plays_episodes
from corerl.plugin.registry import Kind, load, load_implementation
from corerl.plugin.spec import ACTOR, AlgorithmRun, RoleKind
from corerl.types import FloatArray, Output, SampleBatch

BY_ALL_PARTS = (
    "groups are equal where the sums of all parts of the reward are; name the part that decides in "
    "algorithm.dynamic_sampling_on, if one does"
)


@frozen(kw_only=True)
class AlgorithmPlan:
    """What a run needs to know of its algorithm."""

    settings: AlgorithmConfig  # settled: nothing is left open
    estimate: Estimate  # its advantages, or the user's
    passes: tuple[ForwardPass, ...]  # of a step, before any training
    # Of each role of the run that is trained, with the terms of the loss that `[algorithm]` sets.
    objectives: Mapping[str, Objective]
    postprocess: Postprocess | None  # the user's, of the samples with their advantages
    compares: bool  # the samples of a prompt: groups of equal rewards teach nothing
    credits_turns: bool = False  # as in the spec; a user's function finds them in the samples

    @property
    def asks_frozen(self) -> bool:
        """Whether a frozen role teaches too, so that samples of equal rewards may teach something."""
        return any(each.role not in {*self.objectives, REFERENCE} for each in self.passes)

    def snapshots(self, role: str) -> dict[str, str]:
        """The earlier weights of a role that passes ask for, each with the setting that wants it."""
        settings, name = self.settings, f"algorithm.name = {self.settings.name!r}"
        wanted = {each.weights: name for each in self.passes if each.weights and each.role == role}
        if settings.kl_coef and REFERENCE in wanted:
            wanted[REFERENCE] = f"algorithm.kl_coef = {settings.kl_coef} (its reference is a snapshot)"
        if settings.old_weights in wanted:
            wanted[settings.old_weights] = f"algorithm.old_weights = {settings.old_weights!r}"
        return wanted


def _never(samples: SampleBatch, rewards: FloatArray, token_rewards: FloatArray) -> Advantages:
    raise ContractError("a run that only scores has no advantages")


def plan_algorithm(config: Config) -> AlgorithmPlan:
    """The plan of a settled config whose plugins' tables are resolved. Raises ConfigError if it names an impossible
    loss, or a function for advantages that cannot be imported."""
    if config.run.mode == "eval":
        return AlgorithmPlan(
            settings=config.algorithm,
            estimate=_never,
            postprocess=None,
            passes=(),
            objectives={ACTOR: CLIPPED},
            compares=False,
        )
    loaded = load(Kind.ALGORITHMS, config.algorithm.name)
    implementation: type[Algorithm] = load_implementation(Kind.ALGORITHMS, loaded)
    try:
        algorithm = implementation(config.algorithms[loaded.name])
        trained, passes = set(algorithm.objectives()), list(algorithm.forwards())
    except Exception as error:
        raise PluginBroken(f"algorithm {loaded}: {implementation.__name__} raised {one_line(error)}") from error
    roles = loaded.spec.roles
    wanted = [role for role, kind in roles.items() if kind is not RoleKind.FROZEN]
    if trained != set(wanted):
        raise PluginBroken(
            f"algorithm {loaded}: objectives() names the roles {', '.join(sorted(trained)) or 'none'}, wanted those of "
            f"its spec that are not frozen, {', '.join(wanted)}"
        )
    for each in passes:
        if each.role not in roles:
            raise PluginBroken(
                f"algorithm {loaded}: forwards() names the role {each.role!r}; its spec has {', '.join(roles)}"
            )
        if each.weights and (each.role != ACTOR or each.weights not in SNAPSHOTS):
            raise PluginBroken(
                f"algorithm {loaded}: forwards() passes the samples through the {each.role} under the weights "
                f"{each.weights!r}; there are {', '.join(SNAPSHOTS)}, of the {ACTOR}"
            )
    own, after = config.algorithm.advantages, config.algorithm.postprocess
    return AlgorithmPlan(
        settings=config.algorithm,
        estimate=users_estimate(own) if own else algorithm.advantages,
        postprocess=users_postprocess(after) if after else None,
        passes=tuple(_passes(config, algorithm)),
        objectives=_objectives(config, algorithm),
        compares=loaded.spec.compares and config.algorithm.kl_in != "reward" and not own,
        credits_turns=loaded.spec.credits_turns and not own,
    )


def require_functions(config: Config, problems: Problems) -> None:
    """Check that there are the user's functions that `[algorithm]` names, whatever the algorithm is."""
    if config.run.mode == "eval":
        return
    own = config.algorithm
    if own.loss:
        with problems.stage("algorithm.loss", path="algorithm.loss"):
            find_loss(own.loss)
    for name, function in (("algorithm.advantages", own.advantages), ("algorithm.postprocess", own.postprocess)):
        if function:
            with problems.stage(name):
                imported(function, setting=name)


def contradictions(config: Config) -> Iterator[str]:
    """One line for each setting that does not fit the algorithm. The config is settled; its tables may be as written.
    Raises PluginError if the algorithm cannot be loaded."""
    algorithm, spec, sampled = config.algorithm, algorithm_spec(config), config.rollout.samples
    name = f"algorithm.name={algorithm.name!r}"
    given = {role for role in ROLES if getattr(config.roles, role) is not None}
    kinds = role_kinds(config)
    for role, kind in kinds.items():
        if role not in given:
            yield f"roles.{role}: missing, but {name} needs a {role}; add one, such as roles.{role}.ranks=1"
        elif kind is RoleKind.FROZEN and (own := getattr(config.roles, role).train) is not None:
            for each in fields(TrainConfig):
                if getattr(own, each.name) != getattr(own.of_passes(), each.name):
                    yield f"roles.{role}.train.{each.name}: set, but {name} never trains the {role}; remove it"
    if REFERENCE in given:
        yield from _against_reference(config)
    for role in sorted(given - set(kinds)):
        yield f"roles.{role}: set, but {name} uses no {role}; remove it, or choose an algorithm that does"
    if algorithm.old_weights != "current" and not config.run.samples:
        yield (
            f"algorithm.old_weights: {algorithm.old_weights!r}, but run.mode={config.run.mode!r} has no engines; set "
            "it to 'current'"
        )
    if not spec.samples and config.run.samples and config.run.trains:
        yield f"run.mode: {config.run.mode!r} samples, but {name} learns from saved batches; set it to 'train-only'"
    if algorithm.advantages and any(kind is RoleKind.CRITIC for kind in spec.roles.values()):
        yield (
            f"algorithm.advantages: replaces those of {name}, whose other roles read columns of its own; remove it, or "
            "choose an algorithm that trains the actor alone"
        )
    if spec.compares and sampled < 2 and not algorithm.advantages:
        yield (
            "rollout.samples: 1 gives a sample nothing to compare with, so every advantage is 0; use at least 2, or an "
            "algorithm that does not compare the samples of a prompt"
        )
    if config.rollout.source == "streamed":
        yield from _against_streaming(config)
    if algorithm.dynamic_sampling and sampled < 2:
        yield (
            "algorithm.dynamic_sampling: the rewards of a single sample are always all equal; set rollout.samples to "
            "at least 2, or this to 0"
        )
    if algorithm.dynamic_sampling and not (spec.compares and algorithm.kl_in != "reward"):
        yield (
            "algorithm.dynamic_sampling: drops groups of equal rewards, which still teach with "
            f"{name if not spec.compares else 'algorithm.kl_in=' + repr(algorithm.kl_in)}; set it to 0"
        )


def _against_reference(config: Config) -> Iterator[str]:
    """What contradicts a reference policy that is a role."""
    algorithm = config.algorithm
    if not algorithm.kl_coef:
        yield (
            "roles.reference: set, but algorithm.kl_coef=0 measures against no reference policy; set that, or remove "
            "the role"
        )
    if algorithm.reference:
        yield (
            f"algorithm.reference: {algorithm.reference!r}, but the reference policy is a role with a model of its "
            "own; set roles.reference.model.path to it, and remove this"
        )
    if algorithm.reference_every:
        yield (
            f"algorithm.reference_every: {algorithm.reference_every}, but roles.reference is never trained; remove the "
            "role, so that the reference policy is a snapshot of the actor, or remove this"
        )


def _against_streaming(config: Config) -> Iterator[str]:
    """What needs the whole batch before training begins."""
    algorithm = config.algorithm
    others = "set rollout.source to 'synchronous' or 'one-step-off'"
    if not algorithm_spec(config).by_prompt:
        yield (
            f"rollout.source: 'streamed' trains on a prompt's samples before the others are there, but the advantages "
            f"of algorithm.name={algorithm.name!r} come from the whole batch; {others}"
        )
    settings = {
        "algorithm.advantages": algorithm.advantages,
        "algorithm.postprocess": algorithm.postprocess,
        "rollout.postprocess": config.rollout.postprocess,
    }
    for name, function in settings.items():
        if function:
            yield (
                f"{name}: {function!r} reads the whole batch, but rollout.source='streamed' trains on a prompt's "
                f"samples before the others are there; remove it, or {others}"
            )
    if algorithm.routing_replay == "engine" and plays_episodes(config):
        yield (
            "algorithm.routing_replay: 'engine', but a prompt whose episodes draw nothing has no experts, and "
            f"rollout.source='streamed' trains on it before the others are there; set it to 'recompute', or {others}"
        )
    if algorithm.dynamic_sampling:
        yield (
            f"algorithm.dynamic_sampling: {algorithm.dynamic_sampling}, but which prompts are drawn again is known "
            f"once the whole batch is there, and rollout.source='streamed' begins before; set it to 0, or {others}"
        )


def has_several_parts(reward: RewardConfig) -> bool:
    """Whether the config says so: a function may return several without."""
    return len(reward.functions) > 1 or len(reward.weights) > 1


def told_sampling(config: Config) -> Iterator[str]:
    """A line if the policy is trained on tokens that are drawn from fewer than its log-probs are of, and one if what
    dynamic sampling goes by may not be what is meant."""
    rollout, reward, part = config.rollout, config.reward, config.algorithm.dynamic_sampling_on
    if config.algorithm.dynamic_sampling and has_several_parts(reward) and not part:
        yield f"algorithm.dynamic_sampling: {BY_ALL_PARTS}"
    if part and config.run.trains and not config.algorithm.dynamic_sampling:
        yield f"algorithm.dynamic_sampling_on: {part!r}, but algorithm.dynamic_sampling=0 drops no groups"
    cuts = {"top_p": rollout.top_p if rollout.top_p < 1 else None, "top_k": rollout.top_k or None}
    if config.run.trains and (given := [f"rollout.{name}={value:g}" for name, value in cuts.items() if value]):
        yield (
            f"{' and '.join(given)}: only the likeliest tokens are sampled, but log-probs are of all tokens, in "
            "engines and trainer alike; this biases the gradient, which no ratio shows and no correction undoes; leave "
            f"{'it' if len(given) == 1 else 'them'} out to sample from the policy that is trained"
        )


def check_algorithm(config: Config) -> None:
    """Ask the algorithm's spec what contradicts it. Raises ConfigError with one line for each problem. The config is
    settled, its plugins' tables are resolved."""
    loaded = load(Kind.ALGORITHMS, config.algorithm.name)
    run = AlgorithmRun(
        algorithm=config.algorithm, rollout=config.rollout, train=config.train_of(ACTOR), steps=config.run.steps
    )
    check_spec(loaded, config.algorithms[loaded.name], run, config=config)


def _passes(config: Config, algorithm: Algorithm) -> list[ForwardPass]:
    common, passes = config.algorithm, []
    if common.old_logprobs == "recompute":
        columns = {"old_logprobs": Output.LOGPROBS}
        if common.routing_replay == "recompute":
            columns[Output.ROUTED_EXPERTS.value] = Output.ROUTED_EXPERTS
        # Replay the engine's experts if training does: then the first ratio is 1.
        weights = "" if common.old_weights == "current" else common.old_weights
        replay = common.routing_replay == "engine"
        passes.append(ForwardPass(role=ACTOR, columns=columns, weights=weights, replay=replay))
    if common.kl_coef:
        logprobs = {"ref_logprobs": Output.LOGPROBS}
        passes.append(
            ForwardPass(role=ACTOR, columns=logprobs, weights=REFERENCE)
            if config.roles.reference is None
            else ForwardPass(role=REFERENCE, columns=logprobs)
        )
    return [*passes, *(each for each in algorithm.forwards() if each.role in config.chosen_roles)]


def _objectives(config: Config, algorithm: Algorithm) -> dict[str, Objective]:
    common, kinds = config.algorithm, role_kinds(config)
    found = {role: each for role, each in algorithm.objectives().items() if role in config.chosen_roles}
    for role, objective in found.items():
        aggregation = objective.aggregation or common.aggregation or "token-mean"
        loss = objective.loss
        if kinds[role] is RoleKind.POLICY:
            loss = policy_loss(
                loss,
                loss=common.loss,
                entropy_coef=common.entropy_coef,
                kl_coef=common.kl_coef if common.kl_in == "loss" else 0.0,
                kl_estimator=common.kl_estimator or KL_ESTIMATOR["loss"],
            )
        found[role] = evolve(objective, loss=loss, aggregation=aggregation)
    return found
