"""A config meets the plugins that it names: tables become classes, and what cannot run is said at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from corerl.config.schema import (
    BackendChoice,
    ClusterInfo,
    Config,
    ModelConfig,
    RolesConfig,
    SideRoleChoice,
    TrainConfig,
)
from corerl.errors import ConfigError, PluginBroken
from corerl.plan.resolve import check_spec, resolve_tables, role_options
from corerl.plugin.registry import Kind, load
from corerl.plugin.spec import Problem

Install = Callable[..., Path]


@pytest.fixture
def plugins(install: Install, backend_spec: str, extension_spec: str) -> None:
    install("corerl-mine", {"backends": {"mine": "mine_o:SPEC"}}, mine_o=backend_spec)
    install("corerl-other", {"backends": {"other": "other_o:SPEC"}}, other_o=backend_spec)
    engine = backend_spec.replace("BackendSpec", "EngineSpec")
    start, end = engine.index("    capabilities="), engine.index("    check=")
    install("corerl-engine", {"engines": {"quick": "quick_o:SPEC"}}, quick_o=engine[:start] + engine[end:])
    install("corerl-wrap", {"extensions": {"wrap": "wrap_o:SPEC"}}, wrap_o=extension_spec)


def config(**changes: Any) -> Config:
    base = Config(backend=BackendChoice(name="mine"), extensions=())
    base = evolve(base, rollout=evolve(base.rollout, engine="quick"))
    return evolve(base, **changes)


@pytest.mark.usefixtures("plugins")
def test_a_roles_own_table_replaces_the_backends() -> None:
    critic = SideRoleChoice(options={"shards": 7})
    given = resolve_tables(config(roles=RolesConfig(critic=critic), backends={"mine": {"shards": 2}}))
    mine = load(Kind.BACKENDS, "mine")
    found = [role_options(given, role, mine) for role in ("actor", "critic")]
    assert found == [mine.spec.config(shards=2), mine.spec.config(shards=7)]
    assert resolve_tables(given) == given
    cluster, bad = ClusterInfo(device="cpu", ranks=1), mine.spec.config(shards=3)
    given = evolve(given, roles=evolve(given.roles, critic=evolve(critic, options=bad)))
    with pytest.raises(ConfigError, match="^roles.critic.options.shards: 3 is more than 1 ranks$"):
        check_spec(mine, bad, cluster, config=given, role="critic")


@pytest.mark.usefixtures("plugins")
def test_a_spec_whose_check_fails_is_broken_by_name() -> None:
    loaded = load(Kind.BACKENDS, "mine")
    broken = evolve(loaded, spec=evolve(loaded.spec, check=lambda options, cluster: {}["missing"]))
    with pytest.raises(PluginBroken, match=r"^backend 'mine' \(.*\) cannot check its options: KeyError: "):
        check_spec(broken, loaded.spec.config(), ClusterInfo(device="cpu", ranks=1), config=config())


@pytest.mark.usefixtures("plugins")
def test_problems_of_model_and_train_name_their_tables() -> None:
    paths = ["", "a.b", ".model", ".model.head_dim", ".train", ".train.optimizer.lr"]

    def told(given: Config, role: str = "actor") -> list[str]:
        mine = load(Kind.BACKENDS, "mine")
        spec = evolve(mine.spec, check=lambda options, cluster: [Problem(path, "wrong") for path in paths])
        with pytest.raises(ConfigError) as caught:
            check_spec(
                evolve(mine, spec=spec), mine.spec.config(), ClusterInfo(device="cpu", ranks=1), config=given, role=role
            )
        return [line.removesuffix(": wrong") for line in caught.value.message.splitlines()]

    own = ["backends.mine", "backends.mine.a.b"]
    common = ["model.config", "model.config.head_dim", "train", "train.optimizer.lr"]
    assert told(config()) == [*own, *common]
    assert told(config(model=ModelConfig(path="m"))) == [
        *own,
        "model.path",
        "model.path: head_dim in its config.json",
        "train",
        "train.optimizer.lr",
    ]
    critic = SideRoleChoice(model=ModelConfig(path="v"), train=TrainConfig())
    assert told(config(roles=RolesConfig(critic=critic)), "critic") == [
        *own,
        "roles.critic.model.path",
        "roles.critic.model.path: head_dim in its config.json",
        "roles.critic.train",
        "roles.critic.train.optimizer.lr",
    ]
    assert told(config(roles=RolesConfig(critic=SideRoleChoice())), "critic") == [*own, *common]
