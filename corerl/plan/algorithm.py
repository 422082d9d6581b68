"""A run's algorithm: whether the rest of the config fits it, its forward passes, and what each role is trained on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from attrs import evolve, fields, frozen

from corerl.algorithms.base import REFERENCE, Advantages, Algorithm, Estimate, ForwardPass, Objective, Postprocess
from corerl.algorithms.registry import policy_loss, users_estimate, users_postprocess
from corerl.config.schema import KL_ESTIMATOR, AlgorithmConfig, Config, SideRoleChoice, TrainConfig
from corerl.errors import ContractError, PluginBroken
from corerl.messages import one_line
from corerl.plan.check import Problems
from corerl.plan.resolve import ROLES, Plugins, check_spec
from corerl.plan.roles import CLIPPED
from corerl.plugin.registry import Kind, Loaded, load_implementation
from corerl.plugin.spec import ACTOR, AlgorithmRun, RoleKind
from corerl.types import FloatArray, Output, SampleBatch


@frozen(kw_only=True)
class AlgorithmPlan:
    """What a run needs to know of its algorithm."""

    settings: AlgorithmConfig  # settled: nothing is left open
    estimate: Estimate  # its advantages, or the user's
    passes: tuple[ForwardPass, ...]  # of a step, before any training
    # Of each role of the run that is trained, with the terms of the loss that `[algorithm]` sets.
    objectives: Mapping[str, Objective]
    postprocess: Postprocess | None  # the user's, of the samples with their advantages
    credits_turns: bool = False  # as in the spec; a user's function finds them in the samples

    def snapshots(self, role: str) -> dict[str, str]:
        """The earlier weights of a role that passes ask for, with the setting that wants them."""
        settings, name = self.settings, f"algorithm.name = {self.settings.name!r}"
        wanted = {each.snapshot: name for each in self.passes if each.snapshot and each.role == role}
        if settings.kl_coef and REFERENCE in wanted:
            wanted[REFERENCE] = f"algorithm.kl_coef = {settings.kl_coef} (its reference is a snapshot)"
        return wanted


def _never(samples: SampleBatch, rewards: FloatArray, token_rewards: FloatArray) -> Advantages:
    raise ContractError("a run that only scores has no advantages")


def plan_algorithm(config: Config, plugins: Plugins) -> AlgorithmPlan:
    """The plan of a settled config whose plugins' tables are resolved. Raises all problems together: a loss that there
    is not, functions that cannot be imported."""
    own, loaded = config.algorithm, plugins.algorithm
    if loaded is None:
        return AlgorithmPlan(settings=own, estimate=_never, postprocess=None, passes=(), objectives={ACTOR: CLIPPED})
    algorithm = _construct(loaded, config.algorithms[loaded.name])
    estimate: Estimate = algorithm.advantages
    postprocess: Postprocess | None = None
    problems = Problems()
    with problems.stage("algorithm.loss" if own.loss else "algorithm.name"):
        objectives = _objectives(config, algorithm, plugins.kinds)
    if own.advantages:
        with problems.stage():
            estimate = users_estimate(own.advantages)
    if own.postprocess:
        with problems.stage():
            postprocess = users_postprocess(own.postprocess)
    problems.raise_all()
    return AlgorithmPlan(
        settings=own,
        estimate=estimate,
        postprocess=postprocess,
        passes=tuple(_passes(config, algorithm)),
        objectives=objectives,
        credits_turns=loaded.spec.credits_turns and not own.advantages,
    )


def _construct(loaded: Loaded, options: Any) -> Algorithm:
    """The algorithm. Raises PluginBroken if it is not what its spec says."""
    implementation: type[Algorithm] = load_implementation(Kind.ALGORITHMS, loaded)
    try:
        algorithm = implementation(options)
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
        if each.snapshot and (each.role != ACTOR or each.snapshot != REFERENCE):
            raise PluginBroken(
                f"algorithm {loaded}: forwards() passes the samples through the {each.role} under the weights "
                f"{each.snapshot!r}; there are those of the {REFERENCE}, of the {ACTOR}"
            )
    return algorithm


def against_algorithm(config: Config, plugins: Plugins) -> Iterator[str]:
    """One line for each setting of a settled config that does not fit the algorithm."""
    if plugins.algorithm is None:
        return
    algorithm, spec, kinds = config.algorithm, plugins.algorithm.spec, plugins.kinds
    name = f"algorithm.name={algorithm.name!r}"
    given = {role for role in ROLES if getattr(config.roles, role) is not None}
    for role, kind in kinds.items():
        if role not in given:
            yield f"roles.{role}: missing, but {name} needs a {role}; add one, such as roles.{role}.ranks=1"
        elif kind is RoleKind.FROZEN:
            yield from _trained_in_vain(role, getattr(config.roles, role))
    for role in sorted(given - set(kinds)):
        yield f"roles.{role}: set, but {name} uses no {role}; remove it, or choose an algorithm that does"
    if not spec.samples and config.run.has_engines and config.run.trains:
        yield f"run.mode: {config.run.mode!r} samples, but {name} learns from saved batches; set it to 'train-only'"
    if algorithm.advantages and any(kind is RoleKind.CRITIC for kind in spec.roles.values()):
        yield f"algorithm.advantages: replaces those of {name}, which its critic trains on; remove it"
    alone = config.rollout.samples < 2
    if spec.compares and alone and not algorithm.advantages:
        yield f"rollout.samples: 1 gives a sample nothing to compare with, as {name} does; use at least 2"
    if algorithm.dynamic_sampling and (alone or not spec.compares):
        why = "the rewards of a single sample are always equal" if alone else f"with {name} equal rewards teach too"
        yield f"algorithm.dynamic_sampling: drops groups of equal rewards, but {why}; set it to 0"
    if config.rollout.source == "streamed":  # training begins before the whole batch is there
        others = "set rollout.source to 'synchronous' or 'one-step-off'"
        if not spec.by_prompt:
            yield f"rollout.source: 'streamed', but the advantages of {name} need the whole batch; {others}"
        if algorithm.routing_replay == "engine" and plugins.sampler.spec.episodes:
            yield (
                "algorithm.routing_replay: 'engine', but episodes may sample nothing, and then have no experts as "
                f"rollout.source='streamed' begins; set it to 'recompute', or {others}"
            )


def _trained_in_vain(role: str, frozen: SideRoleChoice) -> Iterator[str]:
    """What a role that is never trained has been given for training."""
    if (train := frozen.train) is not None:
        for each in fields(TrainConfig):
            if getattr(train, each.name) != getattr(train.of_passes(), each.name):
                yield f"roles.{role}.train.{each.name}: set, but the {role} is never trained; remove it"
    if frozen.lora is not None:
        yield f"roles.{role}.lora: set, but the {role} is never trained; remove it"


def check_algorithm(config: Config, loaded: Loaded) -> None:
    """Ask the algorithm's spec what contradicts it. Raises ConfigError with one line for each problem. The config is
    settled, its plugins' tables are resolved."""
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
        replay = common.routing_replay == "engine"
        passes.append(ForwardPass(role=ACTOR, columns=columns, replay=replay))
    if common.kl_coef:
        logprobs = {"ref_logprobs": Output.LOGPROBS}
        passes.append(
            ForwardPass(role=ACTOR, columns=logprobs, snapshot=REFERENCE)
            if config.roles.reference is None
            else ForwardPass(role=REFERENCE, columns=logprobs)
        )
    return [*passes, *(each for each in algorithm.forwards() if each.role in config.chosen_roles)]


def _objectives(config: Config, algorithm: Algorithm, kinds: Mapping[str, RoleKind]) -> dict[str, Objective]:
    common = config.algorithm
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
