"""Mark a test as a check: `@check("C12", level=1, needs=[Capability.MOE], builds_on=["C11"])`.

The plugin reads the mark; otherwise a check is an ordinary test.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import pytest
from attrs import frozen

from corerl.plugin import Capability, Kind, load

F = TypeVar("F", bound=Callable[..., Any])

MARK = "corerl_check"
LEVELS = {  # those of algorithms are 0 and 1
    0: "static: the spec, its config and its package",
    1: "one process on a CPU",
    2: "two ranks on a CPU, and the variants of the spec",
    3: "on GPUs",
    4: "under Ray, with a group of workers and an engine",
}


@frozen(kw_only=True)
class Check:
    """One test of the suite. Several may share an id, which fails if any of them does."""

    id: str
    level: int  # on one rank; on two ranks a check is at least level 2
    needs: tuple[Capability, ...]  # if the backend declares one of these unsupported, the check must fail
    builds_on: tuple[str, ...]  # ids; if one of them failed, this check is blocked
    ranks: tuple[int, ...]  # world sizes, for a check with an argument `subject` or `world_size`
    # The set of its parameters with which it is also run for each of the spec's variants; None if options change
    # nothing that it sees.
    variants: Mapping[str, Any] | None
    of: Kind = Kind.BACKENDS  # what it checks; the fixture `backend_name` or `algorithm_name` says which

    def level_at(self, world_size: int) -> int:
        return max(self.level, 2) if world_size > 1 else self.level


def check(
    id: str,  # noqa: A002  -- its name everywhere
    *,
    level: int,
    needs: Sequence[Capability] = (),
    builds_on: Sequence[str] = (),
    ranks: Sequence[int] = (1, 2),
    variants: Mapping[str, Any] | None = None,
    of: Kind = Kind.BACKENDS,
) -> Callable[[F], F]:
    found = Check(
        id=id,
        level=level,
        needs=tuple(needs),
        builds_on=tuple(builds_on),
        ranks=tuple(ranks),
        variants=variants,
        of=of,
    )

    def mark(function: F) -> F:
        marked: F = pytest.mark.corerl_check(found)(function)
        return marked

    return mark


algorithm_check = partial(check, of=Kind.ALGORITHMS)


def check_of(function: object) -> Check | None:
    """The mark of `function`; None if it has none."""
    for mark in getattr(function, "pytestmark", ()):
        if mark.name == MARK:
            found: Check = mark.args[0]
            return found
    return None


def with_variants(backend: str) -> list[Any]:
    """Parameters of the fixture `backend_variant`: the defaults, and each variant of the backend's spec."""
    variants = load(Kind.BACKENDS, backend).spec.variants
    return [pytest.param(None, id=pytest.HIDDEN_PARAM), *(pytest.param(each, id=each.name) for each in variants)]
