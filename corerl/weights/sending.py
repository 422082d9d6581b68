"""One update of one rank: what it sends is summed, and a failing transport does not get the ranks out of step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

from corerl.messages import message_of
from corerl.weights.manifest import Bucket, Manifest
from corerl.weights.transport import Address, WeightSender
from corerl.weights.verify import bit_sums

T = TypeVar("T")


class Sending(WeightSender):
    """What a backend sends to. It passes all to the transport's sender until that fails; then it closes that, so that
    receivers notice, goes on without sending, and `finish` says why for every engine."""

    def __init__(self, sender: WeightSender, address: Address, rank: int, *, verify: bool = False) -> None:
        """With `verify`, sum what this rank sends; if all ranks send the same, only rank 0 sums."""
        self._sender = sender
        self._address = address
        self._rank = rank
        self._verify = verify
        self.sums: dict[str, int] = {}
        self.error = ""  # why this rank can no longer send this update

    def sender_of(self, bucket: Bucket) -> int | None:
        return self._sender.sender_of(bucket)

    def open(self, manifest: Manifest, version: int) -> None:
        self._try(lambda: self._sender.open(manifest, version))

    def acquire_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        return self._try(lambda: self._sender.acquire_buffer(numel, dtype))

    def send(self, bucket: Bucket, flat: torch.Tensor) -> None:
        if self._verify and (self.sender_of(bucket) or 0) == self._rank:
            self.sums |= bit_sums(bucket.views(flat))  # before sending: afterwards the transport may reuse the memory
        self._try(lambda: self._sender.send(bucket, flat))

    def finish(self) -> Mapping[str, str]:
        missed = self._try(self._sender.finish)
        self.sent = self._sender.sent
        return dict.fromkeys(self._address.engines, self.error) if missed is None else missed

    def close(self) -> None:
        self._sender.close()

    def _try(self, call: Callable[[], T]) -> T | None:
        if self.error:
            return None
        try:
            return call()
        except Exception as error:
            self.error = f"the trainer could not send the weights: {message_of(error)}"
            self.close()
            return None
