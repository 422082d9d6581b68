"""One receiver's part in a weight update: connect, take the buckets, and tell the sender how it went."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from corerl.errors import CorerlError
from corerl.weights.manifest import Bucket, Manifest
from corerl.weights.transport import Address, WeightReceiver
from corerl.weights.transports import open_receiver

if TYPE_CHECKING:
    import torch


class Receiving:
    """Keeps a connection for all updates that come through one address."""

    def __init__(self, index: int) -> None:
        self._index = index  # of the receiver, among those of all engines
        self._receiver: WeightReceiver | None = None
        self._address: Address | None = None  # of the receiver

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
        """Bytes that came, and what went wrong, or "". Never raises.

        Where the update is `refused`, or `check` refuses its manifest, the sender is told why and nothing is loaded.
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
                        del flat  # the sender takes its memory back once this is acknowledged
            except Exception as failure:  # whatever it is, the sender must hear of it
                error = line(failure)
            receiver.acknowledge(version, error)
        except Exception as failure:  # the connection itself; what was wrong before it weighs more
            error = error or line(failure)
        return received, error

    def close(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
        self._receiver = None

    def _connect(self, address: Address) -> WeightReceiver:
        if self._receiver is None or address != self._address:
            self.close()
            self._receiver, self._address = open_receiver(address, index=self._index), address
        return self._receiver


def line(failure: BaseException) -> str:
    return failure.message if isinstance(failure, CorerlError) else f"{type(failure).__name__}: {failure}"
