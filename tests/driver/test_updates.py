from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from attrs import evolve

from corerl.calls import Future
from corerl.driver.updates import WeightUpdates
from corerl.engines.base import Received
from corerl.errors import NoPlaces, WeightUpdateError, WorkerDied
from corerl.plan.residency import SAMPLE
from corerl.weights.manifest import build_manifest
from corerl.weights.transport import Address
from tests.driver.fakes import Ears, Group, Source, make_updates, sharing, told
from tests.driver.saved import make_config


def test_each_push_has_a_version_of_its_own() -> None:
    actor, fleet = Group(), Group()
    updates = make_updates(make_config(), actor, fleet, version=7)
    updates.push()
    updates.push()
    assert (actor.log, fleet.log, updates.version) == (["send 7", "send 8"], ["receive 7", "receive 8"], 9)


def test_adapters_travel_alone_once_every_engine_holds_the_weights_beside_them() -> None:
    whole, alone = (build_manifest([(name, (1,))], dtype="float32", bucket_bytes=8) for name in ("w", "a"))
    actor, fleet = Group(), Group()
    updates = make_updates(make_config(), actor, fleet, manifest=whole, adapters=alone, version=7)
    offered = []
    for _ in range(3):
        updates.push()
        offered.append(fleet.offered)
    assert offered == [whole, alone, alone]
    assert actor.log == ["send 7", "send 8 of adapters", "send 9 of adapters"]
    fleet.dead = True  # it is replaced by one without weights
    updates.push()
    assert fleet.offered is whole and actor.log[-1] == "send 10"
    fleet.whole = False  # they have slept
    updates.push()
    updates.push()
    assert actor.log[-2:] == ["send 11", "send 12 of adapters"]


def test_an_engine_that_missed_an_update_of_adapters_is_sent_all_weights() -> None:
    whole, alone = (build_manifest([(name, (1,))], dtype="float32", bucket_bytes=8) for name in ("w", "a"))
    actor, fleet = Group(), Group()
    updates = make_updates(make_config(), actor, fleet, manifest=whole, adapters=alone, version=7)
    updates.push()
    fleet.fared["engine-1"] = Received(version=0, bytes=0, error="bucket 0 was damaged")
    updates.push()
    assert actor.log == ["send 7", "send 8 of adapters", "send 9"]


def test_a_push_that_an_engine_did_not_take_says_which_and_why() -> None:
    actor, fleet = Group(), Group()
    fleet.fared["engine-1"] = Received(version=0, bytes=0, error="bucket 3 was damaged")
    for sender, told_of_it in (
        ("no memory to send from", "bucket 3 was damaged; the trainer: no memory to send from"),
        ("bucket 3 was damaged", "bucket 3 was damaged"),  # as the engine said
    ):
        actor.sent = evolve(actor.sent, engines={"engine-0": "", "engine-1": sender})
        with pytest.raises(WeightUpdateError) as caught:
            make_updates(make_config(), actor, fleet, version=7).push()
        assert caught.value.message == f"weights version 7 did not reach every engine: engine-1: {told_of_it}"


def test_an_engine_that_says_nothing_is_not_taken_for_dead_and_what_the_trainer_knows_is_told() -> None:
    actor, fleet = Group(), Group()
    del fleet.fared["engine-1"]
    fleet.allowed = 0
    actor.sent = evolve(actor.sent, engines={"engine-0": "", "engine-1": "cannot write v7: No space left on device"})
    with pytest.raises(WeightUpdateError) as caught:
        make_updates(make_config(), actor, fleet, version=7).push()
    assert caught.value.message == (
        "engine-1: no answer within 60 s after the update's end; the trainer: cannot write v7: No space left on device"
    )


def test_a_push_ends_with_a_rank_that_died_and_waits_for_no_engine() -> None:
    actor, fleet = Group(), Group()
    actor.failure = WorkerDied("its process died")
    fleet.answers = False
    updates = make_updates(make_config(), actor, fleet, version=7)
    with pytest.raises(WorkerDied, match="^its process died$"):
        updates.push()


