"""An engine in one loop: a prompt at a time, a token at a time, on any transformers causal language model."""

from __future__ import annotations

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from corerl.config import ModelConfig
from corerl.engines import (
    Engine,
    EngineContext,
    EngineLifecycle,
    GenerateRequest,
    Generation,
    OnFinished,
    Received,
    SamplingParams,
    ignore,
)
from corerl.models import hf_config
from corerl.ops import gumbel
from corerl.weights import Address, Bucket, Manifest, bit_sums
from my_engine import LoopOptions


class LoopEngine(Engine):
    def __init__(self, model: ModelConfig, options: LoopOptions, context: EngineContext) -> None:
        dtype = getattr(torch, context.precision)
        self._model = AutoModelForCausalLM.from_config(hf_config(model), dtype=dtype).eval().to(context.device)
        self._options, self._device = options, context.device
        self._weights = {name: parameter.data for name, parameter in self._model.named_parameters()}
        self._bytes = {name: weight.untyped_storage().nbytes() for name, weight in self._weights.items()}
        self._asleep = False
        self._serving = EngineLifecycle(context.name, context.index)

    # ---- sampling ----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def generate(self, request: GenerateRequest, on_finished: OnFinished = ignore) -> Generation:
        done: list[Generation] = []
        with self._serving.generating() as version:  # refuses without weights, and holds them still
            for row, length, left, key in zip(
                request.by_row(), request.response_lengths, request.left, request.noise_keys, strict=True
            ):
                done.append(self._complete(row, int(length), int(left), int(key), request.params, version))
                on_finished(int(not done[-1].unfinished[0]))
        return Generation.concatenate(done)

    def _complete(
        self, row: np.ndarray, length: int, left: int, key: int, params: SamplingParams, version: int
    ) -> Generation:
        """One row of a request, whose last `length` tokens belong to its response; `left` more may follow."""
        tokens: list[int] = []
        logprobs: list[float] = []
        unread, cache, stopped = row.tolist(), None, False
        while not stopped and len(tokens) < left and not self._serving.paused:
            out = self._model(
                torch.tensor([unread], device=self._device), past_key_values=cache, use_cache=self._options.cache
            )
            logprob = torch.log_softmax(out.logits[0, -1].float() / params.temperature, dim=-1)  # [V]
            token = draw(logprob, key, length + len(tokens), params)
            stopped = token in params.stop_tokens
            tokens.append(token)
            logprobs.append(float(logprob[token]))
            if self._options.cache:
                cache, unread = out.past_key_values, [token]
            else:
                unread = [*unread, token]
        whole = len(tokens) == left
        return Generation(
            tokens=np.array(tokens, dtype=np.int64),
            offsets=np.array([0, len(tokens)]),
            logprobs=np.array(logprobs, dtype=np.float32),
            versions=np.full(len(tokens), version),
            truncated=np.array([whole and not stopped]),
            unfinished=np.array([not whole and not stopped]),  # paused
        )

    def pause(self) -> None:
        self._serving.pause()

    def resume(self) -> None:
        self._serving.resume()

    # ---- weights -----------------------------------------------------------------------------------------------------

    def receive(self, manifest: Manifest, version: int, address: Address) -> Received:
        return self._serving.receive(manifest, version, address, check=self._check, load=self._load)

    def _check(self, manifest: Manifest) -> str:
        """Why this set of weights is refused; "" where it is not."""
        if self._asleep:
            return "the engine's weights are asleep; wake it up first"
        wanted = {name: tuple(weight.shape) for name, weight in self._weights.items()}
        wrong = [name for name, _ in manifest.shapes.items() ^ wanted.items()]
        return f"{min(wrong)!r} is missing, unknown, or of another shape" if wrong else ""

    @torch.no_grad()
    def _load(self, bucket: Bucket, flat: torch.Tensor) -> None:
        for name, tensor in bucket.views(flat).items():  # their memory is used again for the next bucket: copy
            self._weights[name].copy_(tensor)

    def weight_sums(self, dtype: str) -> dict[str, int] | None:
        sent = getattr(torch, dtype)
        return bit_sums(self._weights) if all(weight.dtype == sent for weight in self._weights.values()) else None

    # ---- memory ------------------------------------------------------------------------------------------------------

    def sleep(self) -> int:
        if self._asleep:
            return 0
        with self._serving.dropping_weights("its weights were put to sleep"):
            self._asleep = True
            for weight in self._weights.values():
                weight.untyped_storage().resize_(0)
        if self._device == "cuda":
            torch.cuda.empty_cache()
        return sum(self._bytes.values())

    def wake_up(self) -> int:
        if not self._asleep:
            return 0
        with self._serving.dropping_weights("no weights have arrived since it woke up"):
            for name, weight in self._weights.items():
                weight.untyped_storage().resize_(self._bytes[name])
            self._asleep = False
        return sum(self._bytes.values())

    def close(self) -> None:
        self._serving.close()


def draw(logprob: torch.Tensor, key: int, position: int, params: SamplingParams) -> int:
    """One token from log-probs [V], by noise that is a function of the row's key and the token's position alone."""
    if params.greedy:
        return int(logprob.argmax())
    kept, (ordered, order) = logprob, logprob.sort(descending=True)
    if params.top_p < 1.0:
        likelier = ordered.exp().cumsum(dim=-1) - ordered.exp()  # what stands before each token; 0 for the first
        kept = logprob.index_fill(0, order[likelier >= params.top_p], float("-inf"))
    if params.top_k:
        kept = kept.index_fill(0, order[params.top_k :], float("-inf"))
    # The Gumbel-max trick: the argmax is distributed as softmax(kept).
    noise = gumbel(torch.tensor([key], device=logprob.device), position, len(logprob))[0]
    return int((kept + noise).argmax())
