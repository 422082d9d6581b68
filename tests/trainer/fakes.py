"""Backends to plan with: what their specs ask for and lack. None of them is made."""

from __future__ import annotations

from collections.abc import Iterable

from attrs import evolve, frozen
from torch import Tensor

from corerl.algorithms.losses import LossInputs
from corerl.config.options import option
from corerl.config.schema import ClusterInfo
from corerl.plugin.capabilities import Capability, not_implemented, unsupported
from corerl.plugin.spec import BackendSpec, Environment, Problem
from corerl.weights.manifest import build_manifest
from corerl_testing.plain.spec import SPEC as PLAIN

MANIFEST = build_manifest([("w", (2, 3)), ("b", (3,))], dtype="float32", bucket_bytes=24)


@frozen(kw_only=True)
class FakeConfig:
    shards: int = option("must divide the ranks", default=1)


def check(config: FakeConfig, cluster: ClusterInfo) -> Iterable[Problem]:
    if cluster.ranks % config.shards:
        yield Problem("shards", f"{config.shards} does not divide {cluster.ranks} ranks; use a divisor")


def environment(config: FakeConfig, cluster: ClusterInfo) -> Environment:
    return {"FAKE_SHARDS": f"{config.shards} of {cluster.ranks} on {cluster.device}"}


def data_parallel(config: FakeConfig, cluster: ClusterInfo) -> int:
    return cluster.ranks // config.shards


def check_model(config: FakeConfig, cluster: ClusterInfo) -> Iterable[Problem]:
    """Of what is known of the run: nothing is said where it is not known."""
    if heads := cluster.model.get("num_key_value_heads", 0) % 4:
        yield Problem(".model.num_key_value_heads", f"{heads} more than a multiple of 4")
    if cluster.train and cluster.train.recompute != "none":
        yield Problem(".train.recompute", f"{cluster.train.recompute!r}, and it keeps everything")


SPEC = BackendSpec(
    implementation=PLAIN.implementation,
    config=FakeConfig,
    api=(2, 0),
    summary="a fake",
    check=check,
    data_parallel=data_parallel,
    environment=environment,
)
NO_REPLAY = evolve(
    PLAIN,
    summary="the plain backend, without routing replay",
    capabilities={**PLAIN.capabilities, Capability.ROUTING_REPLAY: not_implemented("it tells its routers nothing")},
)
CHOOSY = BackendSpec(
    implementation=PLAIN.implementation,
    config=FakeConfig,
    api=(2, 0),
    summary="a fake that cannot take every model",
    check=check_model,
)
LIMITED = BackendSpec(
    implementation=PLAIN.implementation,
    config=FakeConfig,
    api=(2, 0),
    summary="a fake that can do little",
    capabilities={
        Capability.MULTI_RANK: unsupported("it is one process"),
        Capability.SNAPSHOTS: not_implemented("no host copies yet"),
        Capability.MOE: not_implemented("no experts yet"),
        Capability.RESHARD: unsupported("it reads what it wrote"),
    },
)


def no_result(inputs: LossInputs) -> Tensor:
    """A loss that returns no LossResult."""
    return inputs.logprobs.sum()
