from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from corerl.weights.manifest import Bucket, Manifest, build_manifest
from corerl.weights.transport import GuardedSender
from corerl_testing.inprocess import InProcessSender


class Elsewhere(InProcessSender):
    """Sends each bucket from the rank that `senders` names for it."""

    def __init__(self, senders: list[int | None], rank: int) -> None:
        super().__init__(lambda _: None)
        self.senders, self.rank = senders, rank

    def sending_rank(self, bucket: Bucket) -> int | None:
        return self.senders[bucket.index]


@pytest.mark.parametrize(
    ("senders", "summed"),
    [([0, 0], ["ab", ""]), ([0, 1], ["a", "b"]), ([1, 1], ["", "ab"]), ([None, None], ["ab", ""])],
)
def test_each_tensor_is_summed_on_one_rank(senders: list[int | None], summed: list[str]) -> None:
    manifest = build_manifest([("a", (3,)), ("b", (3,))], dtype="float32", bucket_bytes=12)
    found = []
    for rank in range(2):
        sender = GuardedSender(Elsewhere(senders, rank), verify=True)
        sender.open(manifest, 1)
        for bucket in manifest.buckets:
            if sender.sending_rank(bucket) in (None, rank):
                sender.send(bucket, torch.ones(3))
        found.append("".join(sender.sums))
    assert found == summed


class Breaks(InProcessSender):
    """Raises where it is told to; notes what it is asked."""

    def __init__(self, at: str) -> None:
        super().__init__(lambda tensors: None)
        self.at = at
        self.log: list[str] = []

    def _note(self, what: str) -> None:
        self.log.append(what)
        if what == self.at:
            raise RuntimeError("out of memory")

    def open(self, manifest: Manifest, version: int) -> None:
        self._note("open")

    def acquire_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        self._note("acquire")
        return None

    def send(self, bucket: Bucket, flat: torch.Tensor) -> None:
        self._note("send")

    def finish(self) -> Mapping[str, str]:
        self._note("finish")
        return {}

    def close(self) -> None:
        self.log.append("close")


@pytest.mark.parametrize("at", ["open", "acquire", "send", "finish", ""])
def test_a_sender_that_fails_is_closed_and_not_asked_again(at: str) -> None:
    manifest = build_manifest([("a", (3,)), ("b", (3,))], dtype="float32", bucket_bytes=12)
    inside = Breaks(at)
    sender = GuardedSender(inside, verify=True)
    sender.open(manifest, 1)
    for bucket in manifest.buckets:
        assert sender.acquire_buffer(3, torch.float32) is None
        sender.send(bucket, torch.ones(3))
    reason = "the trainer could not send the weights: RuntimeError: out of memory"
    assert sender.finish() == ({"engine-0": reason} if at else {})
    every = ["open", "acquire", "send", "acquire", "send", "finish"]
    assert inside.log == ([*every[: every.index(at) + 1], "close"] if at else every)
    assert sender.sums.keys() == {"a", "b"}  # other ranks' sums are compared with these
