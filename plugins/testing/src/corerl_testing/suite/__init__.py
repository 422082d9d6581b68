"""The checks that every backend must pass, by subject. A backend's tests need `from corerl_testing.suite import *`, two
fixtures, and `pytest_plugins = ["corerl_testing.plugin"]` in the conftest; new checks come with an upgrade."""

from __future__ import annotations

from types import ModuleType

from corerl_testing.marks import check_of
from corerl_testing.suite import (
    test_checkpoints,
    test_critic,
    test_errors,
    test_forward,
    test_frozen,
    test_gpu,
    test_halves,
    test_loading,
    test_lora,
    test_memory,
    test_pictures,
    test_ray,
    test_routing,
    test_static,
    test_training,
    test_weights,
)

MODULES: tuple[ModuleType, ...] = (
    test_static,
    test_loading,
    test_forward,
    test_training,
    test_halves,
    test_routing,
    test_checkpoints,
    test_weights,
    test_memory,
    test_errors,
    test_critic,
    test_frozen,
    test_lora,
    test_pictures,
    test_gpu,
    test_ray,
)
CHECKS = {
    name: function for module in MODULES for name, function in vars(module).items() if check_of(function) is not None
}
__all__ = sorted(CHECKS)
globals().update(CHECKS)
