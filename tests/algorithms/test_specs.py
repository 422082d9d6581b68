"""What each algorithm declares for a run, and what its options change; `test_enumeration` has the formulas."""

from __future__ import annotations

import pytest

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


@pytest.mark.parametrize("name", DECLARED)
def test_an_algorithm_has_its_papers_settings(name: str) -> None:
    settings, loss = planned(name).settings, planned(name).objectives[ACTOR].loss
    bounds = (loss.params["clip_low"], loss.params["clip_high"])
    found = (settings.aggregation, settings.dynamic_sampling, settings.overlong, loss.name, *bounds)
    assert found == DECLARED[name]


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
