"""Properties of a backend that can be checked without running it: its spec, its config and its package."""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import subprocess
import sys
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import attrs
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from corerl.config.load import structure, to_plain
from corerl.config.schema import ClusterInfo
from corerl.errors import ConfigError, Unsupported
from corerl.plugin.api import API
from corerl.plugin.capabilities import Capability
from corerl.plugin.contract import build_manager, check_backend
from corerl.plugin.host import BackendBase
from corerl.plugin.options import check_capabilities
from corerl.plugin.registry import Kind, Loaded, load_implementation
from corerl.plugin.spec import Problem, Resources
from corerl.testing.marks import check

HEAVY = ("torch", "ray", "transformers")
CLUSTERS = [ClusterInfo(device="cpu", ranks=1), ClusterInfo(device="cuda", ranks=2)]
UPPER_BOUNDS = {"<", "<=", "==", "===", "~="}
WRONG: dict[Any, list[Any]] = {bool: ["true", 1], int: ["3", 0.5], float: ["0.5"], str: [3, True]}
NEVER: list[Any] = [{"": [None]}, [[None]], object()]  # hardly any type accepts all of these


def of_a_package(loaded: Loaded) -> str:
    """The distribution's name; skips a spec named as package.module:SPEC, which has none."""
    if not loaded.distribution:
        pytest.skip(f"{loaded.name} does not belong to an installed package, so there is no metadata to check")
    return loaded.distribution


