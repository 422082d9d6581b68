from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from corerl.driver import engines as module
from corerl.driver.engines import Engines
from corerl.engines.base import GenerateRequest, Generation, Received
from corerl.errors import EngineFailed, InsufficientResources, UserError, VersionGone, WeightUpdateError, WorkerDied
from corerl.plan.residency import SAMPLE
from corerl.rollout.sampler import assemble
from corerl.rollout.source import Policies
from corerl.types import LossSpec, Output, SampleBatch, Step
from corerl.weights.manifest import build_manifest
from corerl.weights.transport import Address
from corerl_testing.models import tiny_fields
from tests.driver.fakes import Ears, Group, Source, colocated, make_engines, told
from tests.driver.saved import make_config
from tests.engines.services import request_of
from tests.in_process import without_ray
from tests.rollout.engines import Engines as Fleet


def push(engines: Engines, source: Any = None) -> None:
    engines.update(source and source.updating)


# ---- what is sent ----------------------------------------------------------------------------------------------------


def test_adapters_travel_alone_once_every_engine_holds_all_weights() -> None:
    whole, alone = (build_manifest([(name, (1,))], dtype="float32", bucket_bytes=8) for name in ("w", "a"))
    actor, fleet = Group(), Group()
    actor.manifests = whole, alone
    engines = make_engines(make_config(), actor, fleet, separate_adapters=True, version=7)
    offered = []
    for _ in range(3):
        push(engines)
        offered.append(fleet.offered)
    assert offered == [whole, alone, alone]
    fleet.any_dead = True  # it is replaced by one without weights
    push(engines)
    fleet.hold_all = False  # they have slept
    push(engines)
    push(engines)
    fleet.fared["engine-1"] = FAILED
    push(engines)
    ways = ["send 7", "send 8 of adapters", "send 9 of adapters", "send 10", "send 11", "send 12 of adapters"]
    assert actor.log == [*ways, "send 13 of adapters", "send 14"]


# ---- engines that miss an update -------------------------------------------------------------------------------------

DEAD = Received(bytes=0, error="its process died", died=True, details="what Ray says of it")
FAILED = Received(bytes=0, error="bucket 3 did not arrive")
SILENT = None


def after_one(*fared: dict[str, Received | None], **parts: Any) -> tuple[Engines, Group, Group, Ears]:
    """A run whose engines fare so, update after update; each has taken the first one."""
    actor, fleet, ears = Group(), Group(), Ears()
    engines = make_engines(make_config(), actor, fleet, ears, **parts)
    push(engines)
    well = {name: Received(bytes=8) for name in fleet.names}
    fleet.fared, *fleet.later = [
        {name: each for name, each in {**well, **changed}.items() if each is not None} for changed in fared
    ]
    for group in (actor, fleet):
        group.log.clear()
    return engines, actor, fleet, ears


FAILURE = "WeightUpdateError: engine-1: bucket 3 did not arrive"
SILENCE = "no answer within 600 s after the update's end"


@pytest.mark.parametrize(
    ("fared", "replaced"),
    [
        ({"engine-1": FAILED}, {"engine-1": FAILURE}),
        ({"engine-1": DEAD}, {"engine-1": "WorkerDied: its process died"}),
        # What the other one says follows from the death, or from the hang: it stays.
        ({"engine-0": FAILED, "engine-1": DEAD}, {"engine-1": "WorkerDied: its process died"}),
        ({"engine-0": FAILED, "engine-1": SILENT}, {"engine-1": f"WeightUpdateError: engine-1: {SILENCE}"}),
        (
            {"engine-0": DEAD, "engine-1": SILENT},
            {"engine-0": "WorkerDied: its process died", "engine-1": f"WeightUpdateError: engine-1: {SILENCE}"},
        ),
    ],
)
def test_engines_that_miss_an_update_are_replaced(fared: dict[str, Received | None], replaced: dict[str, str]) -> None:
    engines, actor, fleet, ears = after_one(fared)
    push(engines)
    assert fleet.log == [
        "receive 1",
        *(f"leave out {name}" for name in replaced),
        *(f"replace {name}: {reason}" for name, reason in replaced.items()),
        "receive 2",
    ]
    assert actor.log == ["send 1", "send 2"]
    assert fleet.address.token == "meeting 2"  # what was built at the first is broken
    assert len(told(ears)) == len(replaced)


