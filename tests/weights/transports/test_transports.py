"""By handle, collective, disk and delta: the same promises, kept between processes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from corerl.errors import PluginNotFound
from corerl.plugin.transports import open_receiver, open_sender
from corerl.weights.checksums import Digest
from corerl.weights.manifest import Bucket, Manifest, build_manifest
from corerl.weights.transport import Address, WeightSender
from corerl.weights.transports import disk as disk_transport
from corerl.weights.transports.collective import CollectiveSender
from corerl.weights.transports.disk import DiskSender
from corerl.weights.transports.ipc import IpcSender
from corerl_delta.transport import DeltaSender
from corerl_testing.inprocess import InProcessSender
from tests.forks.client import ROOT, Forked
from tests.weights.transports.peer import bit_sum

pytestmark = pytest.mark.processes

SHAPES: list[tuple[str, tuple[int, ...]]] = [("embed", (16, 6)), ("norm", (6,)), ("layers.0.q", (8, 6)), ("scale", ())]
BUCKET_BYTES = 200  # two or three buckets


def manifest_of(dtype: str = "float32") -> Manifest:
    return build_manifest(SHAPES, dtype=dtype, bucket_bytes=BUCKET_BYTES)


def weights(seed: int, dtype: str = "float32") -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(getattr(torch, dtype)) for name, shape in SHAPES}


def sums_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    return {name: bit_sum(tensor) for name, tensor in tensors.items()}


def push(sender: WeightSender, tensors: Mapping[str, torch.Tensor], version: int, dtype: str = "float32") -> Any:
    manifest = manifest_of(dtype)
    sender.begin(manifest, version)
    for bucket in manifest.buckets:
        flat = torch.cat([tensors[entry.name].reshape(-1) for entry in bucket.entries])
        room = sender.acquire_buffer(flat.numel(), flat.dtype)
        sender.send(bucket, flat if room is None else room.copy_(flat))
    return sender.commit()


class Peer:
    """One engine process."""

    def __init__(self, address: Address, index: int) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        argv = [str(Path(__file__).with_name("peer.py")), json.dumps(attrs.asdict(address)), str(index)]
        orders, ours = os.pipe()
        theirs, answers = os.pipe()
        with open(orders, "rb") as stdin, open(answers, "wb") as stdout, open(os.devnull, "wb") as stderr:
            files: dict[str, Any] = {"stdin": stdin, "stdout": stdout, "stderr": stderr}
            self.process: Forked | subprocess.Popen[bytes]
            if torch.cuda.is_available():  # which may be in use where processes are forked
                self.process = subprocess.Popen([sys.executable, *argv], env=environment, **files)
            else:
                code = "from tests.weights.transports.peer import main; main()"
                self.process = Forked(argv, code, environment=environment, **files)
        self.orders, self.answers = open(ours, "w"), open(theirs)  # noqa: SIM115  -- until `close`

    def order(
        self,
        version: int,
        act: str = "load",
        dtype: str = "float32",
        bucket_bytes: int = BUCKET_BYTES,
        shapes: list[tuple[str, tuple[int, ...]]] = SHAPES,
        senders: Mapping[str, int] | None = None,
    ) -> None:
        line = {
            "version": version,
            "act": act,
            "dtype": dtype,
            "shapes": shapes,
            "bucket_bytes": bucket_bytes,
            "senders": senders,
        }
        self.orders.write(json.dumps(line) + "\n")
        self.orders.flush()

    def answer(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.answers.readline())
        return answer

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        with contextlib.suppress(BrokenPipeError):  # an order that it has not read
            self.orders.close()
        self.answers.close()


class FlipsCollective(CollectiveSender):
    """A wire that, once told to, flips the lowest bit of one element of every bucket."""

    flips = False

    def transmit(self, flat: torch.Tensor, digest: torch.Tensor) -> list[Any]:
        if self.flips:
            flat.view(torch.int32)[1] ^= 1
        return super().transmit(flat, digest)


class FlipsDisk(DiskSender):
    """A disk that does the same."""

    flips = False

    def transmit(self, bucket: Bucket, flat: torch.Tensor) -> None:
        if self.flips:
            flat.view(torch.int32)[1] ^= 1
        super().transmit(bucket, flat)


class FlipsDelta(DeltaSender):
    """The same."""

    flips = False

    def transmit(self, bucket: Bucket, flat: torch.Tensor) -> None:
        if self.flips:
            flat.view(torch.int32)[1] ^= 1
        super().transmit(bucket, flat)


class FlipsIpc(IpcSender):
    """Memory that does the same, once the checksum is made."""

    flips = False

    def _hand_over_pending(self) -> None:
        if self.flips and self._pending is not None:
            self._pending.flat.view(torch.int32)[1] ^= 1
        super()._hand_over_pending()


def flipping(address: Address) -> FlipsCollective | FlipsDisk | FlipsDelta | FlipsIpc:
    match address.transport:
        case "ipc":
            return FlipsIpc(address, 0)
        case "collective":
            return FlipsCollective(address)
        case "delta":
            return FlipsDelta(address)
    return FlipsDisk(address)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def loopback() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        yield


@pytest.fixture(
    scope="module",
    params=["collective", "collective, from its own memory", "disk", "delta", "ipc", "ipc, handed over late"],
)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, loopback: None) -> Iterator[Any]:
    """One run's address, sender and two engines, shared by the tests below: versions rise from test to test."""
    transport, _, how = request.param.partition(", ")
    address = Address(
        transport=transport,
        engines=("engine-0", "engine-1"),
        host="127.0.0.1",
        port=free_port(),
        path=str(tmp_path_factory.mktemp("updates")),
        token=uuid.uuid4().hex,
        senders=(0, 0),
        timeout=10.0,
    )
    peers = [Peer(address, index) for index in range(2)]
    for peer in peers:
        peer.answer()
    sender = flipping(address)
    with pytest.MonkeyPatch.context() as patch:
        if how == "from its own memory":  # as on GPUs
            sender._has_rooms = True
        if how == "handed over late":  # as where a device has not come to the checksum yet
            patch.setattr(Digest, "ready", property(lambda self: False))
        yield address, sender, peers
    for peer in peers:
        peer.close()
    sender.close()


