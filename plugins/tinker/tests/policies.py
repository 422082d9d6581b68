"""A policy of one number, which answers at once; what the server does with it can be computed by hand."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from attrs import evolve

from corerl.types import FloatArray, IntArray
from corerl_tinker.requests import (
    Adam,
    Draw,
    Drawn,
    InTurn,
    ModelMade,
    ModelWanted,
    Pass,
    PassDone,
    Refused,
    Run,
    Saved,
)

NAME = "Qwen/Qwen3-8B-Base"


class OneNumber:
    """log p of each token is the number `w` less its index in the row; the gradient of a pass is the sum of its
    weights."""

    def __init__(self) -> None:
        self.w, self.gradient, self.moment = 0.0, 0.0, 0.0
        self.calls: list[str] = []  # of all calls but `draw`, in their order
        self.threads: set[str] = set()
        self.samplers: dict[str, float] = {}
        self.saved: dict[str, tuple[Saved, float, float]] = {}
        self.models: dict[str, ModelWanted] = {}
        self.hold = threading.Event()  # passes wait for it
        self.hold.set()
        self.started = threading.Event()  # by a pass
        self.drawn: list[Draw] = []
        self.drawing: Callable[[Draw], Any] | None = None  # awaited before a draw
        self.dies: Exception | None = None  # of the next pass

    def _called(self, what: str) -> None:
        self.calls.append(what)
        self.threads.add(threading.current_thread().name)

    def create(self, wanted: ModelWanted, *, model_id: str) -> ModelMade:
        self._called("create")
        if wanted.base_model not in (NAME, "other/name"):
            raise Refused(f"base model {wanted.base_model!r} is not served here")
        self.model = model_id
        self.models[model_id] = wanted
        self.w = self.gradient = self.moment = 0.0
        return ModelMade(base_model=wanted.base_model, tokenizer="a/directory", rank=wanted.rank)

    def release(self) -> None:
        self._called("release")

    def run(self, wanted: Pass) -> PassDone:
        self._called("forward" if wanted.forward_only else f"pass {wanted.datums[0].tokens[0]}")
        self.started.set()
        self.hold.wait()
        if self.dies is not None:
            raise self.dies
        if wanted.loss != "cross_entropy":
            raise Refused(f"the loss {wanted.loss!r} is not served; use cross_entropy")
        outputs, loss = [], 0.0
        for datum in wanted.datums:
            logprobs = (self.w - np.arange(len(datum.tokens))).astype(np.float32)
            loss -= float((logprobs * datum.inputs["weights"]).sum())
            outputs.append(logprobs)
            if not wanted.forward_only:
                self.gradient += float(datum.inputs["weights"].sum())
        return PassDone(logprobs=tuple(outputs), metrics={"loss:sum": loss})

    def discard(self) -> None:
        self._called("discard")
        self.gradient = 0.0

    def step(self, settings: Adam) -> Mapping[str, float]:
        self._called("step")
        norm, self.gradient = abs(self.gradient), 0.0
        self.w += settings.lr * norm
        self.moment = settings.beta1 * self.moment + norm
        return {"grad_norm": norm, "unknown": float("nan")}

    def save(self, name: str, *, ttl: float | None, overwrite: bool, user_metadata: Mapping[str, str]) -> Saved:
        self._called("save")
        return self._keep("weights", name, ttl, overwrite, user_metadata)

    def _keep(
        self, folder: str, name: str, ttl: float | None, overwrite: bool, user_metadata: Mapping[str, str]
    ) -> Saved:
        path = f"tinker://{self.model}/{folder}/{name}"
        if path in self.saved and not overwrite:
            raise Refused(f"there is a checkpoint {path!r}; choose another name, or overwrite=True")
        now = time.time()
        saved = Saved(
            path=path,
            kind="training" if folder == "weights" else "sampler",
            bytes=8,
            created=now,
            expires=None if ttl is None else now + ttl,
            user_metadata=user_metadata,
        )
        self.saved[path] = saved, self.w, self.moment
        return saved

    def load(self, path: str, *, optimizer: bool) -> None:
        self._called("load")
        _, self.w, moment = self.saved[path]
        self.moment = moment if optimizer else 0.0

    def save_for_sampler(
        self, name: str | None, *, ttl: float | None, inflight: bool, user_metadata: Mapping[str, str]
    ) -> tuple[str, Saved | None]:
        self._called("save for sampler")
        sampler = f"{self.model}:sampler:{len(self.samplers)}"
        self.samplers[sampler] = self.w
        return sampler, self._keep("sampler_weights", name, ttl, True, user_metadata) if name else None

    def sampler(self, model_path: str | None, base_model: str | None) -> str:
        self._called("sampler")
        sampler = f"sampler {len(self.samplers)}"
        self.samplers[sampler] = 0.0 if model_path is None else self.saved[model_path][1]
        return sampler

    async def draw(self, wanted: Draw, in_turn: InTurn) -> Drawn:
        self.drawn.append(wanted)
        if self.drawing is not None:
            await self.drawing(wanted)
        length = min(wanted.max_tokens or 3, 1000)
        return Drawn(
            tokens=tuple(wanted.prompt[-1] + number + np.arange(length) for number in range(wanted.samples)),
            logprobs=(np.full(length, self.samplers[wanted.sampler], np.float32),) * wanted.samples,
            stopped=(wanted.max_tokens is None,) * wanted.samples,
            prompt_logprobs=await in_turn(lambda: self._scored(wanted.prompt)) if wanted.prompt_logprobs else None,
        )

    def _scored(self, prompt: IntArray) -> FloatArray:
        self._called("score")
        return np.array([np.nan, *(-np.arange(1, len(prompt)))], np.float32)

    def runs(self) -> Sequence[Run]:
        return [
            Run(
                id=model_id,
                made=ModelMade(base_model=wanted.base_model, tokenizer="a/directory", rank=wanted.rank),
                used=time.time(),
                user_metadata=wanted.user_metadata,
                checkpoints=tuple(saved for path, (saved, *_) in self.saved.items() if path.split("/")[2] == model_id),
            )
            for model_id, wanted in self.models.items()
        ]

    def delete(self, path: str) -> None:
        del self.saved[path]

    def expire(self, path: str, *, ttl: float | None) -> None:
        saved, *numbers = self.saved[path]
        expires = None if ttl is None else time.time() + ttl
        self.saved[path] = (evolve(saved, expires=expires), *numbers)