def test_the_first_engine_to_fail_is_the_cause() -> None:
    engines, actor, fleet, _ = after_one({"engine-1": FAILED})
    polls = iter([False, False, True])
    report = actor.engine_failed
    actor.ready = lambda timeout: next(polls, True)  # type: ignore[method-assign]

    def spread(address: Address, engine: str, reason: str) -> None:
        report(address, engine, reason)
        fleet.fared["engine-0"] = Received(bytes=0, error="the trainer closed the connection")

    actor.engine_failed = spread  # type: ignore[method-assign]
    push(engines)
    assert actor.log == [
        "send 1",
        "report engine-1: bucket 3 did not arrive",
        "report engine-0: the trainer closed the connection",
        "send 2",
    ]
    assert [line for line in fleet.log if line.startswith("replace")] == [f"replace engine-1: {FAILURE}"]


@pytest.mark.parametrize(
    ("sender", "error"),
    [
        ("no memory to send from", "bucket 3 did not arrive; no memory to send from"),
        ("bucket 3 did not arrive", "bucket 3 did not arrive"),  # as the engine said
    ],
)
def test_an_engine_that_fails_its_first_update_ends_the_run(sender: str, error: str) -> None:
    actor, fleet = Group(), Group()
    fleet.fared["engine-1"] = FAILED
    actor.sent = evolve(actor.sent, engines={"engine-0": "", "engine-1": sender})
    with pytest.raises(WeightUpdateError) as caught:
        push(make_engines(make_config(), actor, fleet, version=7))
    assert caught.value.message == f"weights version 7 did not reach every engine: engine-1: {error}"


def test_a_second_failure_ends_the_run() -> None:
    engines, *_ = after_one({"engine-1": FAILED}, {"engine-1": FAILED})
    with pytest.raises(WeightUpdateError, match="^weights version 2 did not reach every engine: engine-1: bucket 3 "):
        push(engines)


def test_an_engine_that_died_too_often_ends_the_run() -> None:
    engines, _, fleet, _ = after_one(*[{"engine-1": DEAD}] * 3)
    fleet.allowed = 2
    with pytest.raises(WorkerDied, match="^its process died$") as caught:
        push(engines)
    assert caught.value.details == "what Ray says of it"
    assert [line for line in fleet.log if line.startswith("receive")] == ["receive 1", "receive 2", "receive 3"]


def test_an_engines_own_answer_overrules_its_senders() -> None:
    engines, actor, fleet, _ = after_one({})
    actor.sent = evolve(actor.sent, engines={"engine-1": "the connection broke"})
    push(engines)
    assert fleet.log == ["receive 1"]
    push(engines)
    assert fleet.address.token == "meeting 2"


def test_a_dead_rank_ends_the_push_at_once() -> None:
    actor, fleet = Group(), Group()
    actor.failure = WorkerDied("its process died")
    fleet.answers = False
    with pytest.raises(WorkerDied, match="^its process died$"):
        push(make_engines(make_config(), actor, fleet, version=7))


def test_without_a_device_the_engines_death_is_the_error() -> None:
    def refuse(message: str) -> None:
        raise InsufficientResources("rollout.replicas: devices are left for 0 of 2")

    engines, *_ = after_one({"engine-1": DEAD}, on_death=refuse)
    with pytest.raises(WorkerDied) as caught:
        push(engines)
    assert caught.value.message == (
        "its process died; a machine is gone, and its processes have no other places: "
        "rollout.replicas: devices are left for 0 of 2"
    )


# ---- verified weights ------------------------------------------------------------------------------------------------


def test_what_engines_hold_is_compared_every_so_many_updates() -> None:
    actor, fleet, ears = Group(), Group(), Ears()
    manifest = build_manifest([("a", (1,)), ("b", (1,))], dtype="float32", bucket_bytes=8)
    config = make_config(weights={"verify_every": 2})
    actor.manifests = manifest, None
    engines = make_engines(config, actor, fleet, ears, version=7)  # of a resumed run
    actor.sent = evolve(actor.sent, sums={"a": 5, "b": 6})
    fleet.sums = {"engine-0": {"a": 5}, "engine-1": None}  # it does not report b
    for _ in range(4):
        push(engines)
    assert actor.verified == [True, False, True, False]
    line = "engine-1 cannot report what it has loaded (Engine.weight_sums), so it is not compared with what was sent; "
    assert told(ears) == [f"{line}what it computes still is, by algorithm.on_mismatch"]
    fleet.sums = {"engine-0": {"a": 5, "b": 6}, "engine-1": {"a": 5, "b": 7}}
    with pytest.raises(
        WeightUpdateError,
        match="^engine-1 holds different weights than it was sent as version 11: 'b', whose bits sum to 0x7 ",
    ):
        push(engines)


