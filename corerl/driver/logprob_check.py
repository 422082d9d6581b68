"""Let the trainer score tokens that engines have sampled from the same weights, and end a run whose two sides disagree.

Checked before the first step, in a resumed run too, then in the batch after the first update with new weights, and
after every `weights.verify_every`-th one.
"""

from __future__ import annotations

import math
import shlex
from pathlib import Path

import numpy as np
from attrs import define, evolve

from corerl.config.load import CONFIG_FILE
from corerl.config.schema import AlgorithmConfig, TrainConfig, WeightsConfig
from corerl.data.prompts import PromptStream
from corerl.driver.progress import Progress
from corerl.errors import LogprobMismatch
from corerl.plan.data import RolloutPlan
from corerl.plan.plan import Plan
from corerl.plugin.spec import ACTOR
from corerl.rollout.sampler import Sampler, assemble
from corerl.types import FloatArray, IntArray, SampleBatch

SAMPLES = 8  # that are scored at least, if there are so many
SCORED = 512  # sampled tokens above which no further sample is: one router's tie must not decide
PROMPTS = 32  # of which the longest are completed before the first step: they reach beyond the most windows
TOKENS = 32  # that are sampled for each of those
READ = 16384  # tokens of prompts above which no further one is completed

# The largest mean difference of two sides that compute the same, by the coarser one's precision. Measured on correct
# models: 1e-7 to 1.3e-3 in float32; 0.002 to 0.02 in bfloat16, 0.056 with routers, whose near ties fall either way, or
# 36 layers; 0.03 to 0.06 in FP8, 0.2 with routers. On wrong ones in bfloat16: 0.22 (routers that an update left as
# they were) and 0.42 (a window left out).
BOUNDS = {"float32": 0.01, "bfloat16": 0.1, "float16": 0.1, "fp8": 0.3}


def bound_of(algorithm: AlgorithmConfig, *, train: TrainConfig, weights: WeightsConfig) -> float:
    """The mean difference above which trainer and engines disagree: the config's, or that of the coarsest precision."""
    used = [train.precision, "fp8" if weights.quantize == "fp8" else weights.dtype]
    return algorithm.mismatch_bound or max(BOUNDS[each] for each in used if each != "model")


def spread_over(samples: SampleBatch, *, since: int) -> SampleBatch:
    """Some of the samples whose loss tokens all come from weights `since` or later: the shortest, the longest, and
    others of lengths between them, so many that they have SCORED loss tokens."""
    mask, row_of = samples.columns["loss_mask"], samples.row_of
    stale = mask & (samples.columns["versions"] < since)
    counted = np.bincount(row_of[mask], minlength=len(samples))
    fresh = np.flatnonzero((counted > 0) & (np.bincount(row_of[stale], minlength=len(samples)) == 0))
    by_length = fresh[np.argsort(samples.lengths[fresh], kind="stable")]
    if not len(by_length):
        return samples.take_rows(by_length)
    count = max(SAMPLES, math.ceil(SCORED / counted[by_length].mean()))
    places = np.linspace(0, len(by_length) - 1, min(len(by_length), count))  # the first and the last among them
    return samples.take_rows(by_length[np.unique(places.round().astype(np.int64))])


def _by_engine(samples: SampleBatch, at: IntArray, sizes: FloatArray) -> dict[str, float]:
    """The mean of the differences [n], at tokens `at` [n], of each engine by its name."""
    engines, own = np.unique(samples.columns.get("engines", np.zeros_like(samples.tokens))[at], return_inverse=True)
    means = np.bincount(own, weights=sizes) / np.bincount(own)
    return {f"engine-{index}": mean for index, mean in zip(engines.tolist(), means.tolist(), strict=True)}


