"""What may change while a run goes on, and the plan of the sizes that it then has."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from corerl.config import Config, dump_toml
from corerl.errors import ConfigError
from corerl_elastic.sizes import resized, with_other_sizes
from corerl_testing import make_plan
from tests.driver.saved import CRITIC, config_in, make_config

FSDP = {"backend": {"name": "fsdp"}}
DO = (
    "does not change while a run goes on; roles.ROLE.ranks, .backend and .options, backend.name, [backends.NAME] and "
    "rollout.replicas do"
)


def plain(config: Config) -> dict[str, Any]:
    return tomllib.loads(dump_toml(config))


def refused(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        with_other_sizes(make_config(), overrides)
    return caught.value.message.splitlines()


@pytest.mark.parametrize(
    ("override", "keys", "value"),
    [
        ("roles.actor.ranks=4", ("roles", "actor", "ranks"), 4),
        (" roles.actor.ranks = 4", ("roles", "actor", "ranks"), 4),
        ("roles.actor.backend=megatron", ("roles", "actor", "backend"), "megatron"),
        ("roles.actor.options.tensor_parallel=2", ("roles", "actor", "options"), {"tensor_parallel": 2}),
        ("roles.actor.options={tensor_parallel = 2}", ("roles", "actor", "options"), {"tensor_parallel": 2}),
        ("roles.critic.ranks=2", ("roles", "critic", "ranks"), 2),
        ("backend.name=deepspeed", ("backend", "name"), "deepspeed"),
        ("backends.megatron.tensor_parallel=2", ("backends", "megatron"), {"tensor_parallel": 2}),
        ('backends."my.own:SPEC".shards=2', ("backends", "my.own:SPEC"), {"shards": 2}),
        ("rollout.replicas=3", ("rollout", "replicas"), 3),
    ],
)
def test_sizes_layouts_and_backends_of_groups_may_change(override: str, keys: tuple[str, ...], value: object) -> None:
    config = make_config(**CRITIC)
    found, expected = plain(with_other_sizes(config, [override])), plain(config)
    table = expected
    for key in keys[:-1]:
        table = table[key]
    table[keys[-1]] = value
    assert found == expected


def test_settings_other_than_sizes_do_not_change() -> None:
    assert refused("train.optimizer.lr=4") == [f"train.optimizer.lr: {DO}"]
    assert refused("rollout.prompts=3", "rollout.replicas=2", "roles.actor.train.precision=float32") == [
        f"rollout.prompts: {DO}",
        f"roles.actor.train.precision: {DO}",
    ]


def test_other_sizes_are_checked_in_a_used_directory(tmp_path: Path) -> None:
    plan = make_plan(config_in(tmp_path / "run", **FSDP))
    (tmp_path / "run" / "checkpoints" / "step-00000001").mkdir(parents=True)
    (tmp_path / "run" / "config.toml").write_text("# of the run that asks")
    assert len(resized(plan, ["roles.actor.ranks=2"]).processes.roles["actor"].assignments) == 2
    with pytest.raises(ConfigError) as caught:
        resized(plan, ["roles.actor.ranks=3", "backends.fsdp.shard_sise=2"])
    assert caught.value.message == "backends.fsdp.shard_sise: unknown key; did you mean 'shard_size'?"
    with pytest.raises(ConfigError, match="do not divide evenly over roles.actor.ranks=3"):
        resized(plan, ["roles.actor.ranks=3"])
