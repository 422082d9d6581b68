"""What a run takes from its algorithm, and which settings do not fit it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from attrs import evolve, frozen

from corerl.algorithms.base import REFERENCE, Advantages, Algorithm, ForwardPass, Objective
from corerl.config.schema import (
    AlgorithmConfig,
    BackendChoice,
    Config,
    RolesConfig,
    RolloutConfig,
    RunConfig,
    SideRoleChoice,
)
from corerl.errors import ConfigError, PluginBroken
from corerl.plan.algorithm import AlgorithmPlan, against_algorithm, plan_algorithm
from corerl.plan.resolve import plugins_of, resolve_tables, settle_algorithm
from corerl.plugin.spec import AlgorithmRun, AlgorithmSpec, Problem, RoleKind
from corerl.types import FloatArray, LossSpec, Output, SampleBatch
from corerl_algorithms.ppo import Options as OfPPO

GRPO = Config(backend=BackendChoice(name="plain"))
PPO = evolve(
    GRPO,
    algorithm=AlgorithmConfig(name="ppo"),
    roles=RolesConfig(critic=SideRoleChoice()),
    rollout=RolloutConfig(samples=1),
)


@frozen(kw_only=True)
class Options:
    scale: float = 1.0


class FromFiles(Algorithm):
    """Advantages are rewards; it learns from saved batches."""

    def advantages(self, samples: SampleBatch, rewards: FloatArray, token_rewards: FloatArray) -> Advantages:
        return Advantages(advantages=np.repeat(self.options.scale * rewards, samples.lengths))

    def objectives(self) -> Mapping[str, Objective]:
        return {"actor": Objective(loss=LossSpec(name="clipped"), aggregation="sequence-mean", trained_from=2)}


def check(options: Options, run: AlgorithmRun) -> Iterator[Problem]:
    if options.scale > run.steps:
        yield Problem("scale", f"got {options.scale}, above run.steps={run.steps}")
        yield Problem(".algorithm.kl_coef", f"got {run.algorithm.kl_coef}")
        yield Problem(".rollout.samples", f"got {run.rollout.samples}")


SPEC = AlgorithmSpec(
    implementation="tests.plan.test_algorithm:FromFiles",
    config=Options,
    api=(2, 0),
    summary="of a test",
    samples=False,
    defaults={"aggregation": "constant-length", "overlong": "penalty", "dynamic_sampling": 3},
    check=check,
)
NAME = "tests.plan.test_algorithm:SPEC"
MISSPELT = {"actor": Objective(loss=LossSpec(name="clipped", params={"clip_hihg": 0.3}))}


def changed(config: Config, **algorithm: Any) -> Config:
    return evolve(config, algorithm=evolve(config.algorithm, **algorithm))


def planned(config: Config) -> AlgorithmPlan:
    return plan_algorithm(config, plugins_of(config))


def lines(config: Config, **algorithm: Any) -> list[str]:
    if algorithm:
        config = evolve(config, algorithm=AlgorithmConfig(**{"name": config.algorithm.name, **algorithm}))
    return list(against_algorithm(settle_algorithm(config), plugins_of(config)))


def test_an_algorithm_that_learns_from_files_does_not_sample() -> None:
    config = evolve(GRPO, algorithm=AlgorithmConfig(name=NAME, dynamic_sampling=0))
    assert lines(config) == [
        f"run.mode: 'train' samples, but algorithm.name={NAME!r} learns from saved batches; set it to 'train-only'"
    ]
    assert lines(evolve(config, run=RunConfig(mode="train-only"))) == []


def test_each_role_is_trained_on_its_own_loss() -> None:
    options = OfPPO(clip_low=0.1, clip_high=0.3, value_clip=0.5, warmup_steps=7)
    common = AlgorithmConfig(name="ppo", entropy_coef=0.02, aggregation="sequence-mean")
    found = planned(evolve(PPO, algorithm=common, algorithms={"ppo": options})).objectives
    assert list(found) == ["actor", "critic"]
    assert found["actor"] == Objective(
        loss=LossSpec(
            name="clipped",
            params={
                "clip_low": 0.1,
                "clip_high": 0.3,
                "dual_clip": 0.0,
                "entropy_coef": 0.02,
                "kl_coef": 0.0,
                "kl_estimator": "k3",
            },
            outputs=(Output.LOGPROBS, Output.ENTROPY),
        ),
        aggregation="sequence-mean",
        trained_from=7,
    )
    assert found["critic"] == Objective(
        loss=LossSpec(name="value", params={"value_clip": 0.5}, outputs=(Output.VALUES,)), aggregation="token-mean"
    )


def test_a_step_has_the_passes_whose_columns_it_reads() -> None:
    def passes(config: Config) -> list[tuple[Any, ...]]:
        found = planned(resolve_tables(config)).passes
        return [(each.role, dict(each.columns), each.snapshot, each.replay) for each in found]

    assert passes(GRPO) == []
    values = ("critic", {"values": Output.VALUES}, "", False)
    assert passes(PPO) == [values]
    common = AlgorithmConfig(name="ppo", old_logprobs="recompute", kl_coef=0.1, routing_replay="recompute")
    recomputed = {"old_logprobs": Output.LOGPROBS, "routed_experts": Output.ROUTED_EXPERTS}
    assert passes(evolve(PPO, algorithm=common)) == [
        ("actor", recomputed, "", False),
        ("actor", {"ref_logprobs": Output.LOGPROBS}, REFERENCE, False),
        values,
    ]
    replayed = AlgorithmConfig(old_logprobs="recompute", routing_replay="engine")
    assert passes(evolve(GRPO, algorithm=replayed)) == [("actor", {"old_logprobs": Output.LOGPROBS}, "", True)]
    assert passes(evolve(PPO, run=RunConfig(mode="rollout-only"))) == []  # the critic has no ranks


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        (
            {"roles": {"actor": RoleKind.POLICY, "judge": RoleKind.FROZEN}},
            "wants the role 'judge'; a run has actor, critic, teacher",
        ),
        ({"roles": {"critic": RoleKind.CRITIC}}, "has no role 'actor', but every run trains one"),
        ({"roles": {"actor": RoleKind.FROZEN}}, "freezes its role 'actor', but every run trains one"),
        (
            {"defaults": {"agregation": "token-mean"}},
            "sets algorithm.agregation, which is never unset; it can",
        ),
        ({"defaults": {"kl_coef": 0.1}}, "sets algorithm.kl_coef, which is never unset"),
        ({"defaults": {"aggregation": "tokenmean"}}, "has an invalid default: algorithm.aggregation: expected"),
    ],
)
def test_a_spec_that_no_run_could_follow_is_refused(
    fields: dict[str, Any], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.plan.test_algorithm.SPEC", evolve(SPEC, **fields))
    with pytest.raises(PluginBroken, match=f"^algorithm {NAME!r} {line}"):
        settle_algorithm(evolve(GRPO, algorithm=AlgorithmConfig(name=NAME)))


@pytest.mark.parametrize(
    ("method", "value", "line"),
    [
        (
            "objectives",
            lambda self: {},
            "objectives() names the roles none, wanted those of its spec that are not frozen, actor",
        ),
        (
            "forwards",
            lambda self: [ForwardPass(role="critc", columns={})],
            "forwards() names the role 'critc'; its",
        ),
        (
            "forwards",
            lambda self: [ForwardPass(role="actor", columns={}, snapshot="oldest")],
            "under the weights 'oldest'; there are those of the reference, of the actor",
        ),
        ("__init__", lambda self, options: 1 / 0, "FromFiles raised ZeroDivisionError: division by zero"),
        ("objectives", lambda self: MISSPELT, "unexpected keyword argument 'clip_hihg'"),
    ],
)
def test_an_algorithm_that_contradicts_its_spec_is_refused(
    method: str, value: Any, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FromFiles, method, value)
    config = resolve_tables(settle_algorithm(evolve(GRPO, algorithm=AlgorithmConfig(name=NAME))))
    with pytest.raises((PluginBroken, ConfigError)) as caught:
        planned(config)
    assert line in caught.value.message


# ---- a reference policy that is a role, and steps that begin before their batch is whole -----------------------------


def test_a_reference_role_is_passed_through_as_itself() -> None:
    roles = evolve(GRPO.roles, reference=SideRoleChoice())
    apart = evolve(GRPO, roles=roles)
    assert lines(apart, kl_coef=0.1) == []

    def reference_of(config: Config) -> tuple[str, str]:
        settled = settle_algorithm(evolve(config, algorithm=AlgorithmConfig(kl_coef=0.1)))
        (each,) = (each for each in planned(resolve_tables(settled)).passes if "ref_logprobs" in each.columns)
        return each.role, each.snapshot

    assert reference_of(apart) == ("reference", "")
    assert reference_of(GRPO) == ("actor", "reference")


def test_a_kl_in_the_reward_is_of_log_probs_of_the_trainer() -> None:
    def columns(place: Any) -> set[str]:
        config = resolve_tables(settle_algorithm(changed(GRPO, kl_coef=0.1, kl_in=place)))
        return {column for each in planned(config).passes for column in each.columns}

    assert columns("loss") == {"ref_logprobs"}
    assert columns("reward") == {"old_logprobs", "ref_logprobs"}


STREAMED = evolve(GRPO, rollout=RolloutConfig(source="streamed"))


@pytest.mark.parametrize("name", ["grpo", "dr-grpo", "gspo", "gspo-token", "cispo", "rloo"])
def test_advantages_of_a_prompt_of_its_own_may_be_streamed(name: str) -> None:
    assert lines(STREAMED, name=name) == []
