"""By handle, collective, disk and delta: what each of them promises."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from corerl.errors import PluginNotFound, WeightUpdateError
from corerl.weights import Address, Bucket, WeightSender, build_manifest
from corerl_delta import disk as disk_transport
from corerl_delta.disk import DiskSender
from corerl_delta.transport import DeltaSender
from corerl_testing import abandon, open_sender
from corerl_transports import collective, ipc
from corerl_transports.collective import CollectiveSender
from corerl_transports.ipc import IpcSender
from tests.machine import paced
from tests.weights.ends import LARGE, SHAPES, Engine, address_of, no_room, peer, push, same, weights

FILES = ("disk", "delta")


class FlipsCollective(CollectiveSender):
    """A wire that flips the lowest bit of an element of every bucket."""

    def transmit(self, flat: torch.Tensor, digest: torch.Tensor) -> list[Any]:
        flat.view(torch.int32)[1] ^= 1
        return super().transmit(flat, digest)


class Flips:
    """A disk that does."""

    def transmit(self, bucket: Bucket, flat: torch.Tensor, directory: Path) -> None:
        flat.view(torch.int32)[1] ^= 1
        super().transmit(bucket, flat, directory)  # type: ignore[misc]


class FlipsDisk(Flips, DiskSender):
    pass


class FlipsDelta(Flips, DeltaSender):
    pass


class FlipsIpc(IpcSender):
    """Memory that does the same, once the checksum is made."""

    def _announce_pending(self) -> None:
        if self._pending is not None:
            self._pending.flat.view(torch.int32)[1] ^= 1
        super()._announce_pending()


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(collective, "LEAVE_SECONDS", 0.2)  # of an abort that waits for peers


def shared_files() -> list[str]:
    """Of memory that processes share, those that this one has open."""
    links = [os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
    return [link for link in links if "corerl-weights" in link]


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    pair = [Engine(index) for index in range(2)]
    yield pair
    for engine in pair:
        engine.close()


@pytest.mark.parametrize(
    ("transport", "how"),
    [("collective", ""), ("collective", "buffers"), ("disk", ""), ("delta", ""), ("ipc", ""), ("ipc", "late")],
)
def test_engines_hold_the_bits_that_were_sent_update_after_update(
    transport: str, how: str, tmp_path: Path, engines: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    address = address_of(transport, "a", "b", path=tmp_path)
    sender: Any = open_sender(address)
    if how == "buffers":  # as on GPUs
        sender._has_buffers = True
    if how == "late":  # as where a device has not computed the checksum yet
        monkeypatch.setattr(ipc._Digest, "ready", property(lambda self: False))
    (tmp_path / "vgg").mkdir()  # the user's
    for version, dtype in ((1, "float32"), (2, "bfloat16"), (3, "float32")):
        manifest = build_manifest(SHAPES, dtype=dtype, bucket_bytes=200)
        received = [engine.take(address, version, manifest) for engine in engines]
        sent = weights(version, dtype)
        assert not any(push(sender, address, sent, version, manifest=manifest).values())
        assert [each.result() for each in received] == [sum(each.nbytes for each in sent.values())] * 2
        assert all(same(engine.loaded, sent) for engine in engines)
    left = sorted(path.name for path in tmp_path.glob("v*"))
    assert left == [*([f"v00000003-{address.token}"] if transport in FILES else []), "vgg"]
    sender.close()
    assert [path.name for path in tmp_path.iterdir()] == ["vgg"]


@pytest.mark.parametrize("transport", ["collective", "disk", "delta", "ipc"])
def test_an_engine_that_cannot_load_leaves_the_others_their_update(
    transport: str, tmp_path: Path, engines: list[Engine]
) -> None:
    address = address_of(transport, "a", "b", path=tmp_path)
    sender = open_sender(address)
    failing, fine = engines[0].take(address, 1, load=no_room), engines[1].take(address, 1)
    failed = push(sender, address, weights(1), 1)
    with pytest.raises(WeightUpdateError, match="^MemoryError: no room for it$"):
        failing.result()
    fine.result()
    assert same(engines[1].loaded, weights(1)) and not failed.get("b")
    sender.close()


FLIPS = {"collective": FlipsCollective, "disk": FlipsDisk, "delta": FlipsDelta, "ipc": FlipsIpc}


@pytest.mark.parametrize(("transport", "flips"), FLIPS.items())
def test_one_bit_flipped_in_transit_is_refused(
    transport: str, flips: type[WeightSender], tmp_path: Path, engines: list[Engine]
) -> None:
    address = address_of(transport, "a", path=tmp_path)
    sender = flips(address, 0)  # type: ignore[call-arg]
    received = engines[0].take(address, 21)
    push(sender, address, weights(21), 21)
    with pytest.raises(WeightUpdateError, match="^bucket 0 of version 21 was damaged in transit: "):
        received.result()
    assert engines[0].loaded == {}
    sender.close()


@pytest.mark.parametrize("transport", ["collective", "ipc"])
def test_a_missing_engine_delays_the_sender_by_the_timeout(transport: str) -> None:
    address = address_of(transport, "e", timeout=0.3)
    sender = open_sender(address)
    started = time.monotonic()
    assert "within 0.3 s" in push(sender, address, weights(1), 1)["e"]
    assert time.monotonic() - started < 5
    sender.close()


@pytest.mark.parametrize("transport", ["collective", "ipc"])
def test_an_engine_that_is_lost_is_not_waited_for(transport: str, engines: list[Engine]) -> None:
    address = address_of(transport, "a", "b", timeout=300.0)
    lost: dict[str, str] = {}
    sender = open_sender(address, lost=lost)
    threading.Timer(0.3, lost.update, [{"b": "its process died"}]).start()
    received = engines[0].take(address, 1)  # the other one never comes
    failed = push(sender, address, weights(1), 1)
    if transport == "ipc":
        received.result()
        assert failed == {"b": "its process died"} and same(engines[0].loaded, weights(1))
    else:  # the group cannot do without it
        assert failed["a"] == failed["b"] == "the trainer could not send the weights: b: its process died"
        with pytest.raises(WeightUpdateError, match="^bucket 0 of version 1 did not arrive: "):
            received.result()
    sender.close()


@pytest.mark.processes
@pytest.mark.parametrize(
    "transport",
    ["collective", "ipc"],
)
def test_an_engines_death_in_an_update_is_noticed(transport: str, engines: list[Engine]) -> None:
    # gloo does not always see that a peer has closed its connections: then the broadcast's timeout ends it.
    address = address_of(transport, "a", "b", timeout=30.0)
    sender = open_sender(address)
    received = engines[0].take(address, 1, LARGE)
    started = time.monotonic()
    with peer(address, 1, "large", "die"):
        zeros = {entry.name: torch.zeros(entry.shape) for bucket in LARGE.buckets for entry in bucket.entries}
        failed = push(sender, address, zeros, 1, manifest=LARGE)
        assert failed["b"] != "" and time.monotonic() - started < 100
        if transport == "ipc":
            assert received.result() == 16 * 2**22
        else:
            with pytest.raises(WeightUpdateError, match=" did not arrive: "):
                received.result()
    sender.close()


@pytest.mark.parametrize("transport", ["collective", "ipc", *FILES])
def test_engines_notice_a_sender_that_fails(
    transport: str, tmp_path: Path, engines: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    address = address_of(transport, "a", "b", path=tmp_path, timeout=60.0)
    sender: Any = open_sender(address)
    sent = sender.send

    def full(bucket: Bucket, flat: torch.Tensor) -> None:
        if bucket.index == 1:
            raise OSError(28, "No space left on device")
        sent(bucket, flat)

    sender.send = full
    received = [engine.take(address, 1) for engine in engines]
    started = time.monotonic()
    reason = "the trainer could not send the weights: OSError: [Errno 28] No space left on device"
    assert push(sender, address, weights(1), 1) == {"a": reason, "b": reason}
    abandon(address)  # as the driver does
    for each in received:
        with pytest.raises(WeightUpdateError):
            each.result()
    assert time.monotonic() - started < 30 and not list(tmp_path.glob("v*"))
    sender.close()


# ---- collective ------------------------------------------------------------------------------------------------------

STAGES = {"embed": 0, "norm": 2, "layers.0.q": 2, "scale": 0}  # as of a pipeline of two stages, two ranks each
STAGED = build_manifest(SHAPES, dtype="float32", bucket_bytes=200, stage_ranks=STAGES)


def test_a_group_that_forms_too_late_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    meet, left = threading.Event(), threading.Event()

    class Late:
        def abort(self) -> None:
            left.set()

    def _meet(self: collective.BroadcastGroup, *_: Any) -> None:
        meet.wait()
        self._backend = Late()

    monkeypatch.setattr(collective.BroadcastGroup, "_meet", _meet)
    address = address_of("collective", "a", timeout=0.2)
    with pytest.raises(WeightUpdateError, match="^forming the group did not finish within 0.2 s$"):
        collective.BroadcastGroup(address, sender=0, rank=0, closed=str)
    meet.set()
    assert left.wait(paced(20))


@pytest.fixture
def staged(engines: list[Engine]) -> Iterator[Any]:
    address = address_of("collective", "a", "b")
    senders = {rank: CollectiveSender(address, rank) for rank in (0, 2)}
    senders[2]._has_buffers = True  # as on GPUs
    yield address, senders, engines
    for sender in senders.values():
        sender.close()


def push_from(senders: dict[int, CollectiveSender], address: Address, version: int) -> list[dict[str, str]]:
    """From each stage's first rank at once."""
    with ThreadPoolExecutor(2) as ranks:
        pushing = [
            ranks.submit(push, sender, address, weights(version), version, manifest=STAGED, rank=rank)
            for rank, sender in senders.items()
        ]
        return [each.result() for each in pushing]


