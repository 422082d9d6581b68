"""Strict structuring of options, as a plugin uses it for its own class."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Literal

import pytest
from attrs import field, frozen, validators

from corerl.config.structuring import structure
from corerl.errors import ConfigError


class Color(StrEnum):
    RED = "red"
    BLUE = "blue"


@frozen(kw_only=True)
class Profile:
    every: int = field(default=50, validator=validators.ge(1))


@frozen(kw_only=True)
class Options:
    degree: int = field(default=1, validator=[validators.ge(1), validators.le(8)])
    share: float = 0.5
    color: Color = Color.RED
    window: int | None = None
    size: int | Literal["auto"] = "auto"
    profile: bool | Profile = False
    pair: tuple[int, str] = (1, "a")
    names: tuple[str, ...] = ()
    counts: Mapping[str, int] = field(factory=dict)
    low: int = 0
    high: int = field(default=10)

    @high.validator
    def _above_low(self, attribute: Any, value: int) -> None:
        if value <= self.low:
            raise ValueError(f"high={value} must be above low={self.low}")


def problems_of(data: Any, cls: type = Options, path: str = "") -> list[str]:
    with pytest.raises(ConfigError) as caught:
        structure(data, cls, path=path)
    return caught.value.message.splitlines()


def test_every_kind_of_field_is_read_as_it_is_written() -> None:
    data = {
        "degree": 4,
        "share": 1,
        "color": "blue",
        "window": 3,
        "size": 7,
        "profile": {"every": 2},
        "pair": [5, "b"],
        "names": ["x", "y"],
        "counts": {"a": 1},
        "low": 3,
    }
    read = structure(data, Options)
    assert read == Options(
        degree=4,
        share=1.0,
        color=Color.BLUE,
        window=3,
        size=7,
        profile=Profile(every=2),
        pair=(5, "b"),
        names=("x", "y"),
        counts={"a": 1},
        low=3,
    )
    assert type(read.share) is float and read.color is Color.BLUE and type(read.names) is tuple


@pytest.mark.parametrize(
    ("data", "line"),
    [
        ({"degree": 1.0}, "x.y.degree: expected integer, got number 1.0"),
        ({"degree": True}, "x.y.degree: expected integer, got true"),
        ({"degree": "4"}, "x.y.degree: expected integer, got string '4'; remove the quotes"),
        ({"degree": 9}, "x.y.degree: must be <= 8, got 9"),
        ({"share": True}, "x.y.share: expected number, got true"),
        ({"share": "half"}, "x.y.share: expected number, got string 'half'"),
        ({"share": float("nan")}, "x.y.share: expected number, got nan"),
        ({"color": "bleu"}, "x.y.color: expected one of 'red', 'blue', got string 'bleu'; did you mean 'blue'?"),
        ({"window": "3"}, "x.y.window: expected integer, got string '3'; remove the quotes"),
        ({"size": "automatic"}, "x.y.size: expected integer or 'auto', got string 'automatic'"),
        ({"profile": {"every": 0}}, "x.y.profile.every: must be >= 1, got 0"),
        ({"profile": 3}, "x.y.profile: expected true or false or table, got integer 3"),
        ({"pair": [1]}, "x.y.pair: expected array of 2, got 1"),
        ({"pair": [1, 2]}, "x.y.pair[1]: expected string, got integer 2; put it in quotes"),
        ({"names": "abc"}, "x.y.names: expected array of strings, got string 'abc'"),
        ({"names": ["a", False]}, "x.y.names[1]: expected string, got false; put it in quotes"),
        ({"counts": {"a b": 1.5}}, 'x.y.counts."a b": expected integer, got number 1.5'),
        ({"counts": []}, "x.y.counts: expected table, got an array"),
        ({"low": 4, "high": 4}, "x.y: high=4 must be above low=4"),
        ({"degreee": 2}, "x.y.degreee: unknown key; did you mean 'degree'?"),
        (3, "x.y: expected table, got integer 3; did you mean x.y.degree?"),
        (3.5, "x.y: expected table, got number 3.5"),
    ],
)
def test_what_does_not_fit_is_named_with_its_path(data: Any, line: str) -> None:
    assert problems_of(data, path="x.y") == [line]
