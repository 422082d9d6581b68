"""What each rank is told, and what is refused before there are any ranks."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from corerl.checkpoint.format import index_file
from corerl.config.schema import (
    AlgorithmConfig,
    CheckpointConfig,
    ClusterConfig,
    ClusterInfo,
    Config,
    ModelConfig,
    RolesConfig,
    RunConfig,
    SideRoleChoice,
    TrainConfig,
    WeightsConfig,
)
from corerl.errors import Unsupported
from corerl.plan.algorithm import AlgorithmPlan, plan_algorithm
from corerl.plan.models import RoleModel
from corerl.plan.residency import offloaded
from corerl.plan.resolve import plugins_of, resolve_tables
from corerl.plan.roles import RolePlan, needed, plan_role
from corerl.plugin.capabilities import Capability
from tests.trainer.configs import FAKE, config_for

LIMITED = "tests.trainer.fakes:LIMITED"


def planned(
    config: Config,
    resume: str = "",
    *,
    role: str = "actor",
    model: RoleModel | None = None,
    algorithm: AlgorithmPlan | None = None,
) -> RolePlan:
    return plan_role(
        role,
        config,
        plugins_of(config),
        device="cpu",
        run_dir="runs/x",
        resume=resume,
        model=model,
        algorithm=algorithm,
    )


def algorithm_of(config: Config) -> AlgorithmPlan:
    return plan_algorithm(resolve_tables(config), plugins_of(config))


def saved_by(ranks: int, directory: Path) -> str:
    """A role's part of a checkpoint, as far as planning looks at it."""
    for rank in range(ranks):
        (directory / index_file(rank)).touch()
    return str(directory)


def test_every_rank_is_told_the_same_but_for_its_rank(tmp_path: Path) -> None:
    config = config_for(
        ranks=3,
        options={"shards": 3},
        run=RunConfig(seed=5),
        model=ModelConfig(path="models/m"),
        cluster=ClusterConfig(timeout=9.0),
        train=TrainConfig(tokens_per_micro_batch=77),
    )
    saved = saved_by(3, tmp_path)
    plan = planned(config, resume=saved)
    assert [assignment.context.rank for assignment in plan.assignments] == [0, 1, 2]
    first = plan.assignments[0]
    assert all(evolve(each, context=first.context) == first for each in plan.assignments)
    assert (first.context.role, first.context.world_size, first.context.run_dir) == ("actor", 3, "runs/x")
    assert first.backend == FAKE
    role = first.config
    assert role.options == {"shards": 3}  # a plain table
    assert role.model.path == "models/m"
    assert role.train.tokens_per_micro_batch == 77
    assert (role.device, role.seed, role.timeout, role.resume) == ("cpu", 5, 9.0, saved)
    assert plan.environment == {"FAKE_SHARDS": "3 of 3 on cpu"}
    assert plan.data_parallel == 1
    assert pickle.loads(pickle.dumps(plan.assignments)) == plan.assignments


def test_every_missing_capability_has_its_line_and_reason() -> None:
    config = config_for(LIMITED, algorithm=AlgorithmConfig(kl_coef=0.01))
    with pytest.raises(Unsupported) as caught:
        planned(config, algorithm=algorithm_of(config))
    assert caught.value.message.splitlines() == [
        (
            f"roles.actor.ranks = 2 requires 'multi-rank', which the backend '{LIMITED}' does not support: it is one "
            "process; change that setting, or choose another backend"
        ),
        (
            "algorithm.kl_coef = 0.01 (its reference is a snapshot) requires 'snapshots', which the backend "
            f"'{LIMITED}' does not support yet: no host copies yet; change that setting, or choose another backend"
        ),
    ]
    assert len(planned(config_for(LIMITED, ranks=1)).assignments) == 1


CPU, CUDA = ClusterInfo(device="cpu", ranks=1), ClusterInfo(device="cuda", ranks=4)
PLAIN_RUN = {Capability.SAVE_BACKGROUND, Capability.UPDATE_IPC}