def test_each_stage_sends_its_own_buckets_in_groups_that_stay(staged: Any) -> None:
    address, senders, engines = staged
    groups = []
    for version in (1, 2):
        received = [engine.take(address, version, STAGED) for engine in engines]
        assert push_from(senders, address, version) == [{}, {}]
        for engine, each in zip(engines, received, strict=True):
            each.result()
            assert same(engine.loaded, weights(version))
        groups.append([sender._group for sender in senders.values()])
    assert groups[0] == groups[1]


def test_a_sender_that_breaks_ends_the_update_of_all(staged: Any) -> None:
    address, senders, engines = staged

    def broken(flat: torch.Tensor, digest: torch.Tensor) -> None:
        raise RuntimeError("no memory")

    senders[2].transmit = broken
    received = [engine.take(address, 1, STAGED) for engine in engines]
    started = time.monotonic()
    assert set(push_from(senders, address, 1)[1]) == {"a", "b"}
    for each in received:
        with pytest.raises(WeightUpdateError, match="of version 1 did not arrive: "):
            each.result()
    assert time.monotonic() - started < 15  # and not the timeout


def test_a_taken_port_is_the_reason_for_every_engine() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = address_of("collective", "e", port=taken.getsockname()[1], timeout=1.0)
        reason = push(open_sender(address), address, weights(1), 1)["e"]
        assert f"port {address.port}, chosen for sending weights, is in use: " in reason


