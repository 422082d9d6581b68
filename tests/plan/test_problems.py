from __future__ import annotations

import pytest

from corerl.errors import ConfigError, Unsupported
from corerl.plan.check import Problems


def collect(problems: Problems, error: Exception) -> None:
    with problems.stage():
        raise error


def test_several_errors_become_the_lines_of_one() -> None:
    problems = Problems()
    problems.raise_all()
    for _ in range(2):  # said twice is told once
        collect(problems, Unsupported("first"))
    with pytest.raises(Unsupported, match="^first$"):
        problems.raise_all()
    collect(problems, Unsupported("second\nthird"))
    with pytest.raises(ConfigError) as caught:
        problems.raise_all()
    assert caught.value.message == "first\nsecond\nthird"


def test_what_is_no_fault_of_the_users_is_not_collected() -> None:
    with pytest.raises(ZeroDivisionError):
        collect(Problems(), ZeroDivisionError())