def test_engines_hold_the_bits_that_were_sent_update_after_update(run: Any) -> None:
    address, sender, peers = run
    (Path(address.path) / "vgg").mkdir()  # of the user's
    for version, dtype in ((1, "float32"), (2, "bfloat16"), (3, "float32")):
        for peer in peers:
            peer.order(version, dtype=dtype)
        sent = weights(version, dtype)
        assert push(sender, sent, version, dtype) == {"engine-0": "", "engine-1": ""}
        for peer in peers:
            assert peer.answer() == {"version": version, "error": "", "sums": sums_of(sent)}
    left = sorted(path.name for path in Path(address.path).glob("v*"))
    assert left == [*(["v00000003"] if address.transport in ("disk", "delta") else []), "vgg"]


@pytest.mark.parametrize("act", ["refuse", "fail"])
def test_an_engine_that_does_not_commit_is_reported_and_the_other_one_commits(run: Any, act: str) -> None:
    _, sender, peers = run
    version = {"refuse": 11, "fail": 12}[act]
    reason = {"refuse": "this engine does not want it", "fail": "this engine cannot load it"}[act]
    peers[0].order(version, act)
    peers[1].order(version)
    sent = weights(version)
    assert push(sender, sent, version) == {"engine-0": reason, "engine-1": ""}
    assert peers[0].answer()["error"] == reason
    assert peers[1].answer() == {"version": version, "error": "", "sums": sums_of(sent)}


def test_an_engine_that_failed_takes_part_again_in_the_next_update(run: Any) -> None:
    _, sender, peers = run
    sent = weights(13)
    for peer in peers:
        peer.order(13)
    assert push(sender, sent, 13) == {"engine-0": "", "engine-1": ""}
    assert [peer.answer()["sums"] for peer in peers] == [sums_of(sent)] * 2


