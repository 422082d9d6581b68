"""Check a config before its run: its problems, its processes' environment, and every node's plugins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from corerl.cluster.nodes import ask_each_node
from corerl.cluster.runtime import ray_session
from corerl.config.load import load_config
from corerl.doctor.child import Begins, Told
from corerl.driver.environment import environment_of, process_environment
from corerl.driver.prepare import Prepared, prepare
from corerl.errors import CorerlError, UserError
from corerl.plugin.options import notes, selected
from corerl.plugin.origins import Origin, look_for
from corerl.plugin.registry import Kind
from corerl.plugin.spec import Finding, Level, ok

ANSWER_WITHIN = 120.0  # seconds for all nodes together: each starts a process and imports its plugins


def devices() -> Iterator[Told]:
    """The devices that torch sees on this machine."""
    yield Begins("querying torch's devices", "python -m pip install --force-reinstall torch")
    if torch.cuda.is_available():
        names = sorted({torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())})
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        yield ok(
            f"torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices ({', '.join(names)}), NCCL {nccl}"
        )
    elif torch.version.cuda is None:
        yield ok(f"torch {torch.__version__} is built for CPUs")
    else:
        yield ok(f"torch {torch.__version__} is built for CUDA {torch.version.cuda}, and sees no CUDA device here")


def run(file: str, overrides: Sequence[str], nodes: bool, layers: bool) -> Iterator[Told]:
    """Check a config that can be parsed."""
    config = load_config(file, overrides)
    for note in notes(config):
        yield Finding(
            level=Level.WARNING,
            what=note,
            why="its settings have no effect",
            mend=f"remove the table from {file}, or install its plugin",
        )
    yield Begins(f"checking {file}", f"corerl config check {file}")
    try:
        prepared = prepare(config, starting=False)
    except UserError as error:
        for line in error.message.splitlines():
            yield _problem(line, file)
        if nodes:
            yield Finding(
                level=Level.WARNING,
                what="the nodes were not checked",
                why="what a run starts there depends on a valid config",
                mend=f"fix {file} first",
            )
        return
    yield ok(
        f"{file} can run: {len(prepared.plan.roles)} role{'s' * (len(prepared.plan.roles) != 1)} on {prepared.device}"
    )
    yield from _environments(prepared, file)
    if layers:
        from corerl.doctor.layers import compare_layers  # slow to import: takes seconds

        yield from compare_layers(prepared)
    if nodes:
        yield Begins(f"checking the nodes of {config.cluster.address}", "ray status")
        yield from _nodes(prepared)


def _environments(prepared: Prepared, file: str) -> Iterator[Finding]:
    """The environment of each group's processes, which is set before they import anything."""
    groups = {f"{role} ranks": (plan.backend.name, plan.environment) for role, plan in prepared.plan.roles.items()}
    if prepared.config.run.samples:
        engine = prepared.plan.engine
        wanted = engine.spec.environment(prepared.config.engines[engine.name], prepared.plan.engines)
        groups["engines"] = (engine.name, wanted)
    for who, (plugin, wanted) in groups.items():
        try:
            given = environment_of(prepared, plugin, wanted)
        except UserError as error:
            yield _problem(error.message, file)
        else:
            cluster = prepared.config.cluster
            hidden = {*cluster.environment, *cluster.secrets}
            shown = [f"{name}={'...' if name in hidden else value}" for name, value in given.items()]
            yield ok(f"{who} get {' '.join(shown)}")


def _nodes(prepared: Prepared) -> Iterator[Finding]:
    """One finding per node: whether it has the same plugins as the driver."""
    named = named_by(prepared)
    wanted = look_for(named)
    question = [(kind.value, name) for kind, name in named]
    address = prepared.config.cluster.address
    try:
        with ray_session(address=address, cpus=1.0):
            answers = ask_each_node(
                "corerl.doctor.nodes:plugins_here",
                question,
                environment=process_environment(prepared),
                timeout=ANSWER_WITHIN,
            )
    except CorerlError as error:
        yield Finding(
            level=Level.ERROR,
            what=error.message,
            why="a run joins this cluster",
            mend=f"ray status --address {address}",
        )
        return
    for answer in answers:
        if answer.error:
            yield Finding(
                level=Level.ERROR,
                what=f"node {answer.node} cannot report what is installed: {answer.error}",
                why="a rank or an engine there could not start",
                mend=f"there: python -m pip install {' '.join(each.requirement for each in wanted)}",
            )
            continue
        yield _compared(answer.node, wanted, [Origin(**each) for each in answer.value])


def _compared(node: str, wanted: Sequence[Origin], found: Sequence[Origin]) -> Finding:
    amiss = {each: text for each, other in zip(wanted, found, strict=True) if (text := each.against(other))}
    if not amiss:
        return ok(f"node {node} has what the driver has: {', '.join(map(str, wanted))}")
    return Finding(
        level=Level.ERROR,
        what=f"node {node} does not have what the driver has: {'; '.join(amiss.values())}",
        why="a rank or an engine there would be rejected, or run different code than its neighbors",
        mend=f"there: python -m pip install {' '.join(dict.fromkeys(each.requirement for each in amiss))}",
    )


def named_by(prepared: Prepared) -> list[tuple[Kind, str]]:
    """The plugins that run in ranks and engines, as the config names them."""
    in_ranks = {each.name for plan in prepared.plan.roles.values() for each in plan.assignments[0].extensions}
    chosen = [each for each in selected(prepared.config) if each.used]
    there = [each for each in chosen if each.kind is not Kind.EXTENSIONS or each.name in in_ranks]
    return list(dict.fromkeys((each.kind, each.name) for each in there))


def _problem(line: str, file: str) -> Finding:
    return Finding(
        level=Level.ERROR,
        what=line,
        why="the run would not start",
        mend=f"edit {file}, then: corerl config check {file}",
    )
