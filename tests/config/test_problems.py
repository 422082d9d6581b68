from __future__ import annotations

import pytest

from corerl.config.problems import Problems
from corerl.errors import ConfigError, Unsupported


def collect(problems: Problems, setting: str, error: Exception) -> None:
    with problems.stage(setting):
        raise error


def test_several_errors_become_the_lines_of_one() -> None:
    problems = Problems()
    problems.raise_all()
    for _ in range(2):  # said twice is told once
        collect(problems, "a.b", Unsupported("first"))
    assert not problems.none_in("a") and not problems.none_in("c", "a.b")
    assert problems.none_in("a.b.c", "a.bc", "b")
    with pytest.raises(Unsupported, match="^first$"):
        problems.raise_all()
    collect(problems, "c", Unsupported("second\nthird"))
    with pytest.raises(ConfigError) as caught:
        problems.raise_all()
    assert caught.value.message == "first\nsecond\nthird"


def test_what_is_no_fault_of_the_users_is_not_collected() -> None:
    with pytest.raises(ZeroDivisionError):
        collect(Problems(), "a", ZeroDivisionError())
