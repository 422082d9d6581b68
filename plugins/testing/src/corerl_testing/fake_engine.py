"""An engine without a model: its output depends on prompt, noise key and weights version alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from corerl.config.schema import ModelConfig
from corerl.engines.base import Engine, EngineContext, GenerateRequest, Generation, OnFinished, Received, ignore
from corerl.engines.lifecycle import EngineLifecycle
from corerl.ops.noise import hash_keys
from corerl.types import offsets_of
from corerl.weights.checksums import bit_sums
from corerl.weights.manifest import Bucket, Manifest
from corerl.weights.transport import Address
from corerl_testing.fake_spec import FakeConfig

if TYPE_CHECKING:
    import torch


class FakeEngine(Engine):
    """Accepts any weights and keeps only their version and sums; pauses and refuses like a real engine."""

    def __init__(self, model: ModelConfig, options: FakeConfig, context: EngineContext) -> None:
        self._vocab = options.vocab_size
        self._serving = EngineLifecycle(context.name, context.index)
        self._sums: dict[str, int] = {}

    def generate(self, request: GenerateRequest, on_finished: OnFinished = ignore) -> Generation:
        params, rows = request.params, len(request)
        tokens = np.zeros((rows, params.max_tokens), dtype=np.int64)
        logprobs = np.zeros(tokens.shape, dtype=np.float32)
        sizes, finished = np.zeros(rows, dtype=np.int64), np.zeros(rows, dtype=np.bool_)
        with self._serving.generating() as version:
            prompts = [
                row[: len(row) - length] for row, length in zip(request.by_row(), request.response_lengths, strict=True)
            ]
            noise = np.zeros(rows, dtype=np.int64) if params.greedy else request.noise_keys
            keys = hash_keys(version, np.array([hash_keys(*prompt)[0] for prompt in prompts]), noise)
            while not self._serving.paused and (active := ~finished & (sizes < request.left)).any():
                step = int(sizes.max())
                sampled = hash_keys(keys, request.response_lengths + step)
                tokens[:, step] = sampled % self._vocab
                # Not a real log-prob, but different at every token, so that a misaligned column is noticed.
                logprobs[:, step] = -((sampled >> 8) % 1024) / 256
                sizes += active
                stopped = active & np.isin(tokens[:, step], params.stop_tokens)
                finished |= stopped
                if ended := int((active & (stopped | (sizes == request.left))).sum()):
                    on_finished(ended)
        chosen = np.arange(params.max_tokens) < sizes[:, None]
        return Generation(
            tokens=tokens[chosen],
            offsets=offsets_of(sizes),
            logprobs=logprobs[chosen],
            versions=np.full(sizes.sum(), version, dtype=np.int64),
            truncated=~finished & (sizes == request.left),
            unfinished=~finished & (sizes < request.left),
        )

    def pause(self) -> None:
        self._serving.pause()

    def resume(self) -> None:
        self._serving.resume()

    def receive(self, manifest: Manifest, version: int, address: Address) -> Received:
        return self._serving.receive(manifest, version, address, check=lambda manifest: "", load=self._load)

    def _load(self, bucket: Bucket, flat: torch.Tensor) -> None:
        self._sums |= bit_sums(bucket.views(flat))

    def weight_sums(self, dtype: str) -> dict[str, int]:
        return self._sums

    def sleep(self) -> int:
        with self._serving.dropping_weights("its weights were put to sleep"):
            pass
        return 0

    def wake_up(self) -> int:
        return 0

    def close(self) -> None:
        self._serving.close()