def test_an_engine_with_another_manifest_is_refused_before_it_loads(run: Any) -> None:
    _, sender, peers = run
    peers[0].order(14, bucket_bytes=10_000)
    peers[1].order(14)
    engines = push(sender, weights(14), 14)
    assert "manifests differ" in engines["engine-0"] and engines["engine-1"] == ""
    answer = peers[0].answer()
    assert answer["version"] < 14 and "manifests differ" in answer["error"]
    assert peers[1].answer()["version"] == 14


def test_one_bit_flipped_in_transit_is_refused_and_the_version_stays(run: Any) -> None:
    address, sender, peers = run
    before = weights(20)
    for peer in peers:
        peer.order(20)
    push(sender, before, 20)
    [peer.answer() for peer in peers]

    sender.flips = True
    for peer in peers:
        peer.order(21)
    engines = push(sender, weights(21), 21)
    sender.flips = False
    for name, peer in zip(address.engines, peers, strict=True):
        answer = peer.answer()
        assert answer["version"] == 20 and answer["sums"] == sums_of(before)
        assert "bucket 0 of version 21 was damaged in transit" in answer["error"]
        assert engines[name] == answer["error"]


def test_an_engine_that_never_comes_is_reported_within_the_timeout(tmp_path: Path, loopback: None) -> None:
    for transport in ("collective", "disk", "delta", "ipc"):
        address = Address(
            transport=transport,
            engines=("e",),
            host="127.0.0.1",
            port=free_port(),
            path=str(tmp_path),
            token=uuid.uuid4().hex,
            senders=(0,),
            timeout=0.3,
        )
        sender = open_sender(address)
        started = time.monotonic()
        engines = push(sender, weights(1), 1)
        sender.close()
        assert time.monotonic() - started < 3
        assert "within 0.3 s" in engines["e"] or "in 0.3 s" in engines["e"]


def test_an_engine_that_dies_during_the_broadcast_is_reported_and_the_others_commit_the_next_update(
    loopback: None,
) -> None:
    address = Address(transport="collective", engines=("a", "b"), host="127.0.0.1", port=free_port(), timeout=3.0)
    peers = [Peer(address, index) for index in range(2)]
    sender = open_sender(address)
    try:
        [peer.answer() for peer in peers]
        peers[0].order(1)
        peers[1].order(1, "die")
        assert push(sender, weights(1), 1)["b"] != ""
        first = peers[0].answer()
        assert first["version"] == (0 if first["error"] else 1)
        peers[0].order(2)
        engines = push(sender, weights(2), 2)
        assert engines["a"] == "" and "did not join" in engines["b"]
        assert peers[0].answer() == {"version": 2, "error": "", "sums": sums_of(weights(2))}
    finally:
        for peer in peers:
            peer.close()
        sender.close()


@pytest.mark.nightly
def test_a_peer_that_is_lost_without_a_word_and_given_up_holds_up_neither_sender_nor_engines(loopback: None) -> None:
    address = Address(transport="collective", engines=("a", "b"), host="127.0.0.1", port=free_port(), timeout=300.0)
    peers = [Peer(address, index) for index in range(2)]
    sender = open_sender(address)
    large = build_manifest([(f"{index}", (2**20,)) for index in range(8)], dtype="float32", bucket_bytes=2**22)
    shapes = [(entry.name, entry.shape) for bucket in large.buckets for entry in bucket.entries]
    try:
        for peer in peers:
            peer.answer()
        peers[0].order(1, shapes=shapes, bucket_bytes=2**22)
        peers[1].order(1, "stop", shapes=shapes, bucket_bytes=2**22)
        threading.Timer(3.0, sender.give_up, ("b", 1, "its process died")).start()
        began = time.monotonic()
        sender.begin(large, 1)
        for bucket in large.buckets:
            sender.send(bucket, torch.zeros(2**20))
        assert sender.commit()["b"] == ("did not commit version 1: its process died")
        error = peers[0].answer()["error"]
        assert "did not arrive" in error or error == ""
        assert time.monotonic() - began < 60  # and not the timeout
    finally:
        for peer in peers:
            peer.close()
        sender.close()


