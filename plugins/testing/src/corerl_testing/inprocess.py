"""Pass buckets to an engine in the trainer's own process, by a call instead of a transfer."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from corerl.weights import Address, Bucket, Manifest, WeightSender


class InProcessSender(WeightSender):
    """Calls `load` with each bucket's tensors by HF name, which are only valid during the call."""

    def __init__(self, load: Callable[[Mapping[str, torch.Tensor]], None], *, engine: str = "engine-0") -> None:
        super().__init__(Address(transport="in process", engines=(engine,)))
        self._load = load
        self._engine = engine
        self._error = ""

    def open(self, manifest: Manifest, version: int) -> None:
        self._error = ""

    def send(self, bucket: Bucket, flat: torch.Tensor) -> None:
        if self._error:
            return
        try:
            self._load(bucket.views(flat))
        except Exception as error:  # an engine's failure is in `finish`, as in every transport
            self._error = f"{type(error).__name__}: {error}"

    def finish(self) -> Mapping[str, str]:
        return {self._engine: self._error}

    def close(self) -> None:
        pass
