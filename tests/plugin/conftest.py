"""Small real distributions, written to a directory on sys.path: what the registry finds is what pip would have left."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

BACKEND_SPEC = """
from attrs import field, frozen
from corerl.plugin.capabilities import Capability, unsupported
from corerl.plugin.spec import BackendSpec, Problem

@frozen(kw_only=True)
class Options:
    shards: int = field(default=1, metadata={"help": "how many"})

def check(options, cluster):
    if options.shards > cluster.ranks:
        yield Problem("shards", f"{options.shards} is more than {cluster.ranks} ranks")

SPEC = BackendSpec(
    implementation="IMPLEMENTATION",
    config=Options,
    api=(2, 0),
    summary="a small backend",
    capabilities={Capability.CRITIC: unsupported("no value head")},
    check=check,
)
"""

Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """install(distribution, {"backends": {"mine": "module:SPEC"}}, version=..., requires=..., **{module: source}) on
    sys.path."""
    before = set(sys.modules)

    def install(
        distribution: str,
        groups: dict[str, dict[str, str]],
        *,
        version: str = "0.1.0",
        site: str = "site",
        requires: Sequence[str] = (),
        **modules: str,
    ) -> Path:
        directory = tmp_path / site
        if not directory.exists():
            directory.mkdir()
            monkeypatch.syspath_prepend(directory)
        metadata = directory / f"{distribution.replace('-', '_')}-{version}.dist-info"
        metadata.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {distribution}", f"Version: {version}"]
        (metadata / "METADATA").write_text("\n".join([*lines, *(f"Requires-Dist: {each}" for each in requires), ""]))
        (metadata / "entry_points.txt").write_text(
            "".join(
                f"[corerl.{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items())
                for group, points in groups.items()
            )
        )
        for module, source in modules.items():
            (directory / f"{module}.py").write_text(source.replace("IMPLEMENTATION", f"{module}_code:Code"))
        os.utime(directory, ns=(0, time.time_ns()))  # which the clock of a file system is too coarse for
        return directory

    yield install
    for module in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[module], "__file__", "")):
            del sys.modules[module]


@pytest.fixture
def backend_spec() -> str:
    """Source of a module with a valid SPEC."""
    return BACKEND_SPEC


@pytest.fixture
def extension_spec() -> str:
    """Source of a module with a valid extension SPEC, for workers; its class lies in the module `NAME_code`."""
    return """
from attrs import field, frozen
from corerl.plugin.spec import ExtensionSpec, Process

@frozen(kw_only=True)
class Options:
    every: int = field(default=1, metadata={"help": "steps"})

SPEC = ExtensionSpec(
    implementation="IMPLEMENTATION", config=Options, api=(2, 0), summary="an extension", process=Process.WORKER
)
"""
