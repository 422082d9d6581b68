"""Properties of an algorithm that can be checked before it computes anything: its spec, and what it asks of a run."""

from __future__ import annotations

import attrs

from corerl.algorithms import ACTOR, Algorithm, ForwardPass, Objective, RoleKind
from corerl.algorithms.base import REFERENCE
from corerl.config import structure
from corerl.config.schema import AlgorithmConfig
from corerl.data.packing import AGGREGATIONS
from corerl.plan.algorithm import against_algorithm, check_algorithm
from corerl.plan.resolve import plugins_of
from corerl.plugin import Kind, load_implementation
from corerl.types import Output
from corerl_testing.marks import algorithm_check as check
from corerl_testing.spec_checks import (
    assert_frozen_and_explained,
    assert_imports_nothing_heavy,
    assert_introduces_itself,
    assert_refuses_what_is_wrong,
    assert_survives_json,
)
from corerl_testing.trial import Trial

OF_CORE = {"loss_mask", "rollout_logprobs", "versions", "advantages", "weights", "ref_logprobs"}  # which no pass fills
UNSET = {field.name for field in attrs.fields(AlgorithmConfig) if field.default is None}
WANTED = {RoleKind.POLICY: Output.LOGPROBS, RoleKind.CRITIC: Output.VALUES}


@check("A01", level=0)
def test_the_algorithms_spec_imports_neither_torch_nor_ray(algorithm_name: str) -> None:
    assert_imports_nothing_heavy(Kind.ALGORITHMS, algorithm_name)


@check("A02", level=0)
def test_the_algorithms_spec_has_this_api_and_a_complete_class(trial: Trial) -> None:
    assert_introduces_itself(trial.loaded)
    cls = load_implementation(Kind.ALGORITHMS, trial.loaded)
    assert isinstance(cls, type) and issubclass(cls, Algorithm), (
        f"{trial.spec.implementation} is {cls!r}, expected a class derived from corerl.algorithms.base.Algorithm"
    )
    unwritten = sorted(getattr(cls, "__abstractmethods__", ()))
    assert unwritten == [], "these methods have no default; implement them"


@check("A03", level=0, builds_on=["A02"])
def test_the_algorithms_options_are_frozen_have_defaults_and_are_explained(trial: Trial) -> None:
    assert_frozen_and_explained(trial.spec.config)


@check("A04", level=0, builds_on=["A03"])
def test_the_algorithms_options_survive_json_and_refuse_what_is_wrong(trial: Trial) -> None:
    assert_survives_json(trial.spec.config)
    assert_refuses_what_is_wrong(trial.spec.config)


@check("A05", level=0, builds_on=["A02", "A03"])
def test_roles_objectives_passes_and_defaults_fit_together(trial: Trial) -> None:
    spec = trial.spec
    assert spec.roles.get(ACTOR) is RoleKind.POLICY, (
        f"the spec's roles are {dict(spec.roles)}, expected {ACTOR!r} among them, a {RoleKind.POLICY}"
    )
    for name, value in spec.defaults.items():
        assert name in UNSET, (
            f"the spec's defaults name {name!r}, which is never unset; use some of {', '.join(sorted(UNSET))}"
        )
        structure({name: value}, AlgorithmConfig, path="the spec's defaults")
    found = list(against_algorithm(trial.config, plugins_of(trial.config)))
    assert found == [], "a config of nothing but the algorithm and its roles is refused; change the spec's defaults"
    check_algorithm(trial.config, trial.loaded)

    algorithm = load_implementation(Kind.ALGORITHMS, trial.loaded)(trial.config.algorithms[trial.loaded.name])
    objectives, passes = algorithm.objectives(), algorithm.forwards()
    trained = [role for role, kind in spec.roles.items() if kind is not RoleKind.FROZEN]
    assert sorted(objectives) == sorted(trained), (
        f"objectives() has {sorted(objectives)}, expected {sorted(trained)}, the spec's roles that are not frozen; "
        "name each in both"
    )
    unasked = sorted(spec.roles.keys() - set(trained) - {each.role for each in passes})
    assert not unasked, f"no pass of forwards() asks the {', '.join(unasked)}, which is frozen; add one, or remove it"
    for role, objective in objectives.items():
        assert isinstance(objective, Objective), f"the objective of the {role} is {objective!r}; make it an Objective"
        assert objective.aggregation in ("", *AGGREGATIONS), (
            f"the {role}'s aggregation is {objective.aggregation!r}; use one of {', '.join(AGGREGATIONS)}, or ''"
        )
        assert objective.trained_from >= 0, (
            f"the {role}'s first step is {objective.trained_from}; count rollout steps from 0"
        )
        wanted = WANTED[spec.roles[role]]
        assert wanted in trial.plan.objectives[role].loss.outputs, (
            f"the loss of the {role}, a {spec.roles[role]}, asks for {objective.loss.outputs}; add {wanted!r} to "
            "LossSpec.outputs"
        )
    for each in passes:
        assert isinstance(each, ForwardPass) and each.role in spec.roles, (
            f"forwards() names the role {each.role!r}; its spec has {', '.join(spec.roles)}"
        )
        assert not each.snapshot or (each.role, each.snapshot) == (ACTOR, REFERENCE), (
            f"a pass of the {each.role} is under the weights {each.snapshot!r}; there are those of the {REFERENCE}, of "
            f"the {ACTOR}"
        )
        assert not each.columns.keys() & OF_CORE and all(isinstance(of, Output) for of in each.columns.values()), (
            f"a pass of the {each.role} fills {dict(each.columns)}; use names that core has not, and members of Output"
        )