# ---- while something is sampled --------------------------------------------------------------------------------------


class Overlapping(Source):
    """A source that samples while something is trained; notes where an update stands."""

    overlaps = True

    def __init__(self, log: list[str]) -> None:
        self.log = log

    @contextlib.contextmanager
    def updating(self, policies: Policies) -> Iterator[None]:
        self.log.append(f"hold for {policies.version}")
        yield
        self.log.append("go on")


def test_sampling_holds_during_an_update_but_not_during_replacement() -> None:
    together, ears = Group(), Ears()
    engines, source = make_engines(make_config(), together, together, ears, version=7), Overlapping(together.log)
    push(engines, source)
    assert together.log == ["hold for 7", "send 7", "receive 7", "go on"]
    together.log.clear()
    together.any_dead = True
    push(engines, source)
    assert together.log == [
        "hold for 8",
        "go on",
        "replace engine-1: WorkerDied: its process died",
        "hold for 8",
        "send 8",
        "receive 8",
        "go on",
    ]
    assert (together.address.token, told(ears)) == ("meeting 2", ["engine-1 is replaced: its process died"])


def test_a_new_engine_starts_while_colocated_ranks_sleep() -> None:
    both = Group()
    residency = colocated({"actor": both}, fleet=both)
    engines = make_engines(make_config(), both, both, residency=residency)
    residency.enter(SAMPLE)
    both.any_dead = True
    both.log.clear()
    push(engines)
    # It took caches too, which sleep before the ranks' parameters come.
    assert both.log == [
        "sleep",
        "replace engine-1: WorkerDied: its process died",
        "sleep",
        "wake param",
        "wake",
        "send 0",
        "receive 0",
    ]


# ---- for a loop of one's own -----------------------------------------------------------------------------------------


@pytest.fixture
def engines() -> Iterator[Fleet]:
    made = Fleet(2)
    yield made
    made.close()


OWN: dict[str, Any] = {
    "backend": {"name": "plain"},
    "cluster": {"device": "cpu"},
    "model": {"config": {**tiny_fields("qwen3"), "vocab_size": 32}},
    "rollout": {"engine": "transformers", "max_tokens": 6},
    "weights": {"transport": "disk"},
}


def prompts(*rows: list[int]) -> GenerateRequest:
    return request_of(rows, max_tokens=6)


MANY = 400  # tokens, which take longer than a turn


def answered(request: GenerateRequest, generation: Generation) -> SampleBatch:
    """The rows, with what was sampled as what is to become likelier."""
    return assemble(request, generation).with_row_columns(group=np.arange(len(request)))


def step(engines: Engines, samples: SampleBatch, number: int) -> None:
    """Make what was sampled likelier."""
    samples = samples.with_columns(logprob_weights=-samples.columns["loss_mask"].astype(np.float32))
    (plan,) = engines.group.plan_steps(samples, seed=number)
    at = Step(optimizer_step=number, rollout_step=number, lr=0.01)
    engines.group.train(samples, plan, LossSpec(name="weighted_logprobs"), at).result()


ADAPTED = {**OWN, "lora": {"rank": 2}, "weights": {**OWN["weights"], "lora": "adapter", "versions": 3}}


def test_earlier_versions_are_sampled_as_the_group_computes_them() -> None:
    request = prompts([3, 4, 5], [7, 8])
    with without_ray(), Engines.start(ADAPTED) as engines:
        group, wanted, first = engines.group, list[Any](), list[bytes]()

        def sampled(version: int) -> bytes:
            found = engines.generate(evolve(request, version=version))
            assert set(found.versions) == {version}
            mask = (samples := answered(request, found)).columns["loss_mask"]
            named = f"of {version % 3}"
            own = group.forward(samples, Output.LOGPROBS, snapshot=named).result()[Output.LOGPROBS]
            np.testing.assert_allclose(samples.columns["rollout_logprobs"][mask], own[mask], atol=1e-5)
            return found.tokens.tobytes() + found.logprobs.tobytes()

        for number in range(3):
            group.snapshot(f"of {number}").create().result()
            wanted.append(engines.push())
            first.append(sampled(number))
            step(engines, answered(request, engines.generate(request)), number)
        assert engines.held == (0, 1, 2) and len(set(first)) == 3
        assert [sampled(version) for version in (2, 0, 1, 0)] == [first[2], first[0], first[1], first[0]]

        # What engines hold no more is refused, and sent again from the ranks' copy; the ranks' own weights stay.
        before = group.forward(answered(request, engines.generate(request)), Output.LOGPROBS).result()
        assert engines.push(snapshot="of 0") == 3 and engines.held == (1, 2, 3)
        with pytest.raises(VersionGone, match="no engine holds weights version 0 any more, but 1, 2, 3"):
            engines.begin(evolve(request, version=0)).result(60.0)
        assert sampled(3) == first[0] and sampled(1) == first[1]
        after = group.forward(answered(request, engines.generate(evolve(request, version=2))), Output.LOGPROBS).result()
        np.testing.assert_array_equal(after[Output.LOGPROBS], before[Output.LOGPROBS])
        assert engines.push() == 4  # of the weights as they are, though they have not changed since the last such push
        assert engines.policies.of(np.arange(5)).tolist() == [0, 1, 2, 3, 4]
        assert engines.generate(request).logprobs.tobytes() not in first


