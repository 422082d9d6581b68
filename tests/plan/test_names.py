"""Which names are told to be wrong where no more of a config can be checked."""

import sys

from corerl.config.load import config_of
from corerl.plan.names import wrong_names


def test_names_of_plugins_and_rewards_are_looked_up_without_importing_them() -> None:
    config = config_of(
        {
            "backend": {"name": "no.such.module:SPEC"},  # may be one, which only its import tells
            "roles": {"actor": {"backend": "plian"}},
            "rollout": {"engine": "fake"},
            "extensions": [{"name": ""}, {"name": "jsonnl"}],
            "reward": {"functions": [{"name": "exact-match"}, {"name": "no_such_module:f"}, {"name": "exakt-match"}]},
        }
    )
    assert [line.partition(";")[0] for line in wrong_names(config)] == [
        "roles.actor.backend: unknown backend 'plian'",
        "extensions[1].name: unknown extension 'jsonnl'",
        "reward.functions[2].name: unknown reward 'exakt-match'",
    ]
    assert "no" not in sys.modules


def test_a_run_that_only_scores_needs_no_algorithm() -> None:
    config = {"backend": {"name": "plain"}, "algorithm": {"name": "grp"}}
    assert [line.partition(";")[0] for line in wrong_names(config_of(config))] == [
        "algorithm.name: unknown algorithm 'grp'"
    ]
    assert list(wrong_names(config_of({**config, "run": {"mode": "eval"}}))) == []