@define(kw_only=True, eq=False)
class LogprobCheck:
    """Decides when samples are to be compared, chooses them, and judges the difference."""

    sampler: Sampler
    rollout: RolloutPlan
    bound: float
    stops: bool  # else it warns
    every: int  # updates with new weights between two checks; 0: none after the first such update
    run_dir: Path
    progress: Progress

    due: bool = True
    _policies_sent: int = -1  # that engines lacked; the first is number 0

    @classmethod
    def of(cls, plan: Plan, sampler: Sampler | None, progress: Progress) -> LogprobCheck | None:
        """The check of a run whose samples are to be trained on, unless it is switched off."""
        algorithm = plan.algorithm.settings
        if sampler is None or plan.run.mode == "eval" or algorithm.on_mismatch == "off":
            return None
        return cls(
            sampler=sampler,
            rollout=plan.rollout,
            bound=bound_of(algorithm, train=plan.processes.roles[ACTOR].train, weights=plan.weights),
            stops=algorithm.on_mismatch == "stop",
            every=plan.weights.verify_every,
            run_dir=plan.start.run_dir,
            progress=progress,
        )

    async def sample(self) -> SampleBatch:
        """A few tokens after the longest of the first prompts, and of those with pictures, if there are any, straight
        from the engines, without the run's episodes. The run's own stream of prompts stays where it is."""
        stream = PromptStream(self.rollout.prompts, self.rollout.seed, check=self.rollout.check)
        checked = dict(self.rollout.prompts.checked)
        count = min(PROMPTS, max(SAMPLES, len(self.rollout.prompts.train)))  # others would be the same again
        prompts, params = stream.take(count), self.rollout.params
        self.rollout.prompts.checked.update(checked)  # the run takes these too
        params = evolve(params, max_tokens=min(params.max_tokens, TOKENS))
        request = self.sampler.request(prompts, rollout_step=0, samples=1, params=params)
        lengths = np.diff(request.offsets)
        longest = np.argsort(-lengths, kind="stable")
        count = max(SAMPLES, int(np.searchsorted(lengths[longest].cumsum(), READ, side="right")))
        chosen = longest[:count]
        shows = np.array([bool(prompts[row].pictures) for row in longest])
        if shows.any() and not shows[:count].any():
            chosen = np.append(chosen, longest[shows][: SAMPLES // 2])
        request = request.take_rows(np.sort(chosen))
        return assemble(request, await self.sampler.context.generate(request, urgent=True))

    def policy_sent(self) -> None:
        """Note an update of the engines with weights that they lacked."""
        self._policies_sent += 1
        self.due = self.due or self._policies_sent == 1 or (self.every > 0 and self._policies_sent % self.every == 0)

    def judge(self, samples: SampleBatch, trainer: FloatArray) -> None:
        """Compare the trainer's log-probs [N] of these samples with the engines'. Above the bound, raises
        LogprobMismatch, or warns."""
        at = np.flatnonzero(samples.columns["loss_mask"])
        if not len(at):
            return  # of such samples nothing is known: the next ones are compared
        self.due = False
        engine = samples.columns["rollout_logprobs"]
        sizes = np.abs(trainer[at].astype(np.float64) - engine[at])
        mean = float(sizes.mean())
        if mean <= self.bound:  # not if a log-prob is NaN
            return
        worst = int(at[np.argmax(sizes)])
        sample = int(samples.row_of[worst])
        engines, config = _by_engine(samples, at, sizes), shlex.quote(str(self.run_dir / CONFIG_FILE))
        each = f" ({', '.join(f'{name} by {own:.3g}' for name, own in engines.items())})" if len(engines) > 1 else ""
        look = (
            f"find the layer where they part: corerl doctor --config {config} --layers; if so much is expected, as of "
            "an engine that quantizes, raise algorithm.mismatch_bound"
        )
        wrong = [name for name, own in engines.items() if not own <= self.bound]
        if len(wrong) < len(engines):
            look = f"{' and '.join(wrong)} alone: look at the weights held there, and at the device"
        text = (
            f"trainer and engines compute different log-probs from the same weights: by {mean:.3g} on average "
            f"over {len(at)} sampled tokens{each}, wanted at most {self.bound:g}; the largest difference is "
            f"{sizes.max():.3g}, of token {worst - samples.offsets[sample]} in sample {sample} (id "
            f"{samples.tokens[worst]}; trainer {trainer[worst]:.4g}, engine {engine[worst]:.4g}); {look}"
        )
        if self.stops:
            raise LogprobMismatch(f"{text}, or set algorithm.on_mismatch='warn'")
        self.progress.notice(text)