def needs(config: Config, cluster: ClusterInfo, role: str = "actor") -> set[Capability]:
    snapshots = algorithm_of(config).snapshots(role) if config.run.trains else {}
    return set(needed(role, config, plugins_of(config), cluster, saved_ranks=cluster.ranks, snapshots=snapshots))


def test_a_run_needs_what_its_settings_use_and_no_more() -> None:
    config = evolve(config_for(), weights=WeightsConfig(transport="ipc"))  # as `auto` became one of them
    quiet = evolve(config, checkpoint=CheckpointConfig(background=False))
    disk = evolve(quiet, weights=WeightsConfig(transport="disk"))
    delta = evolve(quiet, weights=WeightsConfig(transport="delta"))
    apart = evolve(config, cluster=ClusterConfig(placement="disaggregated"))
    penalised = evolve(config, algorithm=AlgorithmConfig(kl_coef=0.1))
    half = evolve(apart, train=TrainConfig(precision="bfloat16"))
    narrow = evolve(apart, train=TrainConfig(precision="float16", recompute="full"))
    assert needs(config, CPU) == PLAIN_RUN | {Capability.CPU}
    assert needs(quiet, CPU) == {Capability.UPDATE_IPC, Capability.CPU}
    copied = evolve(quiet, checkpoint=CheckpointConfig(background=False, memory=True))
    assert needs(copied, CPU) == PLAIN_RUN | {Capability.CPU}
    assert needs(disk, CPU) == needs(delta, CPU) == {Capability.UPDATE_DISK, Capability.CPU}
    assert needs(apart, CUDA) == PLAIN_RUN | {Capability.MULTI_RANK}
    assert needs(half, CUDA) == PLAIN_RUN | {Capability.MULTI_RANK, Capability.BFLOAT16}
    assert needs(narrow, CUDA) == PLAIN_RUN | {Capability.MULTI_RANK, Capability.FLOAT16, Capability.RECOMPUTE}
    assert needs(config, CUDA) == PLAIN_RUN | {Capability.MULTI_RANK, Capability.SLEEP}
    assert needs(penalised, CPU) == PLAIN_RUN | {Capability.CPU, Capability.SNAPSHOTS}
    sampling = evolve(penalised, run=evolve(config.run, mode="rollout-only"))  # nothing is saved, and no KL measured
    assert needs(sampling, CPU) == {Capability.UPDATE_IPC, Capability.CPU}


@pytest.mark.parametrize("replay", ["recompute", "engine"])
def test_replay_is_required_of_the_training_actors_backend(replay: Any) -> None:
    algorithm = AlgorithmConfig(name="ppo", old_logprobs="recompute", routing_replay=replay)
    config = evolve(config_for(algorithm=algorithm), roles=RolesConfig(critic=SideRoleChoice()))
    assert Capability.ROUTING_REPLAY in needs(config, CPU)
    assert (
        needed("actor", config, plugins_of(config), CPU)[Capability.ROUTING_REPLAY]
        == f"algorithm.routing_replay = '{replay}'"
    )
    assert Capability.ROUTING_REPLAY not in needs(config, CPU, "critic")
    sampling = evolve(config, run=evolve(config.run, mode="rollout-only"))
    assert Capability.ROUTING_REPLAY not in needs(sampling, CPU)


def with_critic(**choice: Any) -> Config:
    roles = RolesConfig(critic=SideRoleChoice(**choice))
    return evolve(config_for(algorithm=AlgorithmConfig(name="ppo", kl_coef=0.1)), roles=roles)


def test_a_critic_with_its_own_devices_never_sleeps() -> None:
    assert offloaded(with_critic(devices="colocated"), "cuda") == ("actor", "critic")
    assert offloaded(with_critic(devices="own"), "cuda") == ("actor",)
