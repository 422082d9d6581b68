"""Why a run does what it does: what its newest steps say, each with the numbers and where the page shows more."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from attrs import define, frozen

from corerl_page.runs import OfEngine, Summary, by_engine, mean_diff

FEW = 10  # steps that a finding averages over
CUT_OFF = 0.2  # share of samples from which on it is a finding that they are
NEARLY_ALL = 0.9  # ... from which on a penalty makes no difference, and a mask leaves nothing to train on
CLEARLY = 3  # how many times as far from the trainer an engine is that differs alone
# As the settings `algorithm.mismatch_bound` and `train.precision` say: mean differences of sides that compute the same.
BOUNDS = {"float32": 0.01, "bfloat16": 0.1, "float16": 0.1, "fp8": 0.3}
CAUSES = {
    "samples": "samples",
    "rewards": "rewards",
    "driver": "the driver",
    "longest": "the last samples of other engines",
    "training": "training",
}
Metrics = Mapping[str, Mapping[int, float | None]]


@frozen(kw_only=True)
class Finding:
    level: str  # error, warning or info
    what: str  # one sentence with its numbers
    why: str  # what it does to the run
    fix: str  # what to try
    metric: str = ""  # a curve that shows it
    view: str = "curves"  # of the page
    sort: str = ""  # of samples, in that view


def findings(
    metrics: Metrics,
    config: Mapping[str, Any],
    samples: Sequence[Summary] = (),
    diffs: Mapping[int, Mapping[int, float]] = MappingProxyType({}),
    *,
    running: bool = False,
) -> Iterator[Finding]:
    """Those of the last FEW steps, the gravest first. `samples` are those that were kept of the last FEW steps, `diffs`
    how far the tokens of each engine are from the trainer, by step."""
    recent = Recent(metrics=metrics, config=config, samples=samples, diffs=diffs, running=running)
    found = [finding for rule in RULES for finding in rule(recent)]
    yield from sorted(found, key=lambda each: ("error", "warning", "info").index(each.level))


@define(kw_only=True)
class Recent:
    """A run, of which rules judge the last FEW steps."""

    metrics: Metrics
    config: Mapping[str, Any]
    samples: Sequence[Summary]
    diffs: Mapping[int, Mapping[int, float]]
    running: bool

    def since(self, name: str, wrong: Callable[[float], bool]) -> int | None:
        """The first of the steps, up to the newest one, in all of which this metric is wrong; None if there is none."""
        return _since(sorted(self.metrics.get(name, {}).items(), reverse=True), wrong)

    def values(self, name: str) -> list[float]:
        return [value for _, value in sorted(self.metrics.get(name, {}).items())[-FEW:] if value is not None]

    def of(self, name: str) -> float:
        """The mean; NaN if there is none."""
        values = self.values(name)
        return sum(values) / len(values) if values else math.nan

    def setting(self, name: str, default: Any = None) -> Any:
        return _setting(self.config, name, default)

    def counted(self, name: str, what: str, per_step: int | None) -> str:
        """`12 of 64 samples (19 %)`, for a share of each step's `what`; `per_step` says how many, if that is known."""
        values = self.values(name)
        share = sum(values) / len(values)
        if not per_step:
            return f"{_percent(share)} of {what}"
        whole = per_step * len(values)
        return f"{round(share * whole):,} of {whole:,} {what} ({_percent(share)})"

    def span(self, name: str) -> str:
        """The steps that a metric is averaged over, or that samples are of."""
        steps = len(self.values(name)) or len({each.step for each in self.samples})
        return f"in the last {f'{steps} steps' if steps > 1 else 'step'}"

    @property
    def groups(self) -> int | None:
        """Of a step; None if each role of an episode makes its own."""
        return None if self.setting("samplers.episodes.roles") else self.setting("rollout.prompts")