DEAD = Received(version=-1, bytes=0, error="its process died", died=True)
FAILED = Received(version=0, bytes=0, error="bucket 3 did not arrive")


def evicting(*fared: dict[str, Received], **parts: Any) -> tuple[WeightUpdates, Group, Group, Ears]:
    """A run whose engines fare so, update after update; each has taken the first one."""
    actor, fleet, ears = Group(), Group(), Ears()
    address = Address(transport="ipc", engines=fleet.names, token="at first")
    updates = make_updates(make_config(), actor, fleet, ears, address=address, **parts)
    updates.push()
    well = {name: Received(version=0, bytes=8) for name in fleet.names}
    fleet.fared, *fleet.later = [{**well, **each} for each in fared]
    for group in (actor, fleet):
        group.log.clear()
    return updates, actor, fleet, ears


def test_an_engine_that_dies_in_an_update_is_given_up_and_replaced_and_all_get_the_next_one() -> None:
    updates, actor, fleet, ears = evicting({"engine-0": FAILED, "engine-1": DEAD})
    actor.answers = False  # the senders wait, until they are told
    updates.push()
    assert actor.log == [
        "send 1",
        "give up engine-0 in 1: bucket 3 did not arrive",
        "give up engine-1 in 1: its process died",
        "send 2",
    ]
    # What the other engine says follows from the death of the one: it stays.
    replaced = "replace engine-1: WorkerDied: its process died"
    assert fleet.log == ["receive 1", "leave out engine-1", replaced, "receive 2"]
    assert updates.version == 3
    assert updates.address.token != "at first"  # what was built there is broken
    assert told(ears) == ["engine-1 is replaced: its process died"]


def test_engines_for_which_no_device_is_left_are_not_replaced_and_the_others_meet_elsewhere() -> None:
    updates, actor, fleet, ears = evicting({"engine-0": FAILED, "engine-1": DEAD})

    heard: list[str] = []

    def fewer(message: str) -> None:
        heard.append(message)
        fleet.names = fleet.receivers = ("engine-0",)  # type: ignore[attr-defined]
        updates.meets_at(lambda receivers: evolve(updates.address, engines=tuple(receivers)))

    updates.places = fewer
    actor.manifest = lambda: Future(actor, lambda timeout: True, lambda: "of now")  # type: ignore[attr-defined]
    updates.push()
    assert fleet.log == ["receive 1", "leave out engine-1", "receive 2"]
    assert updates.address.engines == ("engine-0",)
    assert told(ears) == ["engine-1 is replaced: its process died"] and heard == ["its process died"]


def test_where_no_engine_is_left_its_death_is_the_error_and_says_why() -> None:
    updates, *_ = evicting({"engine-1": DEAD})

    def refuse(message: str) -> None:
        raise NoPlaces("rollout.replicas: devices are left for 0 of 2")

    updates.places = refuse
    with pytest.raises(WorkerDied) as caught:
        updates.push()
    assert caught.value.message == (
        "its process died; a machine is gone, and its processes have no other places: "
        "rollout.replicas: devices are left for 0 of 2"
    )


def test_an_engine_that_fails_alive_is_replaced_and_if_its_successor_fails_too_the_run_ends() -> None:
    updates, _, fleet, _ = evicting({"engine-1": FAILED})
    updates.push()
    assert fleet.log == [
        "receive 1",
        "leave out engine-1",
        "replace engine-1: WeightUpdateError: engine-1: bucket 3 did not arrive",
        "receive 2",
    ]
    updates, _, fleet, _ = evicting({"engine-1": FAILED}, {"engine-1": FAILED})
    with pytest.raises(
        WeightUpdateError, match="^weights version 2 did not reach every engine: engine-1: bucket 3 did not arrive$"
    ):
        updates.push()
    assert [line for line in fleet.log if line.startswith("re")] == ["receive 1", fleet.log[2], "receive 2"]


