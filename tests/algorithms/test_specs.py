"""What each algorithm declares for a run, and what its options change; `test_enumeration` has the formulas."""

from __future__ import annotations

import pytest

from corerl.plugin.registry import Kind, load, scan
from corerl.plugin.spec import ACTOR
from tests.algorithms.enumeration import planned

GSPO, CISPO = "corerl_algorithms.gspo:gspo", "corerl_algorithms.cispo:cispo"
# The weights of tokens, dynamic sampling, what overlong samples get; the loss, and its bounds below and above.
DECLARED = {
    "grpo": ("token-mean", 0, "keep", "clipped", 0.2, 0.2),
    "dr-grpo": ("constant-length", 0, "keep", "clipped", 0.2, 0.2),
    "dapo": ("token-mean", 10, "penalty", "clipped", 0.2, 0.28),
    "gspo": ("sequence-mean", 0, "keep", GSPO, 3e-4, 4e-4),
    "gspo-token": ("sequence-mean", 0, "keep", f"{GSPO}_token", 3e-4, 4e-4),
    "cispo": ("token-mean", 0, "keep", CISPO, 1.0, 4.0),
    "rloo": ("token-mean", 0, "keep", "clipped", 0.2, 0.2),
    "reinforce++": ("token-mean", 0, "keep", "clipped", 0.2, 0.2),
    "reinforce++-baseline": ("token-mean", 0, "keep", "clipped", 0.2, 0.2),
    "ppo": ("token-mean", 0, "keep", "clipped", 0.2, 0.2),
    "distill": ("token-mean", 0, "keep", "clipped", 0.2, 0.2),
}


def test_every_algorithm_of_core_and_its_wheel_is_listed_here() -> None:
    found = {each.name: each.distribution for each in scan(Kind.ALGORITHMS)}
    assert {name for name, wheel in found.items() if wheel == "corerl"} == {"grpo", "ppo"}
    assert DECLARED.keys() == {name for name, wheel in found.items() if wheel in ("corerl", "corerl-algorithms")}


@pytest.mark.parametrize("name", DECLARED)
def test_an_algorithm_has_its_papers_settings(name: str) -> None:
    settings, loss = planned(name).settings, planned(name).objectives[ACTOR].loss
    bounds = (loss.params["clip_low"], loss.params["clip_high"])
    found = (settings.aggregation, settings.dynamic_sampling, settings.overlong, loss.name, *bounds)
    assert found == DECLARED[name]


def test_what_an_algorithm_compares_is_what_its_advantages_need() -> None:
    specs = {name: load(Kind.ALGORITHMS, name).spec for name in DECLARED}
    over_the_batch = {"reinforce++", "reinforce++-baseline", "ppo"}
    assert {name for name, spec in specs.items() if not spec.by_prompt} == over_the_batch
    assert {name for name, spec in specs.items() if not spec.compares} == over_the_batch | {"distill"}


@pytest.mark.parametrize("name", DECLARED)
def test_options_reach_the_loss_and_settings_win_over_defaults(name: str) -> None:
    own = (f'algorithms."{name}".clip_low=0.125', f'algorithms."{name}".clip_high=0.35')
    plan = planned(name, *own, "algorithm.aggregation=token-mean", "algorithm.overlong=keep")
    params = plan.objectives[ACTOR].loss.params
    assert (params["clip_low"], params["clip_high"]) == (0.125, 0.35)
    assert (plan.settings.aggregation, plan.settings.overlong, plan.settings.overlong_buffer) == (
        "token-mean",
        "keep",
        0,
    )


def test_a_fifth_of_the_longest_response_is_dapos_buffer() -> None:
    assert planned("dapo", "rollout.max_tokens=20480").settings.overlong_buffer == 4096  # as in section 4.1


def test_ppos_further_options_reach_both_losses() -> None:
    own = ("dual_clip=1.5", "value_clip=0.5", "warmup_steps=5")
    found = planned("ppo", *(f"algorithms.ppo.{each}" for each in own)).objectives
    assert (found[ACTOR].loss.params["dual_clip"], found[ACTOR].first_step) == (1.5, 5)
    assert (found["critic"].loss.params["value_clip"], found["critic"].first_step) == (0.5, 0)