def bound_of(config: Mapping[str, Any]) -> float:
    """The mean difference of log-probs above which trainer and engines disagree: by default, of the coarser one."""
    train = _setting(config, "roles.actor.train.precision") or _setting(config, "train.precision", "float32")
    quantized = _setting(config, "weights.quantize") == "fp8"
    sides = (train, "fp8" if quantized else _setting(config, "weights.dtype", "model"))
    return _setting(config, "algorithm.mismatch_bound") or max(BOUNDS.get(each, BOUNDS["float32"]) for each in sides)


def _setting(config: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """A setting by its dotted name, such as rollout.prompts."""
    found: Any = config
    for part in name.split("."):
        found = found.get(part, {}) if isinstance(found, Mapping) else {}
    return default if found in ({}, None) else found


def _since(newest_first: Iterable[tuple[int, float | None]], wrong: Callable[[float], bool]) -> int | None:
    first = None
    for step, value in newest_first:
        if value is not None and not wrong(value):
            break
        first = first if value is None else step
    return first


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _cut_off(run: Recent) -> Iterator[Finding]:
    share, overlong = run.of("rollout/truncated"), run.setting("algorithm.overlong", "keep")
    if not share >= CUT_OFF:
        return
    first = run.since("rollout/truncated", lambda each: each >= CUT_OFF)
    since = "" if first is None else f", and at least {_percent(CUT_OFF)} of each step's since step {first}"
    whole = run.groups and run.groups * run.setting("rollout.samples", 1)
    why, fix = {
        "mask": ("they are left out of training (algorithm.overlong = 'mask')", "algorithm.overlong = 'penalty'"),
        "penalty": ("each loses up to 1 of its reward (algorithm.overlong = 'penalty')", ""),
    }.get(
        overlong,
        (
            "an answer without its end earns what its beginning is worth, and the model never sees itself finish",
            "algorithm.overlong = 'penalty' or 'mask'",
        ),
    )
    yield Finding(
        level="error" if share >= 0.5 else "warning",
        what=f"{run.span('rollout/truncated')}, {run.counted('rollout/truncated', 'samples', whole)} are cut off at "
        f"rollout.max_tokens = {run.setting('rollout.max_tokens')}{since}; the mean length of all is "
        f"{run.of('rollout/response_length'):.1f} tokens",
        why=why + _held_out_cut_off(run),
        fix="raise rollout.max_tokens to what whole answers need"
        + (f", or set {fix}" if fix and share < NEARLY_ALL else ""),
        metric="rollout/truncated",
        view="samples",
        sort="-truncated",
    )


def _held_out_cut_off(run: Recent) -> str:
    _, share = max(run.metrics.get("eval/truncated", {}).items(), default=(0, 0.0))
    if share is None or not share >= CUT_OFF:
        return ""
    return (
        f"; {_percent(share)} of the held-out answers of the newest evaluation are cut off too: their reward is not to "
        "be compared with that of whole answers"
    )


def _mismatch(run: Recent) -> Iterator[Finding]:
    mean, bound, stale = run.of("rollout/logprob_diff"), bound_of(run.config), run.of("rollout/staleness")
    engines = [each for each in by_engine(run.samples) if each.diff is not None]
    alone = _alone(engines, bound)
    if math.isnan(mean) and engines:  # a run without metrics
        mean = mean_diff(run.samples) or 0.0
    if not (mean > bound or alone):
        return
    recomputes = run.setting("algorithm.old_logprobs") == "recompute"
    tokens = round(run.of("rollout/tokens")) if recomputes and run.values("rollout/tokens") else None
    far = "rollout/logprob_diff_above_0.1"
    shares = f"; {run.counted(far, 'tokens', tokens)} by more than 0.1" if run.values(far) else ""
    since = _first_wrong(run, alone, bound)
    of_engines = f"of the kept samples, {', '.join(map(_of_engine, engines))}; " if len(engines) > 1 else ""
    why = "the loss takes the trainer's log-probs for those that the tokens were sampled with"
    if not recomputes:
        why = "ratios of probabilities begin away from 1, and are clipped"
    elif run.setting("algorithm.correction", "none") != "none":
        why = "algorithm.correction gives such tokens other weights, in the end none"
    yield Finding(
        level="error" if max([mean, *(each.diff or 0.0 for each in alone)]) > 5 * bound else "warning",
        what=f"{run.span('rollout/logprob_diff')}, trainer and engines give sampled tokens log-probs that differ by "
        f"{mean:.3g} on average, wanted at most {bound:g}{shares}{'' if since is None else f'; since step {since}'}",
        why=f"{of_engines}{_reason(engines, alone, stale)}; {why}",
        fix=_remedy(run, engines, alone, stale, since),
        metric="rollout/logprob_diff",
        view="samples",
        sort="-diff",
    )


def _alone(engines: Collection[OfEngine], bound: float) -> list[OfEngine]:
    """Those that differ from the trainer where the others do not; by far, so that stale tokens make no difference."""
    diffs = [each.diff or 0.0 for each in engines]
    least = max([bound, *(CLEARLY * diff for diff in diffs if diff <= bound)])
    far = [each for each in engines if (each.diff or 0.0) > bound]
    clear = all((each.diff or 0.0) > least for each in far)
    return far if clear and 0 < len(far) < len(engines) else []


def _first_wrong(run: Recent, alone: Collection[OfEngine], bound: float) -> int | None:
    """The first of the steps, up to the newest one, that are all above the bound: of the mean of all, and of the engine
    that differs alone, whichever is earlier. The mean of many hides one; samples may be kept of some steps only."""

    def wrong(diff: float) -> bool:
        return diff > bound

    steps = [run.since("rollout/logprob_diff", wrong)]
    for engine in [each.engine for each in alone]:
        newest_first = ((step, of.get(engine)) for step, of in sorted(run.diffs.items(), reverse=True))
        steps.append(_since(newest_first, wrong))
    return min((step for step in steps if step is not None), default=None)


def _of_engine(each: OfEngine) -> str:
    far = f"{each.far:,} of {each.diffs:,} samples by more than 0.1"
    return f"engine-{each.engine}'s {each.tokens:,} tokens differ by {each.diff:.3g} on average ({far})"


def _reason(engines: Collection[OfEngine], alone: Collection[OfEngine], stale: float) -> str:
    """What makes log-probs differ, as far as these numbers say."""
    if alone:
        names = " and ".join(f"engine-{each.engine}" for each in alone)
        old = "" if math.isnan(stale) else f" (tokens count as {stale:.2g} updates old)"
        if len(alone) == 1:
            return (
                f"{names} alone computes other log-probs: it holds other weights than it says{old}, or computes wrongly"
            )
        return f"{names} alone compute other log-probs: they hold other weights than they say{old}, or compute wrongly"
    if stale >= 0.5:
        return f"the tokens are {stale:.2g} updates old, and log-probs change with each"
    if engines:
        return "the engines differ alike, so they compute another model than the trainer"
    return "either an engine has other weights than it says, or all of them compute another model"


def _remedy(
    run: Recent, engines: Collection[OfEngine], alone: Collection[OfEngine], stale: float, since: int | None
) -> str:
    layers = "corerl doctor --config RUN/config.toml --layers finds the layer where they part"
    if alone and run.running:
        return (
            "end that engine's process: the run replaces it (rollout.restarts) and sends it the newest weights; "
            "if the curve rises again, look at its device and its log"
        )
    if alone:
        before = "the difference began" if since is None else f"step {since}"
        resume = f"resume from a checkpoint of before {before} (checkpoint.resume), or, where there is none, "
        return (
            f"{'' if since == 0 else resume}begin again: new engines get the trainer's weights; if the curve rises "
            "again, look at that engine's device and its log"
        )
    if stale >= 0.5:
        older = "rollout.source and rollout.max_staleness say how old tokens may be"
        corrected = run.setting("algorithm.correction", "none") != "none"
        return older if corrected else f"{older}; algorithm.correction weights tokens by the difference"
    if engines:
        return layers
    return (
        "the extension page and algorithm.old_logprobs = 'recompute' keep the difference of each sample, with its "
        f"engine; if all engines differ, {layers}"
    )


def _stale(run: Recent) -> Iterator[Finding]:
    mean = run.of("rollout/staleness")
    if mean >= 2:
        most = run.setting("rollout.max_staleness")
        yield Finding(
            level="warning",
            what=f"{run.span('rollout/staleness')}, tokens are {mean:.2g} updates old on average, the oldest of a step "
            f"{run.of('rollout/staleness_max'):.2g}",
            why="the policy that is trained is not the one that sampled; clipping takes more of each step",
            fix=f"lower rollout.max_staleness (now {most}), or give engines more devices",
            metric="rollout/staleness",
        )


def _no_spread(run: Recent) -> Iterator[Finding]:
    name = "rollout/groups_without_spread"
    known = [each.advantage for each in run.samples if each.advantage is not None]
    zero = sum(not each for each in known)
    # Some algorithms compare rewards over the whole batch: there equal rewards of a prompt teach.
    if not run.of(name) >= 0.8 or zero < 0.8 * len(known):
        return
    other = "" if run.setting("algorithm.dynamic_sampling") else ", or replace such groups (algorithm.dynamic_sampling)"
    yield Finding(
        level="warning",
        what=f"{run.span(name)}, all samples have the same reward in {run.counted(name, 'groups', run.groups)}; the "
        f"mean reward is {run.of('rollout/reward'):.3g}",
        why=f"{zero:,} of {len(known):,} kept samples have an advantage of 0, and teach nothing"
        if known
        else "an algorithm that compares the samples of a prompt learns nothing from these",
        fix=f"check the reward on a few samples; use prompts that this model answers right sometimes{other}",
        metric=name,
        view="samples",
    )


def _skipped(run: Recent) -> Iterator[Finding]:
    skipped = sum(run.values("train/skipped_steps"))
    if skipped > 0:
        train = run.setting("roles.actor.train", run.setting("train", {}))
        steps = train.get("mini_batches", 0) * train.get("epochs", 1) * len(run.values("train/skipped_steps"))
        yield Finding(
            level="error",
            what=f"{run.span('train/skipped_steps')}, {skipped:.0f}{f' of {steps}' * bool(steps)} optimizer steps were "
            "skipped",
            why="their gradients were not finite: nothing was learned from these batches",
            fix="list the extension nan-guard, which names the first number that is not finite",
            metric="train/grad_norm",
        )


def _idle(run: Recent) -> Iterator[Finding]:
    step = run.of("time/step")
    colocated = run.setting("cluster.placement") == "colocated"
    for who in ("ranks", "engines"):
        # Where both have the same devices, one of them works while the other waits for it.
        own = [each for each in CAUSES if not (colocated and each in ("samples", "training"))]
        causes = {each: run.of(f"idle/{who}/{each}") for each in own}
        known = {cause: seconds for cause, seconds in causes.items() if not math.isnan(seconds)}
        idle = sum(known.values())
        if not step or not idle >= 0.5 * step:
            continue
        cause = max(known, key=lambda each: known[each])
        yield Finding(
            level="info",
            what=f"{run.span('time/step')}, {who} do nothing in {idle:.2g} of the {step:.2g} s of a step "
            f"({_percent(idle / step)}), most of it waiting for {CAUSES[cause]} ({known[cause]:.2g} s)",
            why="devices that wait are paid for too",
            fix=f"see Time for what comes when; rollout.source (now {run.setting('rollout.source')}) says how far "
            "sampling, scoring and training overlap",
            metric=f"idle/{who}/total",
            view="time",
        )


RULES = (_skipped, _mismatch, _cut_off, _no_spread, _stale, _idle)
