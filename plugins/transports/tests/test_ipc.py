"""What handing over memory promises besides: two buffers, one handle for each, and only processes of one user."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from corerl.errors import WeightUpdateError
from corerl.weights import Address, Bucket, build_manifest
from corerl_testing import open_sender
from corerl_transports import ipc, shared
from corerl_transports.ipc import GONE, IpcReceiver, IpcSender
from corerl_transports.shared import opened
from tests.machine import paced
from tests.weights.ends import MANIFEST, Engine, address_of, no_room, push, same, weights

FOUR = build_manifest([(name, (4,)) for name in "abcd"], dtype="float32", bucket_bytes=16)  # a bucket each
ZEROS = {name: torch.zeros(4) for name in "abcd"}


@pytest.fixture
def pair() -> Iterator[tuple[Address, IpcSender, Engine]]:
    address, engine = address_of("ipc", "e"), Engine()
    sender = IpcSender(address, 0)
    yield address, sender, engine
    sender.close()
    engine.close()


def test_one_bucket_is_gathered_while_the_previous_one_loads(pair: Any) -> None:
    address, sender, engine = pair
    go, filled = threading.Semaphore(0), threading.Semaphore(0)
    seen: list[list[float]] = []
    places: list[int] = []

    def load(bucket: Bucket, flat: torch.Tensor) -> None:
        go.acquire()
        seen.append(flat.tolist())

    def gather() -> None:
        sender.open(FOUR, 1)
        for bucket in FOUR.buckets:
            room = sender.acquire_buffer(4, torch.float32)
            room.fill_(float(bucket.index))
            places.append(room.data_ptr())
            filled.release()
            sender.send(bucket, room)

    received = engine.take(address, 1, FOUR, load)
    gathering = threading.Thread(target=gather)
    gathering.start()
    assert filled.acquire(timeout=paced(20)) and filled.acquire(timeout=paced(20))
    assert not filled.acquire(timeout=0.3)  # the engine has loaded neither: both buffers are taken
    go.release(len(FOUR.buckets))
    gathering.join()
    assert sender.finish() == {} and received.result() == sender.bytes_sent == 64
    assert seen == [[float(index)] * 4 for index in range(4)]  # each as it was sent, though two share memory
    assert places[0] == places[2] != places[1] == places[3]


def test_an_update_in_larger_buckets_than_the_last_arrives(pair: Any) -> None:
    address, sender, engine = pair
    two = build_manifest([(name, (8,)) for name in "ab"], dtype="float32", bucket_bytes=32)
    for version, manifest in enumerate([FOUR, two, FOUR], start=1):
        sent = {name: torch.full(shape, float(version)) for name, shape in manifest.shapes.items()}
        received = engine.take(address, version, manifest)
        assert push(sender, address, sent, version, manifest=manifest) == {}
        assert received.result() == 64 and same(engine.loaded, sent)


def test_each_rank_sends_to_its_own_receivers() -> None:
    address = address_of("ipc", "a", "a", "b", colocated_ranks=(0, 1, 1))
    senders = [open_sender(address, rank=rank) for rank in range(3)]
    engines = [Engine(index) for index in range(3)]
    assert {sender.sending_rank(bucket) for sender in senders for bucket in MANIFEST.buckets} == {None}
    received = [engine.take(address, 1, load=no_room if index == 1 else None) for index, engine in enumerate(engines)]
    failed = [push(sender, address, weights(1), 1, rank=rank) for rank, sender in enumerate(senders)]
    closed = "closed its connection: its process ended, or it could not load the weights"
    assert failed == [{}, {"a": closed}, {}] and senders[2].bytes_sent == 0
    assert [each.exception() is None for each in received] == [True, False, True]
    assert same(engines[0].loaded, weights(1)) and same(engines[2].loaded, weights(1))
    for end in (*senders, *engines):
        end.close()


def test_an_engine_that_fails_after_all_was_sent_is_told_of(pair: Any) -> None:
    address, sender, engine = pair
    go = threading.Event()

    def fail(bucket: Bucket, flat: torch.Tensor) -> None:
        go.wait()
        no_room(bucket, flat)

    one = build_manifest([("a", (8,))], dtype="float32", bucket_bytes=32)
    received = engine.take(address, 1, one, load=fail)
    sender.open(one, 1)
    sender.send(one.buckets[0], torch.ones(8))
    go.set()
    assert list(sender.finish().values()) == [GONE] and "no room" in str(received.exception())


def test_an_engine_that_stops_loading_is_dropped_in_time() -> None:
    address, engine, go = address_of("ipc", "e", timeout=0.5), Engine(), threading.Event()
    sender = IpcSender(address, 0)
    received = engine.take(address, 1, FOUR, lambda bucket, flat: (go.wait(), None)[1])
    assert push(sender, address, ZEROS, 1, manifest=FOUR) == {"e": "did not load bucket 0 within 0.5 s"}
    go.set()
    with pytest.raises(WeightUpdateError, match="^the (trainer closed the|connection to the trainer)"):
        received.result()
    sender.close()
    engine.close()


def test_memory_of_another_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "device_id", lambda: "GPU-1")
    with pytest.raises(WeightUpdateError, match="the shared weights are on GPU GPU-0, but this process uses GPU-1; "):
        opened({"kind": "cuda", "device": "GPU-0", "parts": []}, [])


def test_processes_of_other_users_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipc, "_same_user", lambda connection: False)
    address = address_of("ipc", "e", timeout=0.3)
    sender, receiver = IpcSender(address, 0), IpcReceiver(address, 0)
    sender._bind()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(ipc._name(address, 0))
        stranger.settimeout(0.3)
        sender.open(FOUR, 1)
        assert stranger.recv(1) == b""  # closed
    assert sender.finish() == {"e": "did not connect within 0.3 s"}
    with pytest.raises(WeightUpdateError, match="^a process of another user is listening in place of the trainer$"):
        next(iter(receiver.buckets(FOUR, 2)))
    sender.close()


def test_a_missing_sender_is_named_within_the_timeout() -> None:
    receiver = IpcReceiver(address_of("ipc", "e", colocated_ranks=(3,), timeout=0.2), 0)
    with pytest.raises(WeightUpdateError, match="trainer rank 3 did not start listening within 0.2 s"):
        next(iter(receiver.buckets(FOUR, 1)))
