"""Nodes with environments of their own, one without the driver's plugin and one with another version of it: `corerl
doctor --nodes` and `corerl train` each name them in one line."""

from __future__ import annotations

import socket
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
from attrs import frozen

from corerl.plugin import Kind, installed_names
from plugins.doctor.tests.sites import distribution, spec
from tests.cluster.nodes import cluster
from tests.end_to_end.command import STARTS_WITHIN, write_small
from tests.forks.client import Forked, kill_session
from tests.forks.ray import environment

pytestmark = [
    pytest.mark.processes,
    pytest.mark.nightly,
]  # nodes take a minute; cheaper: trainer's and plugin's fingerprints

KNOWN = ", ".join(installed_names(Kind.BACKENDS))

BARE = "bare"
STORE = 100 * 2**20  # bytes of each node's object store
MAIN = """
import sys
sys.path.insert(0, {packages!r})
from corerl_testing import main
sys.exit(main())
"""


@frozen(kw_only=True)
class Nodes:
    address: str
    packages: Path  # of the environment that the driver is in, and the head


def interpreter(directory: Path, version: str) -> Path:
    """Of a virtual environment with all that this one has, and this version of a plugin: "" for none,
    BARE for no CoreRL either."""
    venv.create(directory, symlinks=True)
    site = site_of(directory)
    (site / "shared.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    if version == BARE:
        (site / "corerl.py").write_text("raise ModuleNotFoundError(\"No module named 'corerl'\")")
    elif version:
        distribution(site, "corerl-tried", "tried = corerl_tried:SPEC", version=version, corerl_tried=spec())
    return directory / "bin" / "python"


def site_of(directory: Path) -> Path:
    return Path(sysconfig.get_path("purelib", vars={"base": str(directory)}))


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    directory = tmp_path_factory.mktemp("environments")
    versions = {"head": "0.2", "lacking": "", "older": "0.1", "bare": BARE}
    pythons = {name: interpreter(directory / name, version) for name, version in versions.items()}
    tables = [
        {
            "node_name": name,
            "python": str(python),
            "num_cpus": 2,
            "object_store_memory": STORE,
            "resources": {name: 2},
            **({"include_dashboard": False} if name == "head" else {}),
        }
        for name, python in pythons.items()
    ]
    with cluster(*tables) as address:
        yield Nodes(address=address, packages=site_of(directory / "head"))


def command(nodes: Nodes, directory: Path, name: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """`corerl NAME` with the driver's packages, for a small run of one rank and one engine in the cluster. They are in
    no PYTHONPATH, which a run hands on to its ranks."""
    file = write_small(directory)
    chosen = [
        "backend.name=tried",
        "roles.actor.ranks=1",
        f"cluster.address={nodes.address}",
        f"run.dir={directory}/run",
    ]
    leading = ["--config", file, "--nodes"] if name == "doctor" else [file]
    own = {name: value for name, value in environment().items() if name != "PYTHONPATH"}
    program = Path(sys.executable).with_name("corerl")
    arguments = [str(program), name, *map(str, leading), *chosen, *map(str, words)]
    with (directory / "out.txt").open("w+") as out, (directory / "err.txt").open("w+") as err:
        code = MAIN.format(packages=str(nodes.packages))
        process = Forked(arguments, code, environment=own, stdout=out, stderr=err, directory=directory)
        try:
            status = process.wait(timeout=STARTS_WITHIN)
        finally:
            kill_session(process.pid)
        return subprocess.CompletedProcess(
            arguments, status, (directory / "out.txt").read_text(), (directory / "err.txt").read_text()
        )


def test_the_doctor_has_a_line_for_each_node(nodes: Nodes, tmp_path: Path) -> None:
    done = command(nodes, tmp_path, "doctor")
    lines = done.stdout.splitlines()
    told = {line.split(" (")[1].split(",")[0]: index for index, line in enumerate(lines) if " node " in line}
    assert sorted(told) == ["bare", "head", "lacking", "older"], done.stdout + done.stderr
    host = socket.gethostname()
    ours = "corerl (corerl 0.1.0), backend 'tried' (corerl-tried 0.2), engine 'transformers' (corerl 0.1.0)"
    ours += ", algorithm 'grpo' (corerl 0.1.0)"  # whose loss the ranks import
    head, lacking, older, bare = (lines[told[name]] for name in ("head", "lacking", "older", "bare"))
    assert head.startswith(f"ok       node {host} (head, id ")
    assert head.endswith(f") has what the driver has: {ours}")
    assert lacking.startswith(f"error    node {host} (lacking, id ")
    assert lacking.endswith(f") does not have what the driver has: unknown backend 'tried'; installed: {KNOWN}")
    assert older.startswith(f"error    node {host} (older, id ")
    assert older.endswith(
        ") does not have what the driver has: backend 'tried' is corerl-tried 0.1, but the driver's is corerl-tried 0.2"
    )
    assert bare.startswith(f"error    node {host} (bare, id ")
    assert bare.endswith(") cannot report what is installed: ModuleNotFoundError: No module named 'corerl'")
    for name in ("lacking", "older"):
        assert lines[told[name] + 2].strip() == "fix: there: python -m pip install corerl-tried==0.2"
    assert (done.returncode, lines[-1]) == (1, "3 errors")


def test_this_interpreter_has_none_of_these_plugins() -> None:
    """Else the tests above would prove nothing."""
    program = "from corerl.plugin.registry import Kind, installed_names; print(installed_names(Kind.BACKENDS))"
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "tried" not in shown.stdout
