"""Small real distributions, as the registry's own tests install them."""

import pytest

from corerl.plan import make
from tests.plugin.conftest import backend_spec as backend_spec
from tests.plugin.conftest import extension_spec as extension_spec
from tests.plugin.conftest import install as install


@pytest.fixture
def only_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No extension takes part that a config does not list, though its wheel is installed."""
    monkeypatch.setattr(make, "with_extensions", lambda config: config)


@pytest.fixture(autouse=True)
def required(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """The distributions whose requirements each plan asks for; looking them up is half of a plan's time, and tested in
    tests/plugin."""
    asked: list[set[str]] = []
    monkeypatch.setattr(make, "require_met", lambda names: asked.append({*names}))
    return asked
