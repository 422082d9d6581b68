"""Properties of a backend that can be checked without running it: its spec, its config and its package."""

from __future__ import annotations

import os
import pickle
import random
import re
import sys
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from corerl.config.load import structure, to_plain
from corerl.config.schema import ClusterInfo
from corerl.errors import Unsupported
from corerl.plugin.capabilities import Capability
from corerl.plugin.check import check_capabilities
from corerl.plugin.contract import build_manager, check_backend
from corerl.plugin.host import BackendBase
from corerl.plugin.registry import Kind, Loaded, load_implementation
from corerl.plugin.spec import BackendSpec, Problem, Resources
from corerl_testing.marks import check
from corerl_testing.spec_checks import (
    assert_frozen_and_explained,
    assert_imports_nothing_heavy,
    assert_introduces_itself,
    assert_refuses_what_is_wrong,
    assert_survives_json,
)

CLUSTERS = [ClusterInfo(device="cpu", ranks=1), ClusterInfo(device="cuda", ranks=2)]
UPPER_BOUNDS = {"<", "<=", "==", "===", "~="}


def of_a_package(loaded: Loaded) -> str:
    """The distribution's name; skips a spec named as package.module:SPEC, which has none."""
    if not loaded.distribution:
        pytest.skip(f"{loaded.name} does not belong to an installed package, so there is no metadata to check")
    return loaded.distribution


@check("C01", level=0)
def test_the_spec_imports_neither_torch_nor_ray(backend_name: str) -> None:
    assert_imports_nothing_heavy(Kind.BACKENDS, backend_name)


@check("C02", level=0)
def test_the_spec_is_for_the_api_that_this_corerl_speaks(loaded: Loaded) -> None:
    assert_introduces_itself(loaded)


@check("C03", level=0, builds_on=["C02"])
def test_the_config_is_frozen_has_only_defaults_and_explains_each_field(loaded: Loaded) -> None:
    assert_frozen_and_explained(loaded.spec.config)


@check("C04", level=0, builds_on=["C03"])
def test_the_config_survives_a_trip_through_json(loaded: Loaded) -> None:
    assert_survives_json(loaded.spec.config)


@check("C05", level=0, builds_on=["C03"])
def test_an_option_that_is_unknown_or_of_another_type_is_refused(loaded: Loaded) -> None:
    assert_refuses_what_is_wrong(loaded.spec.config)


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


@check("C71", level=0, builds_on=["C03"])
def test_each_variant_has_a_name_of_its_own_and_options_that_its_ranks_may_have(loaded: Loaded) -> None:
    spec: BackendSpec = loaded.spec
    names = [each.name for each in spec.variants]
    assert sorted(set(names)) == sorted(names)
    for each in spec.variants:
        config: object = structure(each.options, spec.config, path="")
        assert config != spec.config() or each.ranks > 2, f"{each.name!r} has the defaults, as all checks have"
        problems = list(spec.check(config, ClusterInfo(device="cpu", ranks=each.ranks)))
        assert problems == [], f"{each.name!r} cannot run on {each.ranks} ranks"