SENDERS = {"embed": 0, "norm": 2, "layers.0.q": 2, "scale": 0}  # as of a pipeline of two stages, two ranks each


def push_from(senders: Mapping[int, CollectiveSender], tensors: Mapping[str, torch.Tensor], version: int) -> Any:
    """From each stage's first rank, as ranks do it: side by side. What each has to say of the engines."""
    manifest = build_manifest(SHAPES, dtype="float32", bucket_bytes=BUCKET_BYTES, senders=SENDERS)

    def send(rank: int) -> Mapping[str, str]:
        sender = senders[rank]
        sender.begin(manifest, version)
        for bucket in manifest.buckets:
            if sender.sender_of(bucket) == rank:
                flat = torch.cat([tensors[entry.name].reshape(-1) for entry in bucket.entries])
                room = sender.acquire_buffer(flat.numel(), flat.dtype)
                sender.send(bucket, flat if room is None else room.copy_(flat))
        return sender.commit()

    with ThreadPoolExecutor(len(senders)) as ranks:
        return dict(zip(senders, ranks.map(send, senders), strict=True))


@pytest.fixture
def staged(loopback: None) -> Iterator[Any]:
    """The senders of two stages, and two engines."""
    address = Address(transport="collective", engines=("a", "b"), host="127.0.0.1", port=free_port(), timeout=10.0)
    peers = [Peer(address, index) for index in range(2)]
    senders = {rank: FlipsCollective(address, rank) for rank in (0, 2)}
    senders[2]._has_rooms = True  # as on GPUs
    for peer in peers:
        peer.answer()
    yield senders, peers
    for peer in peers:
        peer.close()
    for sender in senders.values():
        sender.close()


def test_each_stage_sends_its_own_buckets_and_engines_take_them_in_order(staged: Any) -> None:
    senders, peers = staged
    groups = []
    for version in (1, 2):
        for peer in peers:
            peer.order(version, senders=SENDERS)
        assert push_from(senders, weights(version), version) == {0: {"a": "", "b": ""}, 2: {}}
        for peer in peers:
            assert peer.answer() == {"version": version, "error": "", "sums": sums_of(weights(version))}
        groups.append([sender._group for sender in senders.values()])
    assert groups[0] == groups[1]  # kept open


@pytest.mark.parametrize("act", ["refuse", "fail", "die"])
def test_an_engine_that_fails_one_of_several_senders_keeps_no_other_from_the_next_update(staged: Any, act: str) -> None:
    senders, peers = staged
    peers[0].order(1, senders=SENDERS)
    peers[1].order(1, act, senders=SENDERS)
    told = push_from(senders, weights(1), 1)
    assert told[0]["b"] != "" and told[2] == {}
    first = peers[0].answer()
    assert told[0]["a"] == first["error"] and (act == "die" or first["error"] == "")
    if act == "die":
        for sender in senders.values():
            sender.give_up("b", 2, "its process died")
    else:
        assert peers[1].answer()["error"] == told[0]["b"]
        peers[1].order(2, senders=SENDERS)
    peers[0].order(2, senders=SENDERS)
    assert push_from(senders, weights(2), 2)[0] == {"a": "", "b": "its process died" if act == "die" else ""}
    assert peers[0].answer() == {"version": 2, "error": "", "sums": sums_of(weights(2))}


def test_a_bit_flipped_on_the_way_from_the_second_sender_is_refused(staged: Any) -> None:
    senders, peers = staged
    senders[2].flips = True
    for peer in peers:
        peer.order(1, senders=SENDERS)
    told = push_from(senders, weights(1), 1)
    errors = [peer.answer()["error"] for peer in peers]
    assert all("bucket 1 of version 1 was damaged in transit" in error for error in errors)
    assert told == {0: dict(zip(("a", "b"), errors, strict=True)), 2: {}}


