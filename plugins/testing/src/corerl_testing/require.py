"""What a failed check says: what was compared, what was found, and what was expected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from corerl_testing.tolerances import Tolerance


def require(holds: object, text: str) -> None:
    """Fail with `text` unless `holds`. The text names what was compared and both values."""
    __tracebackhide__ = True
    if not holds:
        raise AssertionError(text)


def require_equal(what: str, found: Any, wanted: Any) -> None:
    """Compare plain data; of lists and mappings the first entry that differs is named."""
    __tracebackhide__ = True
    if found != wanted:
        raise AssertionError(what + _difference(found, wanted))


def require_near(what: str, found: Any, wanted: Any, tolerance: Tolerance) -> None:
    """Compare numbers or arrays of one shape, within the tolerance; of arrays the entry furthest off is named."""
    __tracebackhide__ = True
    mine, others = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    if mine.shape != others.shape:
        raise AssertionError(f"{what} has shape {mine.shape}, expected {others.shape}")
    if np.isclose(mine, others, rtol=tolerance.relative, atol=tolerance.absolute, equal_nan=True).all():
        return
    apart = np.nan_to_num(np.abs(mine - others), nan=np.inf)
    at = np.unravel_index(int(apart.argmax()), apart.shape)
    where = f" at {', '.join(map(str, at))}" if at else ""
    raise AssertionError(
        f"{what} is {mine[at]:.9g}{where}, expected {others[at]:.9g} within {tolerance.relative:g} of it"
        + (f" or {tolerance.absolute:g}" if tolerance.absolute else "")
    )


def _difference(found: Any, wanted: Any) -> str:
    if isinstance(found, Mapping) and isinstance(wanted, Mapping):
        missing, extra = ([key for key in one if key not in other] for one, other in ((wanted, found), (found, wanted)))
        if missing or extra:
            lacks = f" lacks {_listed(missing)}" if missing else ""
            has = f" has {_listed(extra)}, which is not expected" if extra else ""
            return f"{lacks}{' and' if missing and extra else ''}{has}"
        return next(f" of {key}{_difference(found[key], wanted[key])}" for key in wanted if found[key] != wanted[key])
    if _is_list(found) and _is_list(wanted) and len(found) == len(wanted) > 1:
        wrong = [at for at, (mine, other) in enumerate(zip(found, wanted, strict=True)) if mine != other]
        return f" at {wrong[0]}{_difference(found[wrong[0]], wanted[wrong[0]])} ({len(wrong)} of {len(wanted)} differ)"
    if _is_list(found) and _is_list(wanted) and len(wanted) > 1:
        return f" has {len(found)} entries, {_listed(found)}, expected {len(wanted)}, {_listed(wanted)}"
    return f" is {_listed(found) if _is_list(found) and found else repr(found)}, expected {wanted!r}"


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _listed(names: Sequence[Any], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more
