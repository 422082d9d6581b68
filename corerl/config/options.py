"""Fields of config tables: their help text, and the validators of their values."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from attrs import Attribute, field, frozen
from attrs.validators import and_, deep_iterable, ge, gt, le, lt, min_len, optional

MOST = 16_384  # processes of one kind: more are a slip of the hand, and planning them would take hours


@frozen(kw_only=True)
class Need:
    """What a setting needs of another one."""

    path: str  # of the other; beginning with a dot if it is in the same table
    values: tuple[str, ...]  # one of which it has to have; empty: it has to be set
    unwanted: bool  # that it must not have, or be
    value: str | None  # the only value of the setting that needs it; None: all but the default

    def __str__(self) -> str:
        of = f"{self.value!r} " if self.value else ""
        wanted = f"{self.path.lstrip('.')}{'=' if self.values else ''}{' or '.join(self.values)}"
        return f"{of}{'not with' if self.unwanted else 'needs'} {wanted}"


Needs = str | Sequence[str]


def option(help: str, *, needs: Needs | Mapping[str, Needs] = (), **kwargs: Any) -> Any:  # noqa: A002  -- read by users
    """An attrs field with help text. `needs` are conditions on other settings, or those of single values, written
    "PATH" (it is set), "PATH=A|B" (it has one of these values), or with a leading "!" (it is not, or has not);
    `corerl.plan.check` reports what is not met."""
    by_value: Mapping[Any, Needs] = needs if isinstance(needs, Mapping) else {None: needs}
    found = []
    for value, texts in by_value.items():
        for text in [texts] if isinstance(texts, str) else texts:
            path, _, values = text.lstrip("!").partition("=")
            wanted = tuple(values.split("|")) if values else ()
            found.append(Need(path=path, values=wanted, unwanted=text.startswith("!"), value=value))
    shown = f" ({', '.join(map(str, found))})" if found else ""
    return field(metadata={"help": help + shown, "needs": tuple(found)}, **kwargs)


def at_least(bound: float) -> Callable[..., None]:
    """A validator of options: `bound` or greater, or None."""
    return optional(ge(bound))


def above(bound: float) -> Callable[..., None]:
    """A validator of options: greater than `bound`, or None."""
    return optional(gt(bound))


def between(low: float, high: float) -> Callable[..., None]:
    """A validator of options: from `low` to `high`, both included."""
    return and_(ge(low), le(high))


filled: Callable[..., None] = min_len(1)
fraction = and_(gt(0), le(1))
decays: Callable[..., None] = deep_iterable(and_(ge(0), lt(1)))


def finite(_: Any, attribute: Attribute[Any], value: Any) -> None:
    """A validator of options: neither infinite nor NaN."""
    if not math.isfinite(value):
        raise ValueError(f"must be finite, got {value!r}")


def finite_values(_: Any, attribute: Attribute[Any], value: Mapping[str, float]) -> None:
    for name, each in value.items():
        if not math.isfinite(each):
            raise ValueError(f"each must be finite, got {name!r} = {each!r}")


def zero_or_several(_: Any, attribute: Attribute[Any], value: Any) -> None:
    # One token is greedy sampling: all samples of a prompt would be the same, and their log-probs may be unscaled.
    if value < 0 or value == 1:
        raise ValueError(f"must be 0 or at least 2, got {value!r}")


def custom_resources(_: Any, attribute: Attribute[Any], value: Mapping[str, float]) -> None:
    for name, amount in value.items():
        if name in ("CPU", "GPU", "memory", "object_store_memory"):
            raise ValueError(f"must be custom Ray resources, got {name!r}, which CoreRL sets itself")
        if not 0 < amount < math.inf:
            raise ValueError(f"amounts must be finite and above 0, got {name!r} = {amount!r}")


# ---- environment variables -------------------------------------------------------------------------------------------


def variables(_: Any, attribute: Attribute[Any], value: Iterable[str]) -> None:
    for name in value:  # of a mapping without its values, which may be secrets
        if not name or "=" in name or "\0" in name:
            raise ValueError(f"must be valid environment variables, got the name {name!r}")


# What the loader, Python and libraries of numpy read as a process starts. Others can set it only through Ray's runtime
# environments, which Ray logs. Programs have keys in variables that begin alike, such as LD_SDK_KEY.
READ_AT_START = re.compile(
    r"LD_(PRELOAD|LIBRARY_PATH|AUDIT|BIND_NO[TW]|DEBUG\w*|HWCAP_MASK|PROFILE\w*)$|PYTHON[A-Z]+$|PYTHON_GIL$|"
    r"MALLOC_[A-Z_]+$|GLIBC_TUNABLES$|(OMP|KMP|GOMP|MKL|OPENBLAS)_|LC_[A-Z]+$|(LANG|TZ)$"
)
RAYS = re.compile(r"RAY_")  # read by Ray's own processes, which are there before those of a run
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"  # the network interface over which gloo's ranks talk