def test_of_an_engine_that_hangs_the_others_failures_follow_and_it_alone_is_replaced() -> None:
    updates, _, fleet, _ = evicting({"engine-0": FAILED})
    del fleet.fared["engine-1"]
    updates.push()
    silence = "no answer within 60 s after the update's end"
    replaced = f"replace engine-1: WeightUpdateError: engine-1: {silence}"
    assert fleet.log == ["receive 1", "leave out engine-1", replaced, "receive 2"]


def test_beside_one_that_has_died_one_that_hangs_is_replaced_too() -> None:
    updates, _, fleet, _ = evicting({"engine-0": DEAD})
    del fleet.fared["engine-1"]
    updates.push()
    assert [line.partition(":")[0] for line in fleet.log] == [
        "receive 1", "leave out engine-0", "leave out engine-1", "replace engine-0", "replace engine-1", "receive 2"
    ]  # fmt: skip


def test_one_that_hangs_in_its_first_update_is_replaced_as_one_that_dies() -> None:
    actor, fleet = Group(), Group()
    del fleet.fared["engine-1"]
    updates = make_updates(make_config(), actor, fleet)
    updates.push()
    assert [line.partition(":")[0] for line in fleet.log] == [
        "receive 0", "leave out engine-1", "replace engine-1", "receive 1"
    ]  # fmt: skip


def test_an_engine_that_died_more_often_than_is_allowed_ends_the_run_with_its_death() -> None:
    updates, _, fleet, _ = evicting(*[{"engine-1": DEAD}] * 3)
    fleet.allowed = 2
    with pytest.raises(WorkerDied, match="^its process died$"):
        updates.push()
    assert [line for line in fleet.log if line.startswith("receive")] == ["receive 1", "receive 2", "receive 3"]


def test_an_engine_whose_senders_missed_it_is_replaced_though_it_says_nothing() -> None:
    updates, actor, fleet, _ = evicting({})
    late = actor.sent
    actor.sent = evolve(late, engines={"engine-0": "", "engine-1": "no answer"})
    replace = fleet.replace
    fleet.replace = lambda failed: (replace(failed), setattr(actor, "sent", late))[0]  # type: ignore[method-assign]
    updates.push()
    assert fleet.log[2] == "replace engine-1: WeightUpdateError: engine-1: no answer"


def test_what_engines_hold_is_compared_every_so_many_updates_and_the_tensor_is_named() -> None:
    actor, fleet, ears = Group(), Group(), Ears()
    manifest = build_manifest([("a", (1,)), ("b", (1,))], dtype="float32", bucket_bytes=8)
    config = make_config(weights={"verify_every": 2})
    updates = make_updates(config, actor, fleet, ears, manifest=manifest, version=7)  # as of a run that was resumed
    actor.sent = evolve(actor.sent, sums={"a": 5, "b": 6})
    fleet.sums = {"engine-0": {"a": 5}, "engine-1": None}  # of b it does not tell
    for _ in range(4):
        updates.push()
    assert actor.verified == [True, False, True, False]
    line = "engine-1 cannot report what it has loaded (Engine.weight_sums), so it is not compared with what was sent; "
    assert told(ears) == [f"{line}set weights.verify_every=0 to stop checking"]
    fleet.sums = {"engine-0": {"a": 5, "b": 6}, "engine-1": {"a": 5, "b": 7}}
    with pytest.raises(
        WeightUpdateError,
        match="^engine-1 holds different weights than it was sent as version 11: 'b', whose bits sum to 0x7 ",
    ):
        updates.push()


