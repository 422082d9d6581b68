"""Cut a request into parts of even size."""

from __future__ import annotations

from itertools import pairwise

from corerl.rollout.engine import GenerateRequest


def split(request: GenerateRequest, parts: int) -> list[GenerateRequest]:
    """At most `parts` contiguous, non-empty requests whose row counts differ by at most one."""
    rows = len(request)
    bounds = [rows * part // parts for part in range(parts + 1)]
    return [request.rows(start, stop) for start, stop in pairwise(bounds) if stop > start]
