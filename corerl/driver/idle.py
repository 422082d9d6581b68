"""How long devices did nothing in a rollout step, and what for."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from corerl.observability.timing import Span

SCORING = "scoring"  # the span in which rewards are computed
# Phases of the driver in which ranks work, and those in which engines get their weights or change their memory.
OF_RANKS = frozenset({"compare", "forward", "train", "update_weights", "sleep", "wake_up", "save"})
OF_WEIGHTS = frozenset({"update_weights", "hold", "sleep", "wake_up", "replace"})


def idle_seconds(spans: Sequence[Span], began: float, ended: float, *, engines: Sequence[str]) -> dict[str, float]:
    """Seconds between `began` and `ended` in which devices did nothing, by cause; means over the engines, of which each
    has spans under its name, and of the ranks, which work together.

    idle/ranks/total       without a verb, of which they waited for
    idle/ranks/samples       engines
    idle/ranks/rewards       rewards, while no engine sampled
    idle/ranks/driver        anything else

    idle/engines/total     without a request, and no update of weights, of which they waited for
    idle/engines/longest     the samples of another engine
    idle/engines/rewards     rewards, while no engine sampled
    idle/engines/training    ranks
    idle/engines/driver      anything else
    """
    found = defaultdict(float, dict.fromkeys(("idle/ranks/total", *(["idle/engines/total"] if engines else [])), 0.0))
    changes: list[tuple[float, int, str]] = []
    for span in spans:
        low, high = max(span.began, began), min(span.ended, ended)
        if low < high:
            changes += [(low, 1, span.name), (high, -1, span.name)]
    active: Counter[str] = Counter()
    at = began
    for when, change, name in [*sorted(changes), (ended, 0, "")]:
        _account(found, {each for each, count in active.items() if count}, when - at, engines)
        active[name] += change
        at = when
    return dict(found)


def _account(found: dict[str, float], active: set[str], seconds: float, engines: Sequence[str]) -> None:
    if not seconds:
        return
    busy = active.intersection(engines)
    shared = "rewards" if SCORING in active else "driver"
    if not active & OF_RANKS:
        found["idle/ranks/total"] += seconds
        found[f"idle/ranks/{'samples' if busy else shared}"] += seconds
    if engines and not active & OF_WEIGHTS and len(busy) < len(engines):
        of_engines = seconds * (len(engines) - len(busy)) / len(engines)
        found["idle/engines/total"] += of_engines
        cause = "longest" if busy else "training" if active & OF_RANKS else shared
        found[f"idle/engines/{cause}"] += of_engines