def test_an_engine_that_takes_all_from_one_sender_is_refused_where_there_are_two(staged: Any) -> None:
    senders, peers = staged
    peers[0].order(1, senders=SENDERS)
    peers[1].order(1)
    told = push_from(senders, weights(1), 1)
    assert told[0]["a"] == "" and "manifests differ" in told[0]["b"]
    assert peers[0].answer()["version"] == 1


def test_a_sender_that_breaks_ends_the_update_of_all_and_the_next_one_goes_on(staged: Any) -> None:
    senders, peers = staged

    def broken(flat: torch.Tensor, digest: torch.Tensor) -> None:
        raise RuntimeError("no memory")

    for peer in peers:
        peer.order(1, senders=SENDERS)
    senders[2].transmit = broken
    began = time.monotonic()
    told = push_from(senders, weights(1), 1)
    assert time.monotonic() - began < 8  # and not the timeout
    for name, peer in zip(("a", "b"), peers, strict=True):
        error = peer.answer()["error"]
        # The latter where the sender has broken before the engine has met it.
        assert re.match(r"(.*bucket 1 of version 1 did not arrive|cannot join the update to version 1): ", error), error
        assert told[0][name] == error
    del senders[2].transmit
    for peer in peers:
        peer.order(2, senders=SENDERS)
    assert push_from(senders, weights(2), 2)[0] == {"a": "", "b": ""}
    assert [peer.answer()["sums"] for peer in peers] == [sums_of(weights(2))] * 2


def test_a_version_that_an_earlier_run_left_on_disk_is_not_read(tmp_path: Path) -> None:
    address = Address(transport="disk", engines=("e",), path=str(tmp_path), timeout=0.2)
    push(open_sender(address), weights(1), 5)  # nobody reads it: it stays
    assert (tmp_path / "v00000005" / "manifest.json").exists()
    receiver = open_receiver(address, index=0)
    with pytest.raises(Exception, match=r"v00000005 was not written within 0.4 s; raise cluster.timeout, "):
        next(iter(receiver.buckets(manifest_of(), 5)))


def leave_words(directory: Path, **said: Any) -> None:
    """Of an engine, in the place where the sender looks for them."""
    known = {"is": "done", "version": 5, "error": "", "token": "", "digest": manifest_of().digest, "holds": ""}
    (directory / "engine-0.json").write_text(json.dumps({**known, **said}))


@pytest.mark.parametrize("error", ["", "an earlier run's"])
def test_an_answer_that_an_earlier_run_left_on_disk_is_not_this_ones(tmp_path: Path, error: str) -> None:
    leave_words(tmp_path, nonce="old", error=error)
    address = Address(transport="disk", engines=("e",), path=str(tmp_path), timeout=0.2)
    assert push(open_sender(address), weights(1), 5) == {"e": "did not commit version 5: no answer within 0.2 s"}


@pytest.mark.parametrize("act", ["load", "refuse"])
def test_an_engine_is_heard_though_an_earlier_run_left_an_answer(tmp_path: Path, act: str) -> None:
    leave_words(tmp_path, nonce="old", error="an earlier run's")
    address = Address(transport="disk", engines=("e",), path=str(tmp_path), timeout=30.0)
    peer = Peer(address, 0)
    try:
        peer.answer()
        sender = open_sender(address)
        with ThreadPoolExecutor(1) as trainer:
            pushing = trainer.submit(push, sender, weights(1), 5)
            while not (tmp_path / "v00000005").exists():
                time.sleep(0.01)
            peer.order(5, act)
            error = "this engine does not want it" if act == "refuse" else ""
            assert peer.answer()["error"] == error
            assert pushing.result() == {"e": error}
        sender.close()
        assert not list(tmp_path.glob("v*"))  # no copy of the weights stays
    finally:
        peer.close()