def test_rows_of_a_version_that_goes_are_refused() -> None:
    request = prompts([3, 4])
    with without_ray(), Engines.start(ADAPTED) as engines:
        for _ in range(2):
            engines.push()
        service, late = engines.fleet.processes._objects[0], list[Any]()  # type: ignore[attr-defined]
        forget = service.forget

        def slowly(version: int) -> None:
            forget(version)
            late.append(engines.begin(evolve(request, version=version)))
            time.sleep(0.3)  # until the row would have reached the engine

        service.forget = slowly
        assert engines.push(forget=1) == 2 and engines.held == (0, 2)
        with pytest.raises(VersionGone, match="no engine holds weights version 1 any more, but 0, 2"):
            late[0].result(60.0)
        assert set(engines.generate(evolve(request, version=0)).versions) == {0}


def test_engines_that_slept_hold_the_newest_version_alone() -> None:
    with without_ray(), Engines.start(ADAPTED) as engines:
        for _ in range(2):
            engines.push()
        assert engines.held == (0, 1)
        engines.fleet.sleep()
        assert engines.held == ()
        engines.fleet.wake_up()
        assert engines.push() == 2 and engines.held == (2,)
        with pytest.raises(VersionGone, match="no engine holds weights version 1 any more, but 2"):
            engines.generate(evolve(prompts([3, 4]), version=1))


def test_dead_engines_are_replaced_before_rows_are_generated(engines: Fleet) -> None:
    actor, ears = Group(), Ears()
    own = make_engines(make_config(), actor, engines.fleet, ears)
    own.push()
    engines.die()
    assert set(own.generate(prompts([3, 4])).versions) == {1}
    assert actor.log == ["send 0", "send 1"]
    assert sorted(told(ears)) == [f"engine-{n} is replaced: engine-{n}: its process died" for n in (0, 1)]


def test_rows_for_engines_that_have_all_died_are_an_error(engines: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DEATH_SECONDS", 0.05)
    own = make_engines(make_config(), Group(), engines.fleet)
    own.push()
    engines.die()
    for rows in (1, 2):  # also those that come later
        begun = [own.begin(prompts([3, 4])) for _ in range(rows)]
        for each in begun:
            with pytest.raises(EngineFailed, match="engine-0: its process died; engine-1"):
                each.result(60.0)


def test_interrupted_rows_go_on_after_the_next_push() -> None:
    with without_ray(), Engines.start(OWN) as engines:
        shared: Any = {"actor": engines.group}
        engines.residency = colocated(shared, fleet=engines.fleet)  # type: ignore[arg-type]
        engines.push()
        request = prompts([3, 4])
        waiting = engines.begin(evolve(request, params=evolve(request.params, max_tokens=MANY)))
        engines.fleet.loop.run(asyncio.sleep(0.2))  # until it has begun
        engines.turn("train")
        assert not waiting.done()
        engines.push()
        versions = waiting.result(60.0).versions
    assert len(versions) == MANY and set(versions) == {0, 1}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rollout": {"engine": "transformer"}}, "rollout.engine: .*transformers"),
        ({"weights": {"transport": "diks"}}, "weights.transport: .*disk"),
        ({"data": {"held_out": 3}, "cluster": {"placement": "elsewhere"}}, "cluster.placement"),
    ],
)
def test_a_wrong_config_is_refused_before_a_process_starts(wrong: Any, message: str) -> None:
    with pytest.raises(UserError, match=message), Engines.start({**OWN, **wrong}):
        pytest.fail("it has started")
