"""What handing over memory promises besides: two buffers, one handle for each, and engines that die at once."""

from __future__ import annotations

import socket
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from corerl.errors import WeightUpdateError
from corerl.plugin.transports import open_receiver, open_sender
from corerl.weights import shared
from corerl.weights.manifest import Manifest, build_manifest
from corerl.weights.shared import opened
from corerl.weights.transport import Address
from corerl.weights.transports import ipc
from corerl.weights.transports.ipc import IpcReceiver, IpcSender
from tests.machine import paced
from tests.weights.transports.test_transports import Peer, manifest_of, push, sums_of, weights

FOUR = build_manifest([(name, (4,)) for name in "abcd"], dtype="float32", bucket_bytes=16)  # a bucket each


def address_of(*engines: str, senders: tuple[int, ...] = (), timeout: float = 20.0) -> Address:
    return Address(
        transport="ipc",
        engines=engines,
        token=uuid.uuid4().hex,
        senders=senders or (0,) * len(engines),
        timeout=timeout,
    )


class Reader:
    """An engine in a thread, which loads a bucket when it is told to; `seen` holds copies."""

    def __init__(self, receiver: Any, manifest: Manifest, version: int, error: str = "") -> None:
        self.go = threading.Semaphore(0)
        self.seen: list[list[float]] = []
        self.views: list[torch.Tensor] = []
        self.failure = ""
        self.thread = threading.Thread(target=self._read, args=(receiver, manifest, version, error))
        self.thread.start()

    def _read(self, receiver: Any, manifest: Manifest, version: int, error: str) -> None:
        try:
            for _, flat in receiver.buckets(manifest, version):
                self.views.append(flat)
                self.go.acquire()
                self.seen.append(flat.tolist())
        except WeightUpdateError as failure:
            self.failure = failure.message
        try:
            receiver.acknowledge(version, self.failure or error)
        except WeightUpdateError as failure:
            self.failure = self.failure or failure.message


@pytest.fixture
def pair() -> Iterator[tuple[IpcSender, IpcReceiver]]:
    address = address_of("e")
    sender, receiver = IpcSender(address, 0), IpcReceiver(address, 0)
    yield sender, receiver
    sender.close()
    receiver.close()


def test_a_bucket_is_gathered_while_the_one_before_is_loaded_and_no_further(pair: Any) -> None:
    sender, receiver = pair
    reader = Reader(receiver, FOUR, 1)
    sender.begin(FOUR, 1)
    places, filled = [], threading.Semaphore(0)

    def gather() -> None:
        for bucket in FOUR.buckets:
            room = sender.acquire_buffer(4, torch.float32)
            room.fill_(float(bucket.index))
            places.append(room.data_ptr())
            filled.release()
            sender.send(bucket, room)

    gathering = threading.Thread(target=gather)
    gathering.start()
    assert filled.acquire(timeout=paced(20)) and filled.acquire(timeout=paced(20))
    assert not filled.acquire(timeout=0.3)  # the engine has loaded neither: both buffers are taken
    for _ in FOUR.buckets:
        reader.go.release()
    gathering.join()
    assert sender.commit() == {"e": ""}
    reader.thread.join()
    assert reader.seen == [[float(index)] * 4 for index in range(4)]  # each as it was sent, though two share memory
    assert places[0] == places[2] != places[1] == places[3]


def test_a_rank_counts_the_bytes_that_it_has_sent_and_one_without_engines_none(pair: Any) -> None:
    sender, receiver = pair
    elsewhere = IpcSender(address_of("e", "f", senders=(1, 2)), 0)
    for version in (1, 2):
        reader = Reader(receiver, FOUR, version)
        for each in (sender, elsewhere):
            each.begin(FOUR, version)
            for bucket in FOUR.buckets:
                reader.go.release()
                each.send(bucket, torch.zeros(4))
            each.commit()
        reader.thread.join()
        assert (sender.sent, elsewhere.sent) == (4 * 16, 0)
    elsewhere.close()