@check("C01", level=0)
def test_the_spec_imports_neither_torch_nor_ray(backend_name: str) -> None:
    program = (
        "import sys\n"
        f"sys.path[:0] = {[os.getcwd(), *filter(None, sys.path)]!r}\n"
        "from corerl.plugin.registry import Kind, load\n"
        f"load(Kind.BACKENDS, {backend_name!r})\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (finished.returncode, finished.stdout.splitlines()[-1:]) == (0, ["[]"]), finished.stderr


@check("C02", level=0)
def test_the_spec_is_for_the_api_that_this_corerl_speaks(loaded: Loaded) -> None:
    major, minor = loaded.spec.api
    assert major == API[0] and 0 <= minor <= API[1]
    assert loaded.spec.summary.strip() and "\n" not in loaded.spec.summary
    assert re.fullmatch(r"[\w.]+:\w+(\.\w+)*", loaded.spec.implementation)


@check("C03", level=0, builds_on=["C02"])
def test_the_config_is_frozen_has_only_defaults_and_explains_each_field(loaded: Loaded) -> None:
    cls = loaded.spec.config
    assert attrs.has(cls), f"{cls.__name__} is not an attrs class"
    config, again = cls(), cls()
    assert config == again
    for field in attrs.fields(cls):
        assert field.metadata.get("help", "").strip(), f"{field.name} has no help; write it with option(...)"
        with pytest.raises(attrs.exceptions.FrozenInstanceError):
            setattr(config, field.name, getattr(config, field.name))
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        setattr(config, "no such option", 1)


@check("C04", level=0, builds_on=["C03"])
def test_the_config_survives_a_trip_through_json(loaded: Loaded) -> None:
    config = loaded.spec.config()
    plain = to_plain(config)
    assert structure(json.loads(json.dumps(plain)), loaded.spec.config, path="backend") == config
    assert structure({}, loaded.spec.config, path="backend") == config


@check("C05", level=0, builds_on=["C03"])
def test_an_option_that_is_unknown_or_of_another_type_is_refused(loaded: Loaded) -> None:
    cls = loaded.spec.config
    with pytest.raises(ConfigError, match="no_such_option"):
        structure({"no_such_option": 1}, cls, path="backend")
    for field in attrs.fields(attrs.resolve_types(cls)):
        for value in WRONG.get(field.type, ()):
            with pytest.raises(ConfigError, match=field.name):
                structure({field.name: value}, cls, path="backend")
        assert any(refuses(cls, field.name, value) for value in NEVER), (
            f"{field.name} accepts any value; give it a type"
        )


def refuses(cls: type, name: str, value: Any) -> bool:
    try:
        structure({name: value}, cls, path="backend")
    except ConfigError:
        return True
    return False


@check("C06", level=0, builds_on=["C02"])
def test_every_hook_is_implemented_once_with_arguments_that_are_the_hooks(loaded: Loaded) -> None:
    cls = load_implementation(Kind.BACKENDS, loaded)
    assert isinstance(cls, type) and issubclass(cls, BackendBase)
    unwritten = sorted(getattr(cls, "__abstractmethods__", ()))
    assert unwritten == [], "these methods have no default; implement them"
    check_backend(build_manager([(f"backend:{loaded.name}", cls())]), f"backend:{loaded.name}")


@check("C07", level=0, builds_on=["C03"])
@pytest.mark.parametrize("cluster", CLUSTERS, ids=["1 cpu", "2 gpus"])
def test_what_the_spec_computes_is_the_same_twice_and_changes_nothing(loaded: Loaded, cluster: ClusterInfo) -> None:
    config = loaded.spec.config()

    def state() -> list[Any]:
        return [dict(os.environ), list(sys.path), os.getcwd(), random.getstate(), to_plain(config)]

    def asked() -> list[Any]:
        spec = loaded.spec
        problems = list(spec.check(config, cluster))
        parts = 1 if problems else spec.data_parallel(config, cluster)
        return [spec.environment(config, cluster), spec.resources(config, cluster), problems, parts]

    before = state()
    environment, resources, problems, parts = asked()
    assert asked() == [environment, resources, problems, parts]
    assert state() == before
    assert all(type(name) is str and type(value) is str for name, value in environment.items())
    assert isinstance(resources, Resources) and resources.cpus >= 0 and resources.gpus >= 0
    assert 1 <= parts <= cluster.ranks and cluster.ranks % parts == 0
    assert all(isinstance(problem, Problem) and problem.text.strip() for problem in problems)


@check("C08", level=0, builds_on=["C02"])
def test_the_spec_can_be_pickled(loaded: Loaded) -> None:
    assert pickle.loads(pickle.dumps(loaded.spec)) == loaded.spec


@check("C09", level=0)
def test_the_package_asks_for_corerl_with_an_upper_bound(loaded: Loaded) -> None:
    name = of_a_package(loaded)
    if canonicalize_name(name) == "corerl":
        pytest.skip("the backend is part of corerl")
    requirements = [Requirement(text) for text in distribution(name).requires or ()]
    found = [each for each in requirements if canonicalize_name(each.name) == "corerl" and not each.marker]
    assert found, f"{name} does not depend on corerl"
    operators = {specifier.operator for each in found for specifier in each.specifier}
    assert operators & UPPER_BOUNDS, (
        f"{name} requires {found[0]}, but a later corerl may have another API; add an upper bound"
    )


@check("C10", level=0)
def test_the_package_is_typed_and_says_so_and_the_name_is_one_word(loaded: Loaded) -> None:
    name = of_a_package(loaded)
    assert re.fullmatch("[a-z][a-z0-9-]*", loaded.name), (
        f"name {loaded.name!r}: use only lower-case letters, digits and hyphens"
    )
    assert "Typing :: Typed" in (distribution(name).metadata.get_all("Classifier") or [])
    package = find_spec(loaded.value.partition(":")[0].partition(".")[0])
    assert package is not None and package.submodule_search_locations
    assert any((Path(directory) / "py.typed").is_file() for directory in package.submodule_search_locations)


@check("C44", level=0, builds_on=["C02"])
def test_what_is_declared_as_lacking_has_a_reason_that_the_driver_tells(loaded: Loaded) -> None:
    for capability, support in loaded.spec.capabilities.items():
        assert isinstance(capability, Capability)
        if support.full:
            continue
        assert support.reason.strip(), f"{capability} is declared {support.grade} without a reason"
        with pytest.raises(Unsupported) as caught:
            check_capabilities(loaded.spec, {capability: "the run"}, name=loaded.name)
        assert support.reason in caught.value.message and repr(capability.value) in caught.value.message