def test_a_receiver_that_cannot_be_admitted_is_an_entry_and_no_exception(tmp_path: Path) -> None:
    leave_words(tmp_path, nonce="not/there", **{"is": "ask"})  # as if the version's directory were gone
    address = Address(transport="disk", engines=("e",), path=str(tmp_path), timeout=10.0)
    assert push(open_sender(address), weights(1), 5)["e"].startswith("cannot admit e to ")


def test_an_answer_that_cannot_be_read_yet_is_waited_for_and_no_exception(tmp_path: Path) -> None:
    (tmp_path / "engine-0.json").write_text('{"version": 5, "no')  # as one that is replaced on a shared disk may be
    address = Address(transport="disk", engines=("e",), path=str(tmp_path), timeout=0.3)
    assert push(open_sender(address), weights(1), 5)["e"] == "did not commit version 5: no answer within 0.3 s"


def test_a_disk_that_cannot_be_written_is_an_entry_for_every_engine_and_no_exception(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    address = Address(transport="disk", engines=("e", "f"), path=str(tmp_path / "file"), timeout=0.2)
    engines = push(open_sender(address), weights(1), 1)
    assert set(engines) == {"e", "f"} and all(reason.startswith("cannot write") for reason in engines.values())


@pytest.mark.parametrize("transport", ["disk", "delta"])
def test_engines_hear_that_the_disk_is_full_and_nothing_fills_it_further(
    transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "v00000001.partial").mkdir()  # of a run that was killed
    address = Address(transport=transport, engines=("e",), path=str(tmp_path), timeout=30.0)
    sender, full = open_sender(address), disk_transport.save_file

    def save_file(tensors: dict[str, torch.Tensor], path: Path) -> None:
        if "bucket-00001" in path.name:
            raise OSError(28, "No space left on device")
        full(tensors, path)

    peer = Peer(address, 0)
    try:
        peer.answer()
        with monkeypatch.context() as patch:
            patch.setattr(disk_transport, "save_file", save_file)
            peer.order(2)
            engines = push(sender, weights(2), 2)
        assert "bucket-00001.safetensors: [Errno 28] No space left on device" in engines["e"]
        assert peer.answer()["error"] == engines["e"]
        assert engines["e"].startswith("the trainer could not send version 2: cannot write ")
        left = [path.name for path in tmp_path.glob("v*/*") if not path.name.startswith("for-")]
        assert left == ["manifest.json"]
        peer.order(3)
        assert push(sender, weights(3), 3) == {"e": ""}
        assert [path.name for path in tmp_path.glob("v*")] == ["v00000003"]
    finally:
        peer.close()
        sender.close()


@pytest.mark.parametrize("transport", ["disk", "delta"])
def test_an_update_of_which_not_even_the_end_can_be_written_leaves_nothing(
    transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: Mapping[str, Any]) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk_transport, "_write_json", full)
    address = Address(transport=transport, engines=("e",), path=str(tmp_path), timeout=30.0)
    (reason,) = push(open_sender(address), weights(1), 1).values()
    assert reason == f"cannot write {tmp_path}/v00000001: [Errno 28] No space left on device"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("transport", ["disk", "delta"])
