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
def requirements_are_met(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extension `advice` looks up no requirements, which is half of a plan's time."""
    monkeypatch.setattr("corerl_doctor.advice.unmet", lambda names: [])
