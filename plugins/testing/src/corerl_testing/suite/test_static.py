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

from corerl.config import ClusterInfo, structure
from corerl.config.toml_text import to_plain
from corerl.errors import Unsupported
from corerl.messages import one_line
from corerl.plugin import BackendSpec, Capability, Kind, Problem, load_implementation
from corerl.plugin.capabilities import check_capabilities
from corerl.plugin.contract import backend_methods
from corerl.plugin.host import HostedBackend
from corerl.plugin.registry import Loaded
from corerl_testing.marks import check
from corerl_testing.require import require, require_equal
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
def test_the_config_is_frozen_with_defaults_and_help(loaded: Loaded) -> None:
    assert_frozen_and_explained(loaded.spec.config)


@check("C04", level=0, builds_on=["C03"])
def test_the_config_survives_a_trip_through_json(loaded: Loaded) -> None:
    assert_survives_json(loaded.spec.config)


@check("C05", level=0, builds_on=["C03"])
def test_unknown_options_and_wrong_types_are_refused(loaded: Loaded) -> None:
    assert_refuses_what_is_wrong(loaded.spec.config)


@check("C06", level=0, builds_on=["C02"])
def test_every_hook_is_implemented_with_its_own_arguments(loaded: Loaded) -> None:
    cls = load_implementation(Kind.BACKENDS, loaded)
    require(
        isinstance(cls, type) and issubclass(cls, HostedBackend),
        f"{loaded.spec.implementation} is {cls!r}, expected a class that extends corerl.backend.Backend",
    )
    backend_methods(f"backend:{loaded.name}", cls())


@check("C07", level=0, builds_on=["C03"])
@pytest.mark.parametrize("cluster", CLUSTERS, ids=["1 cpu", "2 gpus"])
def test_what_the_spec_computes_is_pure(loaded: Loaded, cluster: ClusterInfo) -> None:
    config = loaded.spec.config()

    def state() -> list[Any]:
        return [dict(os.environ), list(sys.path), os.getcwd(), random.getstate(), to_plain(config)]

    def asked() -> list[Any]:
        spec = loaded.spec
        problems = list(spec.check(config, cluster))
        parts = 1 if problems else spec.data_parallel(config, cluster)
        return [spec.environment(config, cluster), problems, parts]

    before = state()
    environment, problems, parts = before_it = asked()
    names = ("environment", "check", "data_parallel")
    again = dict(zip(names, asked(), strict=True))
    require_equal("the spec's answer, asked twice,", again, dict(zip(names, before_it, strict=True)))
    places = ("os.environ", "sys.path", "the directory", "random's state", "the config")
    after = dict(zip(places, state(), strict=True))
    changed = [place for place, was in zip(places, before, strict=True) if after[place] != was]
    require(not changed, f"the spec's functions changed {', '.join(changed)}; compute, and change nothing")
    for name, value in environment.items():
        require(
            type(name) is str and type(value) is str, f"environment returned {name!r}: {value!r}, expected two strings"
        )
    require(
        1 <= parts <= cluster.ranks and cluster.ranks % parts == 0,
        f"data_parallel returned {parts} for {cluster.ranks} rank(s), expected a number that divides them",
    )
    for problem in problems:
        require(
            isinstance(problem, Problem) and problem.text.strip(),
            f"check yielded {problem!r}, expected Problem(path, text) with a text",
        )


@check("C08", level=0, builds_on=["C02"])
def test_the_spec_can_be_pickled(loaded: Loaded) -> None:
    try:
        copied = pickle.loads(pickle.dumps(loaded.spec))
    except Exception as error:  # whatever the parts of a spec raise
        raise AssertionError(f"the spec cannot be pickled: {one_line(error)}; give functions of a module") from error
    require_equal("the spec, pickled and unpickled,", copied, loaded.spec)


@check("C09", level=0)
def test_the_package_asks_for_corerl_with_an_upper_bound(loaded: Loaded) -> None:
    name = of_a_package(loaded)
    if canonicalize_name(name) == "corerl":
        pytest.skip("the backend is part of corerl")
    requirements = [Requirement(text) for text in distribution(name).requires or ()]
    found = [each for each in requirements if canonicalize_name(each.name) == "corerl" and not each.marker]
    require(found, f"{name} requires {', '.join(map(str, requirements)) or 'nothing'}, expected corerl among them")
    operators = {specifier.operator for each in found for specifier in each.specifier}
    require(
        operators & UPPER_BOUNDS,
        f"{name} requires {found[0]}, but a later corerl may have another API; add an upper bound",
    )


@check("C10", level=0)
def test_the_package_is_typed_and_its_name_one_word(loaded: Loaded) -> None:
    name = of_a_package(loaded)
    require(
        re.fullmatch("[a-z][a-z0-9-]*", loaded.name),
        f"name {loaded.name!r}: use only lower-case letters, digits and hyphens",
    )
    classifiers = distribution(name).metadata.get_all("Classifier") or []
    require(
        "Typing :: Typed" in classifiers,
        f"the classifiers of {name} are {classifiers}, expected 'Typing :: Typed' among them",
    )
    module = loaded.value.partition(":")[0].partition(".")[0]
    package = find_spec(module)
    directories = list(package.submodule_search_locations or ()) if package is not None else []
    require(
        any((Path(directory) / "py.typed").is_file() for directory in directories),
        f"there is no py.typed in {', '.join(directories) or f'{module}, which is no package'}; add an empty file",
    )


@check("C44", level=0, builds_on=["C02"])
def test_what_is_declared_unsupported_has_a_reason(loaded: Loaded) -> None:
    for capability, support in loaded.spec.capabilities.items():
        require(isinstance(capability, Capability), f"capabilities has {capability!r}, expected members of Capability")
        if support.full:
            continue
        require(support.reason.strip(), f"{capability} is declared {support.grade} without a reason")
        with pytest.raises(Unsupported) as caught:
            check_capabilities(loaded.spec, {capability: "the run"}, name=loaded.name)
        message = caught.value.message
        require(
            support.reason in message and repr(capability.value) in message,
            f"a run that needs {capability} gets {message!r}, expected the capability and {support.reason!r}",
        )


@check("C71", level=0, builds_on=["C03"])
def test_each_variant_has_its_own_name_and_valid_options(loaded: Loaded) -> None:
    spec: BackendSpec = loaded.spec
    names = [each.name for each in spec.variants]
    require(
        len(set(names)) == len(names), f"variants are named {', '.join(names)}, expected a name of its own for each"
    )
    for each in spec.variants:
        config: object = structure(each.options, spec.config, path="")
        require(config != spec.config() or each.ranks > 2, f"{each.name!r} has the default options, as all checks have")
        problems = list(spec.check(config, ClusterInfo(device="cpu", ranks=each.ranks)))
        texts = [f"{problem.path} = {problem.text}" for problem in problems]
        require(not problems, f"the variant {each.name!r} cannot run on {each.ranks} ranks: {'; '.join(texts)}")