def test_engines_hear_at_once_that_the_end_could_not_be_written_where_there_is_room_for_that(
    transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried, written = [], disk_transport._write_json

    def full_at_first(path: Path, data: Mapping[str, Any]) -> None:
        tried.append(path)
        if len(tried) == 1:
            raise OSError(28, "No space left on device")
        written(path, data)

    address = Address(transport=transport, engines=("e",), path=str(tmp_path), timeout=30.0)
    sender, peer = open_sender(address), Peer(address, 0)
    try:
        peer.answer()
        monkeypatch.setattr(disk_transport, "_write_json", full_at_first)
        peer.order(1)
        engines = push(sender, weights(1), 1)
        reason = f"cannot write {tmp_path}/v00000001: [Errno 28] No space left on device"
        assert engines == {"e": f"the trainer could not send version 1: {reason}"}
        assert peer.answer()["error"] == engines["e"]
    finally:
        peer.close()
        sender.close()


@pytest.mark.parametrize("transport", ["disk", "delta"])
def test_a_rank_that_does_not_send_takes_nothing_away_as_it_closes(transport: str, tmp_path: Path) -> None:
    address = Address(transport=transport, engines=(), path=str(tmp_path), timeout=1.0)
    sends, idle = open_sender(address, rank=0), open_sender(address, rank=1)
    sends.begin(manifest_of(), 1)
    idle.close()
    for bucket in manifest_of().buckets:
        sends.send(bucket, torch.zeros(bucket.numel))
    assert sends.commit() == {}
    idle.close()
    assert len(list(tmp_path.glob("v*/bucket-*"))) == len(manifest_of().buckets)
    sends.close()
    assert list(tmp_path.glob("v*")) == []


def test_a_store_that_cannot_be_opened_is_an_entry_for_every_engine_and_no_exception() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = Address(
            transport="collective", engines=("e",), host="127.0.0.1", port=taken.getsockname()[1], timeout=1.0
        )
        assert push(open_sender(address), weights(1), 1)["e"].startswith(
            f"the collective failed: port {address.port}, chosen for sending weights, is in use: "
        )


def test_memory_that_is_still_read_is_not_given_out_again() -> None:
    class Wire:
        """A group whose broadcasts are done when they are asked for."""

        def __init__(self) -> None:
            self.started = 0
            self.finished: list[int] = []

        def start(self, *tensors: torch.Tensor) -> list[int]:
            self.started += 1
            return [self.started]

        def finish(self, works: list[int]) -> None:
            self.finished += works

        def abort(self) -> None:
            pass

    sender = CollectiveSender(Address(transport="collective", engines=("a",)))
    sender.manifest = build_manifest([("a", (4,))], dtype="float32", bucket_bytes=64)
    sender._has_rooms, sender._group = True, (wire := Wire())
    (bucket,) = sender.manifest.buckets
    rooms = []
    for number in range(5):
        room = sender.acquire_buffer(4, torch.float32)
        assert wire.finished == list(range(1, number))  # that of the bucket before may still be under way
        assert room is not None
        rooms.append(room.data_ptr())
        sender.send(bucket, room.fill_(number))
    assert rooms[0] != rooms[1] and rooms == [*rooms[:2], *rooms[:2], rooms[0]]
    sender.commit()
    assert sorted(wire.finished) == [1, 2, 3, 4, 5]


def test_a_store_takes_over_the_socket_that_holds_its_port() -> None:
    with socket.socket() as kept:
        kept.bind(("", 0))
        kept.listen()
        address = Address(
            transport="collective",
            engines=("e",),
            host="127.0.0.1",
            port=kept.getsockname()[1],
            listening=kept.detach(),
            timeout=1.0,
        )
    # Somebody reached it: what is missed is an engine, and not the store.
    assert push(open_sender(address), weights(1), 1)["e"] == "did not join the update to version 1 within 1 s"


def test_the_in_process_sender_hands_over_every_tensor_and_reports_a_failing_load() -> None:
    got: dict[str, torch.Tensor] = {}
    sent = weights(1)

    def load(tensors: Mapping[str, torch.Tensor]) -> None:
        got.update({name: tensor.clone() for name, tensor in tensors.items()})

    assert push(InProcessSender(load), sent, 1) == {"engine-0": ""}
    assert sums_of(got) == sums_of(sent)

    def broken(tensors: Mapping[str, torch.Tensor]) -> None:
        raise RuntimeError("no room")

    assert push(InProcessSender(broken, engine="mine"), sent, 2) == {"mine": "RuntimeError: no room"}


def test_an_unknown_transport_names_the_known_ones() -> None:
    with pytest.raises(PluginNotFound, match="unknown transport 'pigeon'; installed: collective, delta, disk, ipc"):
        open_sender(Address(transport="pigeon", engines=()))
