"""The receiver's side of a weight update: connect, load the buckets, report the outcome to the sender."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from corerl.messages import message_of
from corerl.plugin.transports import open_receiver
from corerl.weights.manifest import Bucket, Manifest
from corerl.weights.transport import Address

if TYPE_CHECKING:
    import torch

    from corerl.weights.transports.protocol import Receiver


class Receiving:
    """Receives weight updates, keeping the connection while the address stays the same."""

    def __init__(self, index: int) -> None:
        self._index = index  # among the receivers of all engines
        self._receiver: Receiver | None = None
        self._address: Address | None = None

    def transfer(
        self,
        manifest: Manifest,
        version: int,
        address: Address,
        *,
        refused: str = "",
        check: Callable[[Manifest], str] = lambda manifest: "",
        load: Callable[[Bucket, torch.Tensor], None],
    ) -> tuple[int, str]:
        """Receive one update; returns the bytes received and the error, or "". Never raises.

        If `refused` is not empty, or `check` refuses the manifest, the sender is told why and nothing is loaded.
        """
        received, error = 0, refused
        try:
            receiver = self._connect(address)
            try:
                error = error or check(manifest)
                for bucket, flat in receiver.buckets(manifest, version) if not error else ():
                    try:
                        load(bucket, flat)
                        received += flat.numel() * flat.element_size()
                    finally:
                        del flat  # the sender reuses this memory after the acknowledgment
            except Exception as failure:  # whatever it is, the sender must be told
                error = message_of(failure)
            receiver.acknowledge(version, error)
        except Exception as failure:  # of the connection itself; an earlier error takes precedence
            error = error or message_of(failure)
        return received, error

    def close(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
        self._receiver = None

    def _connect(self, address: Address) -> Receiver:
        if self._receiver is None or address != self._address:
            self.close()
            self._receiver, self._address = open_receiver(address, index=self._index), address
        return self._receiver