def test_a_store_takes_over_the_socket_that_holds_its_port(engines: list[Engine]) -> None:
    with socket.socket() as kept:
        kept.bind(("", 0))
        kept.listen()
        port = kept.getsockname()[1]
        address = address_of("collective", "a", port=port, listen_fd=kept.detach())
    received, sender = engines[0].take(address, 1), open_sender(address)
    assert push(sender, address, weights(1), 1) == {} and received.result() > 0
    sender.close()


def test_a_buffer_in_use_is_not_reused() -> None:
    class Wire:
        """A group whose broadcasts are done when they are waited for."""

        def __init__(self) -> None:
            self.started = 0
            self.finished: list[int] = []

        def start(self, *tensors: torch.Tensor) -> list[int]:
            self.started += 1
            return [self.started]

        def finish(self, works: list[int]) -> None:
            self.finished += works

    sender: Any = CollectiveSender(address_of("collective", "a"))
    sender._has_buffers, sender._group = True, (wire := Wire())
    manifest = build_manifest([("a", (4,))], dtype="float32", bucket_bytes=64)
    sender.open(manifest, 1)
    places = []
    for number in range(5):
        room = sender.acquire_buffer(4, torch.float32)
        assert wire.finished == list(range(1, number))  # the bucket before may still be on its way
        places.append(room.data_ptr())
        sender.send(manifest.buckets[0], room.fill_(number))
    assert places[0] != places[1] and places == [*places[:2], *places[:2], places[0]]
    sender.finish()
    assert sorted(wire.finished) == [1, 2, 3, 4, 5]


# ---- disk ------------------------------------------------------------------------------------------------------------


def test_an_engine_that_expects_other_tensors_refuses_them(tmp_path: Path, engines: list[Engine]) -> None:
    for transport in ("disk", "ipc"):
        before = len(shared_files())
        address = address_of(transport, "a", path=tmp_path)
        received = engines[0].take(address, 1, build_manifest(SHAPES, dtype="float32", bucket_bytes=10_000))
        sender = open_sender(address)
        push(sender, address, weights(1), 1)
        with pytest.raises(WeightUpdateError, match="give both the manifest of this update$"):
            received.result()
        sender.close()
        assert len(shared_files()) == before


@pytest.mark.parametrize("transport", FILES)
def test_a_late_engine_does_not_wait_for_a_sender_that_failed(
    transport: str, tmp_path: Path, engines: list[Engine]
) -> None:
    address = address_of(transport, "a", path=tmp_path, timeout=60.0)
    (first := open_sender(address)).open(STAGED, 1)
    abandon(address)
    first.close()
    started = time.monotonic()
    with pytest.raises(WeightUpdateError, match="was not written: its sender has failed or ended$"):
        engines[0].take(address, 1).result()
    assert time.monotonic() - started < 30
    (other := open_sender(address_of(transport, "a", path=tmp_path))).open(STAGED, 1)
    other.close()
    assert not list(tmp_path.glob("abandoned-*"))


@pytest.mark.parametrize("transport", FILES)
def test_a_full_disk_fails_every_engine_and_is_cleared(
    transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "v00000001-abc.partial").mkdir()  # of a run that was killed
    written = disk_transport.save_file

    def save_file(tensors: dict[str, torch.Tensor], path: Path) -> None:
        if "bucket-00001" in path.name:
            raise OSError(28, "No space left on device")
        written(tensors, path)

    monkeypatch.setattr(disk_transport, "save_file", save_file)
    address = address_of(transport, "e", "f", path=tmp_path)
    failed = push(open_sender(address), address, weights(2), 2)
    partial = tmp_path / f"v00000002-{address.token}.partial"
    reason = f"cannot write bucket 1 to {partial}: [Errno 28] No space left on device"
    assert failed == dict.fromkeys("ef", f"the trainer could not send the weights: {reason}")
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_transport_names_the_known_ones() -> None:
    with pytest.raises(PluginNotFound, match="unknown transport 'pigeon'; installed: collective, delta, disk, ipc"):
        open_sender(Address(transport="pigeon", engines=()))
