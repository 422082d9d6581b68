"""A policy of one number, which answers at once; what the server does with it can be computed by hand."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from attrs import evolve
from tinker import types

from corerl.engines import Generation, PromptScores, SamplingParams
from corerl.types import FloatArray, offsets_of
from corerl_tinker.checkpoints import Checkpoints
from corerl_tinker.losses import SLOPES, Rows, rows_of
from corerl_tinker.options import ServeOptions
from corerl_tinker.requests import InTurn, Pass, Refused, Sampler
from corerl_tinker.training import ServedPolicy

NAME = "Qwen/Qwen3-8B-Base"


class OneNumber(ServedPolicy):
    """log p of each token is the number `w` less its index in the row; the gradient of a pass is the sum of its
    weights."""

    def __init__(self) -> None:
        self.w, self.gradient, self.moment = 0.0, 0.0, 0.0
        self.context_length = 4096
        self._options = ServeOptions(name=NAME, aliases=("other/name",))
        self._lora, self._rank, self._seed = None, 8, 0
        self.calls: list[str] = []  # of all calls but `draw`, in their order
        self.threads: set[str] = set()
        self.samplers: list[float] = []  # by number
        self.directory = tempfile.TemporaryDirectory()
        self.checkpoints = Checkpoints(Path(self.directory.name), "")
        self.hold = threading.Event()  # passes and creations wait for it
        self.hold.set()
        self.started = threading.Event()  # by a pass
        self.drawn: list[types.SampleRequest] = []
        self.drawing: Callable[[types.SampleRequest], Any] | None = None  # awaited before a draw
        self.dies: Exception | None = None  # of the next pass
        self.ranks_ended = False
        self.refused = ""  # why the next model is not created

    @property
    def ended(self) -> bool:
        return self.ranks_ended

    def _called(self, what: str) -> None:
        self.calls.append(what)
        self.threads.add(threading.current_thread().name)

    def create(self, run: types.TrainingRun, path: str = "", *, optimizer: bool = False) -> None:
        self._called("create")
        self.hold.wait()
        if self.refused:
            raise Refused(self.refused)
        self.model = run.training_run_id
        self.w = self.gradient = self.moment = 0.0
        if path:
            self.load(path, optimizer=optimizer)

    def release(self) -> None:
        self._called("release")

    def rows(self, wanted: Pass) -> Rows:
        return rows_of(wanted, vocabulary=10**9, longest=0)

    def run(self, passes: Sequence[Rows]) -> list[FloatArray]:
        firsts = " ".join(str(rows.samples.tokens[0]) for rows in passes)
        self._called("forward" if passes[0].forward_only else f"pass {firsts}")
        self.started.set()
        self.hold.wait()
        if self.dies is not None:
            raise self.dies
        return [self._run(rows) for rows in passes]

    def _run(self, rows: Rows) -> FloatArray:
        places = np.concatenate([np.arange(size) for size in np.diff(rows.samples.offsets)])
        if not rows.forward_only:
            self.gradient -= float(rows.samples.columns[SLOPES].sum())
        return (self.w - places + 1).astype(np.float32)

    def discard(self) -> None:
        self._called("discard")
        self.gradient = 0.0

    def step(self, asked: types.AdamParams) -> Mapping[str, float]:
        self._called("step")
        norm, self.gradient = abs(self.gradient), 0.0
        self.w += asked.learning_rate * norm
        self.moment = asked.beta1 * self.moment + norm
        return {"grad_norm": norm, "unknown": float("nan")}

    def save(self, asked: types.SaveWeightsRequest) -> types.Checkpoint:
        self._called("save")
        return self._kept(f"weights/{asked.path}", asked, asked.overwrite)

    def _kept(self, name: str, asked: Any, overwrite: bool) -> types.Checkpoint:
        kept = {"ttl": asked.ttl_seconds, "user_metadata": asked.user_metadata, "overwrite": overwrite}
        text = f"{self.w} {self.moment}"
        return self.checkpoints.save(f"tinker://{self.model}/{name}", lambda file: file.write_text(text), **kept)

    def load(self, path: str, *, optimizer: bool) -> None:
        self._called("load")
        self.w, moment = self._saved(path)
        self.moment = moment if optimizer else 0.0

    def _saved(self, path: str) -> tuple[float, float]:
        w, moment = self.checkpoints.state_of(path).read_text().split()
        return float(w), float(moment)

    def save_for_sampler(self, asked: types.SaveWeightsForSamplerRequest) -> Sampler:
        self._called("save for sampler")
        kept = self._kept(f"sampler_weights/{asked.path}", asked, True) if asked.path else None
        return self._new_sampler(self.w, kept.tinker_path if kept else None)

    def sampler(self, model_path: str | None, base_model: str) -> Sampler:
        self._called("sampler")
        return self._new_sampler(0.0 if model_path is None else self._saved(model_path)[0], model_path)

    def _new_sampler(self, w: float, path: str | None) -> Sampler:
        self.samplers.append(w)
        number = len(self.samplers) - 1
        return Sampler(number=number, weights=number, name="", base_model=NAME, model_path=path)

    async def draw(self, sampler: Sampler, wanted: types.SampleRequest, in_turn: InTurn) -> Generation:
        self.drawn.append(wanted)
        if self.drawing is not None:
            await self.drawing(wanted)
        prompt = wanted.prompt.to_ints()
        most, samples = wanted.sampling_params.max_tokens, wanted.num_samples
        length, scores = min(most or 3, 1000), None
        if wanted.prompt_logprobs:
            scores = PromptScores.unknown(len(prompt), SamplingParams())
            scores = evolve(scores, logprobs=await in_turn(self._scored, prompt, 0))
        return Generation(
            tokens=np.concatenate([prompt[-1] + number + np.arange(length) for number in range(samples)]),
            offsets=offsets_of([length] * samples),
            logprobs=np.full(length * samples, self.samplers[sampler.number], np.float32),
            versions=np.zeros(length * samples, np.int64),
            truncated=np.full(samples, most is not None),
            scores=scores,
        )

    def _scored(self, prompts: Sequence[Sequence[int]]) -> list[FloatArray]:
        self._called("score")
        return [np.array([np.nan, *(-np.arange(1, len(prompt)))], np.float32) for prompt in prompts]
