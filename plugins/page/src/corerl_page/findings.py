"""Why a run does what it does: what its newest steps say, each with the numbers and where the page shows more."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from attrs import frozen

FEW = 10  # steps that a finding averages over
Metrics = Mapping[str, Mapping[int, float | None]]


@frozen(kw_only=True)
class Finding:
    level: str  # error, warning or info
    what: str  # one sentence with its numbers
    why: str  # what it does to the run
    fix: str  # what to try
    metric: str = ""  # a curve that shows it
    view: str = "curves"  # of the page


def findings(metrics: Metrics, config: Mapping[str, Any]) -> Iterator[Finding]:
    """Those of the last FEW steps, the gravest first."""
    recent = {name: _recent(values) for name, values in metrics.items()}

    def of(name: str) -> float:
        return recent.get(name, math.nan)

    found = [finding for rule in RULES for finding in rule(of, config)]
    yield from sorted(found, key=lambda each: ("error", "warning", "info").index(each.level))


def _recent(values: Mapping[int, float | None]) -> float:
    last = [value for _, value in sorted(values.items())[-FEW:] if value is not None]
    return sum(last) / len(last) if last else math.nan


Of = Callable[[str], float]


def _cut_off(of: Of, config: Mapping[str, Any]) -> Iterator[Finding]:
    share, limit = of("rollout/truncated"), config.get("rollout", {}).get("max_tokens")
    if share >= 0.2:
        yield Finding(
            level="error" if share >= 0.5 else "warning",
            what=f"{share:.0%} of samples are cut off at rollout.max_tokens = {limit}; their mean length is "
            f"{of('rollout/response_length'):.1f} tokens",
            why="an answer without its end earns what its beginning is worth, and the model never sees itself finish",
            fix="raise rollout.max_tokens, or set algorithm.overlong so that cut-off samples teach nothing, or less",
            metric="rollout/truncated",
            view="samples",
        )


def _mismatch(of: Of, config: Mapping[str, Any]) -> Iterator[Finding]:
    mean, bound = of("rollout/logprob_diff"), config.get("algorithm", {}).get("mismatch_bound") or 0.01
    if mean > bound:
        far = of("rollout/logprob_diff_above_0.1")
        yield Finding(
            level="error" if mean > 5 * bound else "warning",
            what=f"trainer and engines give the sampled tokens log-probs that differ by {mean:.3g} on average (bound "
            f"{bound:g}); {far:.0%} of tokens differ by more than 0.1; they are {of('rollout/staleness'):.2g} updates "
            "old by what engines say",
            why="samples are trained on as if the newest weights had chosen them; where tokens are not old, an engine "
            "keeps old weights all the same or computes another model, and if only some samples differ, only some "
            "engines do",
            fix="sort the samples by log-prob difference; corerl doctor --config RUN/config.toml --layers; "
            "weights.verify_every compares engines' weights more often, of engines that can report them",
            metric="rollout/logprob_diff",
            view="samples",
        )


def _stale(of: Of, config: Mapping[str, Any]) -> Iterator[Finding]:
    mean = of("rollout/staleness")
    if mean >= 2:
        yield Finding(
            level="warning",
            what=f"tokens are {mean:.2g} updates old on average, the oldest {of('rollout/staleness_max'):.0f}",
            why="the policy that is trained is not the one that sampled; clipping takes more of each step",
            fix="lower rollout.max_staleness, or give engines more devices",
            metric="rollout/staleness",
        )


def _no_spread(of: Of, config: Mapping[str, Any]) -> Iterator[Finding]:
    share = of("rollout/groups_without_spread")
    if share >= 0.8:
        yield Finding(
            level="warning",
            what=f"in {share:.0%} of groups all samples have the same reward; its mean is {of('rollout/reward'):.3g}",
            why="a group without differences teaches nothing",
            fix="check the reward on a few samples; use prompts that this model answers right sometimes",
            metric="rollout/groups_without_spread",
            view="samples",
        )


def _skipped(of: Of, config: Mapping[str, Any]) -> Iterator[Finding]:
    if of("train/skipped_steps") > 0:
        yield Finding(
            level="error",
            what=f"{of('train/skipped_steps'):.2g} optimizer steps of each rollout step were skipped",
            why="their gradients were not finite: nothing was learned from these batches",
            fix="list the extension nan-guard, which names the first number that is not finite",
            metric="train/grad_norm",
        )


def _idle(of: Of, config: Mapping[str, Any]) -> Iterator[Finding]:
    step = of("time/step")
    for who in ("ranks", "engines"):
        idle = of(f"idle/{who}/total")
        if idle < 0.5 * step or not step or math.isnan(idle):
            continue
        causes = {cause: of(f"idle/{who}/{cause}") for cause in ("samples", "rewards", "driver", "longest", "training")}
        known = {cause: seconds for cause, seconds in causes.items() if not math.isnan(seconds)}
        cause = max(known, key=lambda each: known[each], default="unknown")
        yield Finding(
            level="info",
            what=f"{who} do nothing for {idle / step:.0%} of a step, mostly waiting for {cause} "
            f"({known.get(cause, idle):.2g} of {step:.2g} s)",
            why="devices that wait are paid for too",
            fix="see Time for what comes when; rollout.source says how far sampling and training overlap",
            metric=f"idle/{who}/total",
            view="time",
        )


RULES = (_skipped, _mismatch, _cut_off, _no_spread, _stale, _idle)
