"""What the registry finds among real metadata, and what it says where it cannot."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from corerl.errors import PluginBroken, PluginConflict, PluginIncompatible, PluginNotFound
from corerl.plugin.registry import Kind, load, scan
from corerl.plugin.spec import API

Install = Callable[..., Path]


def test_a_backend_is_found_by_name_with_its_distribution(install: Install, backend_spec: str) -> None:
    install("corerl-mine", {"backends": {"mine": "mine_a:SPEC"}}, version="0.3.1", mine_a=backend_spec)
    loaded = load(Kind.BACKENDS, "mine")
    assert (loaded.name, loaded.distribution, loaded.version, loaded.value) == (
        "mine",
        "corerl-mine",
        "0.3.1",
        "mine_a:SPEC",
    )
    assert loaded.spec.summary == "a small backend"


def test_a_name_of_two_distributions_is_a_conflict(install: Install, backend_spec: str) -> None:
    install("corerl-mine", {"backends": {"mine": "mine_f:SPEC"}}, mine_f=backend_spec)
    install("other", {"backends": {"mine": "other_f:SPEC"}}, version="2.0", other_f=backend_spec)
    with pytest.raises(PluginConflict) as caught:
        load(Kind.BACKENDS, "mine")
    assert caught.value.message == (
        "backend 'mine' is provided by corerl-mine 0.1.0 and other 2.0; choose one by writing 'corerl-mine:mine' or "
        "'other:mine'"
    )
    assert load(Kind.BACKENDS, "other:mine").distribution == "other"
    assert load(Kind.BACKENDS, "CoreRL_mine:mine").name == "mine"


def test_a_broken_backend_has_its_cause_and_spoils_none(install: Install, backend_spec: str) -> None:
    install("corerl-good", {"backends": {"good": "good_h:SPEC"}}, good_h=backend_spec)
    install("corerl-bad", {"backends": {"bad": "bad_h:SPEC"}}, bad_h="import a_library_that_is_not_there")
    with pytest.raises(PluginBroken) as caught:
        load(Kind.BACKENDS, "bad")
    assert caught.value.message == (
        "backend 'bad' (corerl-bad 0.1.0) cannot be loaded from bad_h:SPEC: "
        "ModuleNotFoundError: No module named 'a_library_that_is_not_there'; repair or reinstall corerl-bad"
    )
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
    assert load(Kind.BACKENDS, "good").name == "good"


@pytest.mark.parametrize("library", ["importlib.metadata", "importlib_metadata"])
def test_a_distribution_without_metadata_spoils_none(
    install: Install, backend_spec: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("corerl-good", {"backends": {"half": "good_m:SPEC"}}, good_m=backend_spec)
    site = install("corerl-half", {"backends": {"half": "half_m:SPEC"}})
    (site / "corerl_half-0.1.0.dist-info/METADATA").unlink()  # as an interrupted install leaves it
    # The second takes the place of the first once anything has imported it.
    monkeypatch.setattr("importlib.metadata.entry_points", pytest.importorskip(library).entry_points)
    assert load(Kind.BACKENDS, "corerl-good:half").distribution == "corerl-good"
    assert [each.distribution for each in scan(Kind.BACKENDS) if each.name == "half"] == ["", "corerl-good"]


@pytest.mark.parametrize(
    ("line", "other", "said"),
    [
        ("SPEC = BackendSpec(", "SPEC = 3\nBackendSpec(", " is a int, expected a BackendSpec"),
        ("config=Options", "config=dict", " has config=<class 'dict'>, expected a frozen attrs class"),
        ("config=Options", "config=Options()", " has config=Options(shards=1), expected a frozen attrs class"),
        ("(2, 0)", "'1.0'", " has api='1.0', expected (major, minor)"),
        ("(2, 0)", "(1,)", " has api=(1,), expected (major, minor)"),
        ("(2, 0)", "None", " has api=None, expected (major, minor)"),
    ],
)
def test_a_spec_that_is_none_is_broken(install: Install, backend_spec: str, line: str, other: str, said: str) -> None:
    assert line in backend_spec
    install("corerl-bad", {"backends": {"bad": "bad_k:SPEC"}}, bad_k=backend_spec.replace(line, other))
    with pytest.raises(PluginBroken) as caught:
        load(Kind.BACKENDS, "bad")
    assert caught.value.message.startswith("backend 'bad' (corerl-bad 0.1.0)")
    assert caught.value.message.endswith(f"bad_k:SPEC{said}")


def test_a_module_path_without_a_spec_is_refused(install: Install) -> None:
    install("corerl-bad", {}, bad_l="SPEC = 3")
    with pytest.raises(PluginBroken, match="bad_l:SPEC is a int, expected a BackendSpec"):
        load(Kind.BACKENDS, "bad_l:SPEC")
    with pytest.raises(PluginNotFound, match=r"unknown backend '__main__:SPEC'"):
        load(Kind.BACKENDS, "__main__:SPEC")


@pytest.mark.parametrize("api", [(3, 0), (2, 3), (1, 0), (0, 9)])
def test_a_backend_of_another_api_is_refused_with_both_versions(
    install: Install, backend_spec: str, api: tuple[int, int]
) -> None:
    major, minor = api
    changed = "" if api > API else "docs/versioning.md and `corerl doctor` say what has moved; "
    install("corerl-mine", {"backends": {"mine": "mine_k:SPEC"}}, mine_k=backend_spec.replace("(2, 0)", repr(api)))
    with pytest.raises(PluginIncompatible) as caught:
        load(Kind.BACKENDS, "mine")
    assert caught.value.message == (
        f"backend 'mine' (corerl-mine 0.1.0) was written for API {major}.{minor}, but this corerl supports 2.2; "
        f"{changed}install a release of corerl-mine for API 2.2, or a corerl that supports {major}.{minor}"
    )
    assert pickle.loads(pickle.dumps(caught.value)).api == api  # as on its way through Ray
