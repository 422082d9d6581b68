"""Who takes part in an update and how it ends for each engine, on messages that the test passes by hand."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch

from corerl.errors import WeightUpdateError
from corerl.weights.checksums import checksum
from corerl.weights.manifest import Bucket, Manifest, build_manifest
from corerl.weights.transport import Address
from corerl.weights.transports.protocol import Receiver, Sender
from tests.machine import paced

TWO = build_manifest([("a", (4,)), ("b", (4,))], dtype="float32", bucket_bytes=16)
OTHER = build_manifest([("a", (4,))], dtype="float32", bucket_bytes=16)


class ByHand(Sender):
    """Hears what the test has put into `said`, and notes what it says."""

    def __init__(self, *engines: str, timeout: float = 20.0, meets: bool = True) -> None:
        super().__init__(Address(transport="by hand", engines=engines, timeout=timeout), range(len(engines)))
        self.said: list[Callable[[], None]] = []
        self.log: list[str] = []
        self.listened: list[float] = []
        self._meets = meets

    def open(self) -> None:
        self.log.append("open")
        if self._meets:
            self.meet()

    def listen(self, seconds: float) -> None:
        self.listened.append(seconds)
        if not self.said:
            time.sleep(min(seconds, 0.01))
        while self.said:
            self.said.pop(0)()

    def answer(self, index: int, question: Mapping[str, Any], error: str) -> None:
        self.log.append(f"{index}: {error or 'go'}")

    def left_out(self, index: int, reason: str) -> None:
        self.log.append(f"{index} is left out")

    def send(self, bucket: Bucket, flat: torch.Tensor) -> None:
        self.log.append(f"send {bucket.index}")

    def finish(self) -> None:
        self.log.append("finish")
        self.joining = not self._meets

    def release(self) -> None:
        self.log.append("release")

    def close(self) -> None: ...

    def ask(self, index: int, version: int = 1, error: str = "", manifest: Manifest = TWO) -> None:
        question = {"version": version, "digest": manifest.digest, "error": error}
        self.said.append(lambda: self.asked(index, question))

    def commits(self, index: int, error: str = "") -> None:
        self.said.append(lambda: self.done(index, error))


def push(sender: ByHand, version: int = 1, then: Callable[[], None] = lambda: None) -> Mapping[str, str]:
    """`then` is called between the last bucket and the end."""
    sender.begin(TWO, version)
    for bucket in TWO.buckets:
        sender.send(bucket, torch.zeros(4))
    then()
    return sender.commit()


def test_all_join_then_all_is_sent_then_all_are_heard_update_after_update() -> None:
    sender = ByHand("a", "b")
    for version in (1, 2):
        for index in range(2):
            sender.ask(index, version)
        assert push(sender, version, lambda: [sender.commits(index) for index in range(2)] and None) == {
            "a": "",
            "b": "",
        }
    once = ["open", "0: go", "1: go", "send 0", "send 1", "finish", "release"]
    assert sender.log == once * 2


def test_a_refusal_a_failure_and_another_manifest_are_each_an_entry_of_their_own_engine() -> None:
    sender = ByHand("refuses", "fails", "differs", "well")
    sender.ask(0, error="it does not want it")
    sender.ask(1)
    sender.ask(2, manifest=OTHER)
    sender.ask(3)

    def outcomes() -> None:
        sender.commits(3)
        sender.commits(1, "it cannot load it")

    engines = push(sender, then=outcomes)
    differs = engines["differs"]
    assert engines == {"refuses": "it does not want it", "fails": "it cannot load it", "differs": differs, "well": ""}
    assert differs.startswith("differs expects different tensors from those the trainer sends for version 1 (the manif")
    assert sender.log[1:4] == ["1: go", f"2: {differs}", "3: go"]  # who refuses waits for no answer


def test_of_an_engine_over_several_devices_the_first_error_counts() -> None:
    sender = ByHand("a", "a", "b", "b")
    for index in range(4):
        sender.ask(index)

    def outcomes() -> None:
        for index, error in enumerate(["", "the second cannot", "the first cannot", "neither can the second"]):
            sender.commits(index, error)

    assert push(sender, then=outcomes) == {"a": "the second cannot", "b": "the first cannot"}


def test_one_that_does_not_come_is_waited_for_once_and_the_others_get_the_update() -> None:
    sender = ByHand("a", "b", timeout=0.2)
    sender.ask(0)
    began = time.monotonic()
    engines = push(sender, then=lambda: sender.commits(0))
    assert 0.2 <= time.monotonic() - began < paced(5.0)
    assert engines == {"a": "", "b": "did not join the update to version 1 within 0.2 s"}


def test_one_that_comes_after_the_first_bucket_is_sent_away_and_stays_left_out() -> None:
    sender = ByHand("a", "b", timeout=0.1)
    sender.ask(0)

    def late() -> None:
        sender.ask(1)
        sender.commits(0)

    assert push(sender, then=late)["b"] == "did not join the update to version 1 within 0.1 s"
    assert "1: version 1 is already being sent without this engine" in sender.log


def test_one_that_asks_for_another_version_is_told_which_it_is_and_may_ask_for_that() -> None:
    sender = ByHand("a")
    sender.ask(0, version=1)
    sender.ask(0, version=2)
    assert push(sender, 2, lambda: sender.commits(0)) == {"a": ""}
    assert sender.log[1:3] == ["0: the trainer is sending version 2, not 1", "0: go"]


def test_a_frozen_engine_costs_the_time_limit_and_its_name_is_told() -> None:
    sender = ByHand("frozen", "well", timeout=0.2)
    for index in range(2):
        sender.ask(index)
    began = time.monotonic()
    engines = push(sender, then=lambda: sender.commits(1))
    assert 0.2 <= time.monotonic() - began < paced(5.0)
    assert engines == {"frozen": "did not commit version 1: no answer within 0.2 s", "well": ""}
    assert sender.log[-2:] == ["0 is left out", "release"]
    assert 0 < max(sender.listened) <= 0.25  # it sleeps, and looks now and then whether somebody is given up


def test_why_the_trainer_cannot_go_on_is_told_in_place_of_a_silence() -> None:
    sender = ByHand("a", timeout=0.1)
    sender.ask(0)
    engines = push(sender, then=lambda: setattr(sender, "broken", "the disk is full"))
    assert engines == {"a": "did not commit version 1: the disk is full"}


def test_the_first_reason_counts() -> None:
    class Breaks(ByHand):
        """Loses the connection to whom it answers."""

        def answer(self, index: int, question: Mapping[str, Any], error: str) -> None:
            self.drop(index, "the connection broke")

    sender = Breaks("a", "b")
    sender.ask(0)
    sender.ask(1, manifest=OTHER)
    engines = push(sender)
    assert engines["a"] == "the connection broke" and "manifests differ" in engines["b"]


@pytest.mark.parametrize(("joins", "prefix"), [(False, ""), (True, "did not commit version 1: ")])
def test_one_that_is_given_up_from_another_thread_is_waited_for_no_more(joins: bool, prefix: str) -> None:
    sender = ByHand("dead", "well", timeout=60.0)
    sender.ask(1)
    if joins:
        sender.ask(0)
    threading.Timer(0.1, sender.give_up, ("dead", 1, "its process died")).start()
    began = time.monotonic()
    assert push(sender, then=lambda: sender.commits(1)) == {"dead": f"{prefix}its process died", "well": ""}
    assert time.monotonic() - began < 30
    sender.give_up("dead", 1, "its process died")  # as the driver does again and again: another update is another
    for index in range(2):
        sender.ask(index, 2)
    assert push(sender, 2, lambda: [sender.commits(index) for index in range(2)] and None) == {"dead": "", "well": ""}


def test_what_an_engine_has_answered_counts_though_it_is_given_up() -> None:
    sender = ByHand("a")
    sender.ask(0)

    def died() -> None:
        sender.commits(0, "")
        sender.give_up("a", 1, "its process died")

    assert push(sender, then=died) == {"a": ""}


def test_where_a_transport_meets_nobody_before_the_end_engines_join_in_it() -> None:
    sender = ByHand("a", "b", meets=False, timeout=0.2)

    def come() -> None:
        sender.ask(0)
        sender.commits(0)

    assert push(sender, then=come) == {"a": "", "b": "did not commit version 1: no answer within 0.2 s"}
    assert sender.log == ["open", "send 0", "send 1", "finish", "0: go", "1 is left out", "release"]


def test_nobody_is_listened_to_where_nobody_is_awaited() -> None:
    sender = ByHand()
    assert push(sender) == {}
    assert sender.listened == []


class Engine(Receiver):
    """Gets what the test puts into `answer` and `sent`, and notes what it says."""

    def __init__(self, answer: str = "", sent: int | None = None) -> None:
        super().__init__(Address(transport="by hand", engines=("a",)), 0)
        self.log: list[Any] = []
        self._answer, self._sent = answer, sent

    def say(self, what: str, version: int, **content: Any) -> None:
        self.log.append((what, version, content))

    def hear(self, version: int) -> Mapping[str, Any]:
        return {"error": self._answer}

    def receive(self, manifest: Manifest, version: int) -> Iterator[tuple[Bucket, torch.Tensor, int]]:
        for bucket in manifest.buckets:
            flat = torch.full((bucket.numel,), float(bucket.index))
            yield bucket, flat, checksum(flat) if self._sent is None else self._sent

    def close(self) -> None: ...


ASKED = ("ask", 1, {"digest": TWO.digest, "error": ""})


def test_a_receiver_asks_takes_what_it_gets_and_says_how_it_went() -> None:
    for error in ("", "it cannot load it"):
        engine = Engine()
        assert [(bucket.index, flat.tolist()) for bucket, flat in engine.buckets(TWO, 1)] == [
            (0, [0.0] * 4),
            (1, [1.0] * 4),
        ]
        engine.acknowledge(1, error)
        assert engine.log == [ASKED, ("done", 1, {"error": error})]


def test_a_receiver_that_does_not_want_an_update_says_so_and_gets_nothing() -> None:
    for error, told in (("it does not fit", "it does not fit"), ("", "did not read the update")):
        engine = Engine()
        engine.acknowledge(1, error)
        assert engine.log == [("ask", 1, {"digest": "", "error": told})]


def test_a_receiver_that_is_left_out_knows_why_and_tells_nobody_what_the_sender_knows() -> None:
    engine = Engine(answer="version 1 is already being sent without this engine")
    with pytest.raises(WeightUpdateError, match="^version 1 is already being sent without this engine$"):
        list(engine.buckets(TWO, 1))
    engine.acknowledge(1, "whatever")
    assert engine.log == [ASKED]


def test_a_bucket_that_is_damaged_is_not_loaded() -> None:
    engine = Engine(sent=17)
    with pytest.raises(WeightUpdateError, match=r"^bucket 0 of version 1 was damaged in transit: .* but 0x11 was sent"):
        next(iter(engine.buckets(TWO, 1)))


class Lends(Engine):
    """Lends its memory for a bucket, and looks whether it has it back when the next one is asked for."""

    def receive(self, manifest: Manifest, version: int) -> Iterator[tuple[Bucket, torch.Tensor, int]]:
        self.back: list[bool] = []
        for bucket in manifest.buckets:
            lent = torch.zeros(bucket.numel)
            here, flat = weakref.ref(lent), [lent]
            del lent
            yield bucket, flat.pop(), checksum(torch.zeros(bucket.numel))
            self.back.append(here() is None)


def test_a_buckets_memory_is_held_no_longer_than_the_engine_holds_it() -> None:
    engine = Lends()
    for _, flat in engine.buckets(TWO, 1):
        del flat
    assert engine.back == [True, True]