def test_what_engines_hold_is_not_compared_before_all_have_taken_the_update() -> None:
    actor, fleet = Group(), Group()
    manifest = build_manifest([("a", (1,))], dtype="float32", bucket_bytes=8)
    updates = make_updates(make_config(weights={"verify_every": 1}), actor, fleet, manifest=manifest)
    right = {"engine-0": {"a": 5}, "engine-1": {"a": 5}}
    actor.sent, fleet.sums = evolve(actor.sent, sums={"a": 5}), right
    updates.push()
    replace = fleet.replace
    fleet.replace = lambda failed: (replace(failed), setattr(fleet, "sums", right))[0]  # type: ignore[method-assign]
    fleet.fared["engine-1"], fleet.sums = FAILED, {**right, "engine-1": {"a": 4}}  # it holds what it held before
    updates.push()
    assert fleet.log[-4:] == [
        "receive 1",
        "leave out engine-1",
        "replace engine-1: WeightUpdateError: engine-1: bucket 3 did not arrive",
        "receive 2",
    ]
    assert actor.verified == [True] * 3


class Overlapping(Source):
    """A source that samples while something is trained; notes where an update stands."""

    overlaps = True

    def __init__(self, log: list[str]) -> None:
        self.log = log

    @contextlib.contextmanager
    def updating(self, version: int) -> Iterator[None]:
        self.log.append(f"hold for {version}")
        yield
        self.log.append("go on")


def test_an_update_comes_to_engines_that_are_still_and_new_ones_stand_where_some_have_died() -> None:
    together, ears = Group(), Ears()
    updates = make_updates(make_config(), together, together, ears, source=Overlapping(together.log), version=7)
    updates.push()
    assert together.log == ["hold for 7", "send 7", "receive 7", "go on"]
    together.log.clear()
    together.dead = True
    updates.push()
    assert together.log == [
        "hold for 8",
        "replace engine-1: WorkerDied: its process died",
        "send 8",
        "receive 8",
        "go on",
    ]
    assert (updates.address.token, told(ears)) == ("another", ["engine-1 is replaced: its process died"])


def test_one_that_fails_is_left_out_before_the_others_are_told_to_go_on() -> None:
    together = Group()
    updates = make_updates(make_config(), together, together, source=Overlapping(together.log))
    together.fared = {"engine-0": Received(version=0, bytes=8)}  # the other one hangs
    updates.push()
    assert [line.partition(":")[0] for line in together.log] == [
        *("hold for 0", "send 0", "receive 0", "leave out engine-1", "go on"),
        *("replace engine-1", "hold for 1", "send 1", "receive 1", "go on"),
    ]


def test_a_new_engine_finds_a_device_that_it_shares_as_at_the_start_and_only_weights_in_the_update() -> None:
    both = Group()
    residency = sharing({"actor": both}, fleet=both)
    updates = make_updates(make_config(), both, both, residency=residency)
    residency.enter(SAMPLE)
    both.dead = True
    both.log.clear()
    updates.push()
    # All ranks sleep when it starts; it took caches too, which sleep before the ranks' parameters come.
    assert both.log == [
        "sleep",
        "replace engine-1: WorkerDied: its process died",
        "sleep",
        "wake param",
        "wake",
        "send 0",
        "receive 0",
    ]


def test_of_other_ranks_both_manifests_are_asked_for_where_adapters_travel_alone() -> None:
    both = Group()

    def manifest(*, adapters: bool = False) -> Future[Any]:
        return Future(both, both.ready, lambda: "adapters of now" if adapters else "weights of now")

    both.manifest, both.receivers = manifest, both.names  # type: ignore[attr-defined]
    updates = make_updates(make_config(), both, both)
    updates.resized(lambda receivers: evolve(updates.address, engines=tuple(receivers)))
    assert (updates.manifest, updates.adapters) == ("weights of now", None)
    updates.adapters = "adapters of before"  # type: ignore[assignment]
    updates.resized(lambda receivers: updates.address)
    assert (updates.manifest, updates.adapters) == ("weights of now", "adapters of now")