def test_what_is_gathered_is_the_memory_that_the_engine_reads_and_each_buffer_has_one_handle(
    pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = pair
    given: list[Mapping[str, Any]] = []
    handle = shared.SharedOnHost.handle
    monkeypatch.setattr(shared.SharedOnHost, "handle", lambda self: (given.append(self), handle(self))[1])
    for version in (1, 2, 3):
        reader = Reader(receiver, FOUR, version)
        for _ in FOUR.buckets:
            reader.go.release()
        sender.begin(FOUR, version)
        for bucket in FOUR.buckets:
            room = sender.acquire_buffer(4, torch.float32)
            room.fill_(float(version))
            sender.send(bucket, room)
        assert sender.commit() == {"e": ""}
        reader.thread.join()
        room[0] = 17.0  # of the last bucket, whose view the reader has kept
        assert reader.views[-1][0] == 17.0
    assert len(given) == 2


def test_an_update_in_larger_buckets_than_the_one_before_arrives(pair: Any) -> None:
    sender, receiver = pair
    two = build_manifest([(name, (8,)) for name in "ab"], dtype="float32", bucket_bytes=32)
    for version, manifest in enumerate([FOUR, two, FOUR], start=1):
        reader = Reader(receiver, manifest, version)
        reader.go.release(len(manifest.buckets))
        sender.begin(manifest, version)
        for bucket in manifest.buckets:
            sender.send(bucket, torch.full((bucket.numel,), float(bucket.index)))
        assert sender.commit() == {"e": ""}
        reader.thread.join()
        assert reader.seen == [[float(bucket.index)] * bucket.numel for bucket in manifest.buckets]


def test_each_rank_sends_to_its_own_receivers_and_an_engine_over_two_ranks_commits_with_both() -> None:
    address = address_of("a", "a", "b", senders=(0, 1, 1))
    senders = [open_sender(address, rank=rank) for rank in range(3)]
    receivers = [open_receiver(address, index=index) for index in range(3)]
    manifest = manifest_of()
    assert {sender.sender_of(bucket) for sender in senders for bucket in manifest.buckets} == {None}
    for version, reason in ((1, ""), (2, "it has another shape")):
        readers = [
            Reader(receiver, manifest, version, reason if index == 1 else "")
            for index, receiver in enumerate(receivers)
        ]
        for reader in readers:
            for _ in manifest.buckets:
                reader.go.release()
        answers = [push(sender, weights(version), version) for sender in senders]
        assert answers == [{"a": ""}, {"a": reason, "b": ""}, {}]
        for reader in readers:
            reader.thread.join()
            flat = torch.cat([tensor.flatten() for tensor in weights(version).values()])
            assert torch.equal(torch.tensor([value for seen in reader.seen for value in seen]), flat)
    for end in (*senders, *receivers):
        end.close()


def test_one_rank_sends_where_all_engines_are_on_its_device() -> None:
    sender = open_sender(address_of("a", "b", senders=(1, 1)), rank=1)
    assert {sender.sender_of(bucket) for bucket in manifest_of().buckets} == {1}


@pytest.mark.processes
def test_an_engine_that_dies_while_it_loads_is_known_at_once_and_its_successor_gets_the_next_update() -> None:
    address = address_of("a", "b", timeout=120.0)
    peers = [Peer(address, index) for index in range(2)]
    sender = open_sender(address)
    try:
        for peer in peers:
            peer.answer()
        peers[0].order(1)
        peers[1].order(1, "die")
        began = time.monotonic()
        engines = push(sender, weights(1), 1)
        assert time.monotonic() - began < 60  # and not the timeout
        assert engines == {
            "a": "",
            "b": "closed its connection: its process ended, or it gave up on the update",
        }
        assert peers[0].answer()["version"] == 1
        peers[1].close()
        peers[1] = Peer(address, 1)
        peers[1].answer()
        for peer in peers:
            peer.order(2)
        assert push(sender, weights(2), 2) == {"a": "", "b": ""}
        assert [peer.answer()["sums"] for peer in peers] == [sums_of(weights(2))] * 2
    finally:
        for peer in peers:
            peer.close()
        sender.close()


@pytest.mark.parametrize("early", [False, True])
def test_an_engines_error_of_any_length_is_an_entry_and_the_next_update_arrives(pair: Any, early: bool) -> None:
    sender, receiver = pair
    error = "Error(s) in loading state_dict: " + "\u65e5" * 200_000  # six bytes each on their way

    def fails() -> None:
        for _ in range(1 if early else len(FOUR.buckets)):
            next(buckets)
        receiver.acknowledge(1, error)

    buckets = receiver.buckets(FOUR, 1)
    thread = threading.Thread(target=fails)
    thread.start()
    told = push_four(sender, 1)["e"]
    thread.join()
    assert told == error[: len(told)] and len(told) > 1000
    reader = Reader(receiver, FOUR, 2)
    reader.go.release(len(FOUR.buckets))
    assert push_four(sender, 2) == {"e": ""}
    reader.thread.join()


def test_an_engine_that_is_given_up_is_waited_for_no_more() -> None:
    sender = open_sender(address_of("a", timeout=120.0))
    threading.Timer(0.2, sender.give_up, ("a", 1, "its process died")).start()
    began = time.monotonic()
    assert push(sender, weights(1), 1) == {"a": "its process died"}
    assert time.monotonic() - began < 60
    sender.close()


def test_an_engine_is_given_up_in_one_update_and_takes_the_next_however_late_that_is_told(pair: Any) -> None:
    sender, receiver = pair
    sender.give_up("e", 1, "its process died")
    reader = Reader(receiver, FOUR, 2)
    reader.go.release(len(FOUR.buckets))
    assert push_four(sender, 2) == {"e": ""}
    reader.thread.join()


def test_an_engine_hears_why_the_trainer_cannot_go_on_and_takes_the_next_update(
    pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = pair
    share, shared_so_far = ipc.share, []

    def full(nbytes: int, device: torch.device) -> Any:
        if shared_so_far:
            raise RuntimeError("CUDA out of memory. Tried to allocate 1.00 GiB")
        shared_so_far.append(nbytes)
        return share(nbytes, device)

    reader = Reader(receiver, FOUR, 1)
    reader.go.release(len(FOUR.buckets))
    reason = (
        "the trainer does not have enough memory to send the weights: CUDA out of memory. Tried to allocate 1.00 GiB"
    )
    with monkeypatch.context() as patch:
        patch.setattr(ipc, "share", full)
        sender.begin(FOUR, 1)
        for bucket in FOUR.buckets:
            if sender.acquire_buffer(4, torch.float32) is not None:
                sender.send(bucket, torch.zeros(4))
        assert sender.commit() == {"e": reason}
    reader.thread.join()
    assert reader.failure == reason
    reader = Reader(receiver, FOUR, 2)
    reader.go.release(len(FOUR.buckets))
    assert push_four(sender, 2) == {"e": ""}
    reader.thread.join()


def test_an_engine_that_stops_loading_is_left_out_within_the_timeout(pair: Any) -> None:
    address = address_of("e", timeout=0.5)
    sender, receiver = IpcSender(address, 0), IpcReceiver(address, 0)
    reader = Reader(receiver, FOUR, 1)  # and never goes on
    sender.begin(FOUR, 1)
    for bucket in FOUR.buckets:
        sender.send(bucket, torch.zeros(4))
    assert sender.commit() == {"e": "did not load bucket 0 within 0.5 s"}
    for _ in FOUR.buckets:
        reader.go.release()
    reader.thread.join()
    assert reader.failure == "did not load bucket 0 within 0.5 s"
    sender.close()


def test_an_engine_that_failed_early_takes_the_next_update_though_buckets_were_under_way(pair: Any) -> None:
    sender, receiver = pair

    def fail() -> None:
        assert next(receiver.buckets(FOUR, 1))[0] == FOUR.buckets[0]
        receiver.acknowledge(1, "no room")

    failing = threading.Thread(target=fail)
    failing.start()
    sender.begin(FOUR, 1)
    for bucket in FOUR.buckets:
        sender.send(bucket, torch.zeros(4))
    assert sender.commit() == {"e": "no room"}
    failing.join()
    reader = Reader(receiver, FOUR, 2)
    for _ in FOUR.buckets:
        reader.go.release()
    sender.begin(FOUR, 2)
    for bucket in FOUR.buckets:
        sender.send(bucket, torch.full((4,), float(bucket.index)))
    assert sender.commit() == {"e": ""}
    reader.thread.join()
    assert reader.seen == [[float(index)] * 4 for index in range(4)]


def test_an_engine_that_comes_after_the_first_bucket_is_sent_away_and_takes_the_next_update() -> None:
    address = address_of("early", "late", timeout=1.0)
    sender = IpcSender(address, 0)
    receivers = [IpcReceiver(address, index) for index in range(2)]

    def load(receiver: IpcReceiver, version: int) -> Reader:
        reader = Reader(receiver, FOUR, version)
        for _ in FOUR.buckets:
            reader.go.release()
        return reader

    early = load(receivers[0], 1)
    sender.begin(FOUR, 1)  # waits a second for the other one
    sender.send(FOUR.buckets[0], torch.zeros(4))
    late = load(receivers[1], 1)
    for bucket in FOUR.buckets[1:]:
        sender.send(bucket, torch.zeros(4))
    assert sender.commit() == {"early": "", "late": "did not join the update to version 1 within 1 s"}
    early.thread.join()

    early = load(receivers[0], 2)
    assert push_four(sender, 2)["early"] == ""  # it hears now at the latest what the late one has asked for
    early.thread.join()
    late.thread.join()
    assert late.failure in (
        "version 1 is already being sent without this engine",
        "the trainer is sending version 2, not 1",
    )

    readers = [load(receiver, 3) for receiver in receivers]
    assert push_four(sender, 3) == {"early": "", "late": ""}
    for reader in readers:
        reader.thread.join()
    for end in (sender, *receivers):
        end.close()


def push_four(sender: IpcSender, version: int) -> Mapping[str, str]:
    sender.begin(FOUR, version)
    for bucket in FOUR.buckets:
        sender.send(bucket, torch.zeros(4))
    return sender.commit()


def test_memory_of_another_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "device_id", lambda: "GPU-1")
    with pytest.raises(WeightUpdateError, match="the shared weights are on GPU GPU-0, but this process uses GPU-1; "):
        opened({"kind": "cuda", "device": "GPU-0", "parts": []}, [])


def test_a_process_of_another_user_is_neither_heard_nor_listened_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipc, "_same_user", lambda connection: False)
    address = address_of("e", timeout=0.3)
    sender, receiver = IpcSender(address, 0), IpcReceiver(address, 0)
    sender._bind()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(ipc._name(address, 0))
        stranger.settimeout(0.3)
        sender.begin(FOUR, 1)
        assert stranger.recv(1) == b""  # closed
    assert sender.commit() == {"e": "did not join the update to version 1 within 0.3 s"}
    with pytest.raises(WeightUpdateError, match="^a process of another user is listening in place of the trainer$"):
        next(iter(receiver.buckets(FOUR, 2)))
    sender.close()


def test_a_sender_that_is_not_there_is_named_within_the_timeout() -> None:
    receiver = open_receiver(address_of("e", senders=(3,), timeout=0.2), index=0)
    with pytest.raises(WeightUpdateError, match="trainer rank 3 did not start listening within 0.2 s"):
        next(iter(receiver.buckets(FOUR, 1)))
