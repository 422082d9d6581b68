"""Measure the cost of plugins: the start of a command with many installed, and a hook call through wrappers."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.empty_backend import EmptyBackend
from benchmarks.report import Comparison, Number, Report, environment, finish, in_turns, parser
from corerl.plugin.hooks import Context
from corerl.plugin.host import PluginHost, State
from corerl.types import LossSpec, MemoryKind, Output, PackedBatch

BARE = "import attrs"
ALLOWED = 0.150  # seconds that a command may take beyond 1.3 times the bare start
SPEC = """
from attrs import field, frozen
from corerl.plugin.capabilities import Capability, unsupported
from corerl.plugin.spec import BackendSpec

@frozen(kw_only=True)
class Options:
    shards: int = field(default=1, metadata={"help": "ranks that one copy is sharded over"})
    offload: bool = field(default=False, metadata={"help": "moments in host memory"})

SPEC = BackendSpec(
    implementation="nowhere:Backend", config=Options, api=(2, 0), summary="one of many",
    capabilities={Capability.CRITIC: unsupported("nothing here is real")},
)
"""


class Wrapper:
    """An extension that does nothing."""

    def forward_backward(self, outputs: tuple[Output, ...]) -> Any:
        return (yield)


def write_plugins(site: Path, count: int) -> None:
    """As many distributions, as pip would leave them."""
    for number in range(count):
        metadata = site / f"corerl_many{number}-1.0.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: corerl-many{number}\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[corerl.backends]\nmany{number} = corerl_many{number}:SPEC\n")
        (site / f"corerl_many{number}.py").write_text(SPEC)


def best_start(words: Sequence[str], variables: dict[str, str], starts: int) -> float:
    """Seconds of the quickest of several starts of Python: what is slower is the machine's."""
    took = []
    for _ in range(starts):
        began = time.perf_counter()
        subprocess.run([sys.executable, *words], env=variables, stdout=subprocess.DEVNULL, check=True)
        took.append(time.perf_counter() - began)
    return min(took)


def host_with(wrappers: int) -> PluginHost:
    context = Context(role="actor", rank=0, world_size=1, local_rank=0, run_dir="")
    extensions = [(f"wrapper{number}", Wrapper()) for number in range(wrappers)]
    host = PluginHost(EmptyBackend(), name="empty", extensions=extensions, context=context)
    host.state, host.resident = State.READY, frozenset(MemoryKind)  # as after `init`
    return host


def per_call(host: PluginHost, calls: int) -> float:
    """Seconds of one `forward_backward` of the host, the mean over many."""
    batch = PackedBatch(micro_batches=(), count=1)
    loss = LossSpec(name="clipped")
    call = host.forward_backward
    began = time.perf_counter()
    for _ in range(calls):
        call(batch=batch, loss=loss, outputs=(), last=False)
    return (time.perf_counter() - began) / calls


def measure(*, rounds: int, size: int, calls: int, starts: int) -> Report:
    numbers: list[Number] = []
    comparisons: list[Comparison] = []
    with tempfile.TemporaryDirectory(prefix="corerl-plugins-") as scratch:
        site = Path(scratch)
        write_plugins(site, size)
        variables = environment()
        variables["PYTHONPATH"] = os.pathsep.join([str(site), variables["PYTHONPATH"]])
        best_start(["-m", "compileall", "-q", str(site)], variables, 1)  # as pip does when it installs
        for command in ("--help", "plugins backends"):
            words = ["-c", "import sys; from corerl.cli.main import main; sys.exit(main())", *command.split()]
            best_start(words, variables, 2)
            ours, bare = in_turns(
                rounds,
                lambda _, words=words: best_start(words, variables, starts),  # type: ignore[misc]
                lambda _: best_start(["-c", BARE], variables, starts),
            )
            comparisons.append(Comparison(what=f"`corerl {command}`", against=f"`{BARE}`", ours=ours, other=bare))
            beyond = [mine - 1.3 * other for mine, other in zip(ours, bare, strict=True)]
            numbers.append(
                Number(what=f"`corerl {command}` less 1.3 x the other", values=beyond, unit="s", target=ALLOWED)
            )
    wrapped, bare_host = host_with(3), host_with(0)
    for host in (wrapped, bare_host):
        per_call(host, calls)
    three, none = in_turns(rounds, lambda _: per_call(wrapped, calls), lambda _: per_call(bare_host, calls))
    comparisons.append(
        Comparison(
            what="`forward_backward` with three wrappers", against="with none", ours=three, other=none, target=3.0
        )
    )
    return Report(
        name="plugins",
        size=f"{size} plugins, the quickest of {starts} starts a round, {calls} calls a round",
        comparisons=comparisons,
        numbers=numbers,
        note=(
            "A start is a Python process from its creation to its end; the plugins are backends on PYTHONPATH, in "
            "addition to the installed ones. `corerl plugins backends` imports the spec of each. A call is "
            "PluginHost.forward_backward around an empty backend, including all of its checks."
        ),
    )


if __name__ == "__main__":
    command = parser(__doc__, rounds=7, size=20, unit="plugins installed")
    command.add_argument("--calls", type=int, default=20_000, help="of the hook in one round (default: 20000)")
    command.add_argument("--starts", type=int, default=5, help="of each command in one round (default: 5)")
    args = command.parse_args()
    finish(measure(rounds=args.rounds, size=args.size, calls=args.calls, starts=args.starts), args.output)
