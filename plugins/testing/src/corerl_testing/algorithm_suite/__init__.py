"""The checks that every algorithm must pass, by subject. An algorithm's tests need `from
corerl_testing.algorithm_suite import *`, the fixture `algorithm_name`, and `pytest_plugins =
["corerl_testing.plugin"]` in the conftest; new checks come with an upgrade."""

from __future__ import annotations

from types import ModuleType

from corerl_testing.algorithm_suite import test_advantages, test_losses, test_specs
from corerl_testing.marks import check_of

MODULES: tuple[ModuleType, ...] = (test_specs, test_advantages, test_losses)
CHECKS = {
    name: function for module in MODULES for name, function in vars(module).items() if check_of(function) is not None
}
__all__ = sorted(CHECKS)
globals().update(CHECKS)
