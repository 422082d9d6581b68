"""Check a config before its run: its problems, its processes' environment, and every node's plugins."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from attrs import evolve

from corerl.algorithms import ACTOR
from corerl.cluster import ask_each_node, ray_session
from corerl.config import Config, load_config
from corerl.errors import CorerlError, UserError
from corerl.plan import Plan, ignored_tables, make_plan, selected
from corerl.plugin import Finding, Kind, Level, Origin, ok, plugins_here
from corerl_doctor.child import CheckStarted, Report

ANSWER_WITHIN = 120.0  # seconds for all nodes together: each starts a process and imports its plugins


def devices() -> Iterator[Report]:
    """The devices that torch sees on this machine."""
    yield CheckStarted("querying torch's devices", "python -m pip install --force-reinstall torch")
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


def run(file: str, overrides: Sequence[str], nodes: bool, layers: bool) -> Iterator[Report]:
    """Check a config that can be parsed."""
    config = load_config(file, overrides)
    ignored = ignored_tables(config)
    for note in ignored:
        yield Finding(
            level=Level.WARNING,
            what=note,
            why="its settings have no effect",
            fix=f"remove the table from {file}, or install its plugin",
        )
    yield CheckStarted(f"checking {file}", f"corerl config check {file}")
    try:
        plan = make_plan(config, starting=False)
    except UserError as error:
        for line in error.message.splitlines():
            yield _problem(line, file)
        if nodes:
            yield Finding(
                level=Level.WARNING,
                what="the nodes were not checked",
                why="what a run starts there depends on a valid config",
                fix=f"fix {file} first",
            )
        return
    roles, cluster = plan.processes.roles, plan.cluster
    for line in plan.notices:
        if line not in ignored:
            yield Finding(
                level=Level.WARNING,
                what=line,
                why="a run says so before its first step",
                fix=f"edit {file} if that is not meant",
            )
    yield ok(f"{file} can run: {len(roles)} role{'s' * (len(roles) != 1)} on {plan.processes.device}")
    yield from _environments(plan)
    if layers:
        from corerl_doctor.layers import compare_layers  # slow to import: takes seconds

        yield from compare_layers(roles[ACTOR].assignments[0].config, temperature=plan.rollout.settings.temperature)
    if nodes:
        yield CheckStarted(f"checking the nodes of {cluster.address}", "ray status")
        yield from _nodes(named_by(plan, config), plan.processes.common, cluster.address)


def _environments(plan: Plan) -> Iterator[Finding]:
    """The environment of each group's processes, which is set before they import anything."""
    processes, hidden = plan.processes, {*plan.cluster.environment, *plan.cluster.secrets}
    groups = {f"{name} ranks": role.environment for name, role in processes.roles.items()}
    if processes.engine is not None:
        groups["engines"] = processes.engine.environment
    for who, given in groups.items():
        shown = [f"{name}={'...' if name in hidden else value}" for name, value in given.items()]
        yield ok(f"{who} get {' '.join(shown)}")


def _nodes(named: Sequence[tuple[Kind, str]], environment: Mapping[str, str], address: str) -> Iterator[Finding]:
    """One finding per node of the cluster at `address`: whether it has the same plugins as the driver."""
    question = [(kind.value, name) for kind, name in named]
    wanted = origins(plugins_here(question))
    try:
        with ray_session(address=address, cpus=1.0):
            answers = ask_each_node(
                "corerl.plugin:plugins_here",
                question,
                environment=environment,
                timeout=ANSWER_WITHIN,
            )
    except CorerlError as error:
        yield Finding(
            level=Level.ERROR,
            what=error.message,
            why="a run joins this cluster",
            fix=f"ray status --address {address}",
        )
        return
    for answer in answers:
        if answer.error:
            yield Finding(
                level=Level.ERROR,
                what=f"node {answer.node} cannot report what is installed: {answer.error}",
                why="a rank or an engine there could not start",
                fix=f"there: python -m pip install {' '.join(each.requirement for each in wanted)}",
            )
            continue
        yield _compared(answer.node, wanted, origins(answer.value))


def origins(answer: Sequence[Mapping[str, str]]) -> list[Origin]:
    """What `plugins_here` returns here or on a node."""
    return [Origin(**each) for each in answer]


def _compared(node: str, wanted: Sequence[Origin], found: Sequence[Origin]) -> Finding:
    amiss = {each: text for each, other in zip(wanted, found, strict=True) if (text := each.against(other))}
    if not amiss:
        return ok(f"node {node} has what the driver has: {', '.join(map(str, wanted))}")
    return Finding(
        level=Level.ERROR,
        what=f"node {node} does not have what the driver has: {'; '.join(amiss.values())}",
        why="a rank or an engine there would be rejected, or run different code than its neighbors",
        fix=f"there: python -m pip install {' '.join(dict.fromkeys(each.requirement for each in amiss))}",
    )


def named_by(plan: Plan, config: Config) -> list[tuple[Kind, str]]:
    """The plugins that run in ranks and engines, as the config names them, or the plan chooses in place of 'auto'."""
    config = evolve(config, weights=evolve(config.weights, transport=plan.processes.transport))
    in_ranks = [each.name for role in plan.processes.roles.values() for each in role.assignments[0].extensions]
    elsewhere = (Kind.EXTENSIONS, Kind.SAMPLERS)  # a sampler is in the driver alone
    there = [(each.kind, each.name) for each in selected(config) if each.used and each.kind not in elsewhere]
    return list(dict.fromkeys([*there, *((Kind.EXTENSIONS, name) for name in in_ranks)]))


def _problem(line: str, file: str) -> Finding:
    return Finding(
        level=Level.ERROR,
        what=line,
        why="the run would not start",
        fix=f"edit {file}, then: corerl config check {file}",
    )
