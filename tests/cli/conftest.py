"""The command puts the working directory on sys.path; here each test gives it back."""

import sys

import pytest

from tests.plugin.conftest import install as install  # the fixture


@pytest.fixture(autouse=True)
def own_sys_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
