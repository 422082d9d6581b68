"""Try every set of wheels that an extra of core names, and every wheel's absence, without installing anything again.

    PYTHON .ci/wheels.py look DIST
    PYTHON .ci/wheels.py train DIST

PYTHON has all that the wheels in the directory DIST require of others, and none of the wheels themselves. Each is
unpacked to a directory of its own, so that a set of them is a list for PYTHONPATH.

`look`: with each set every plugin of every kind is usable, and each example's config is valid or names the extra that
it lacks.

`train`: of the sets that an extra names, the two whose runs use most wheels train an example for two steps: the one
that needs most of these wheels. Core with a backend, an engine and the usual transports trains where there is nothing
but what these require, directly or through others.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import traceback
import uuid
import venv
import zipfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
BACKEND = "corerl-fsdp"  # added to the sets that have none, and cannot train
ENGINE, TRANSPORT = "corerl-transformers", "corerl-transports"  # the same
LEAST = {BACKEND, ENGINE, TRANSPORT}
QUICK = ["run.steps=2", "eval.every=0", "checkpoint.every=0", "roles.actor.ranks=1"]
QUICK += ["rollout.replicas=1", "rollout.prompts=4"]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
JOBS = 2
RUNS = 2  # besides that of the bare environment
TOOLS = {"test", "docs", "dev", "tutorial"}  # extras of this repository's own
# Who takes part in a run on a CPU has an entry point in one of these groups.
PARTS = tuple(f"corerl.{kind}" for kind in ("backends", "samplers", "transports", "extensions"))


def main(task: str, dist: str) -> int:
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        sites = {name: unpacked(wheel, scratch / "sites") for name, wheel in wheels(Path(dist)).items()}
        shutil.copytree(ROOT / "examples", scratch / "examples")
        os.chdir(scratch)
        sets = {"core alone": {"corerl"}, "core, a backend and an engine": {"corerl", *LEAST}}
        for extra in metadata.PathDistribution(metadata_of(sites["corerl"])).metadata.get_all("Provides-Extra") or ():
            if extra not in TOOLS:
                sets[f"corerl[{extra}]"] = ours(f"corerl[{extra}]", sites)
        (found,) = looked_at_each([set(sites)], sites)
        if not found:
            print("all: the process that looked has ended", file=sys.stderr)
            return 1
        needed: dict[str, set[str]] = {
            name: {canonicalize_name(each) for each in looked["needs"]} for name, looked in found["examples"].items()
        }
        wrong = problems("all", sites, found, needed)
        if not any(needed.values()):
            wrong.append("no example's config is valid with all wheels")
        elif task == "look":
            wrong += look(sets, sites, needed, found["imported"])
        else:
            trained = covering({frozenset(in_a_run(each, sites)) for each in sets.values()}, sites)
            with ThreadPoolExecutor(JOBS) as pool:
                jobs = [pool.submit(train_bare, {"corerl", *LEAST}, sites, needed)]
                jobs += [pool.submit(train, names, sites, needed) for names in trained]
                wrong += [line for job in jobs for line in job.result()]
            print(f"{len(jobs)} runs trained in {time.monotonic() - began:.0f} s")
    print("\n".join(wrong), file=sys.stderr)
    return int(bool(wrong))


def look(
    sets: Mapping[str, set[str]], sites: Mapping[str, Path], needed: Mapping[str, set[str]], imported: Iterable[str]
) -> list[str]:
    """What is wrong with these sets, by their titles, and with each that lacks a wheel."""
    began, whole = time.monotonic(), set(sites)
    lacking = {f"all but {name}": whole - {name} - above(name, sites) for name in sorted(whole - {"corerl"})}
    unequal = {frozenset(names): title for title, names in reversed([*sets.items(), *lacking.items()])}  # the first's
    for name in imported:  # once for all forks: what is not ours
        importlib.import_module(name)
    found = looked_at_each(unequal, sites)
    print(f"{len(unequal)} sets of {len(sites)} wheels looked at in {time.monotonic() - began:.0f} s")
    return [
        line
        for (names, title), each in zip(unequal.items(), found, strict=True)
        for line in problems(title, names, each, needed)
    ]


# ---- what the wheels say ---------------------------------------------------------------------------------------------


def wheels(dist: Path) -> dict[str, Path]:
    return {canonicalize_name(path.name.partition("-")[0]): path for path in dist.glob("*.whl")}


def unpacked(wheel: Path, where: Path) -> Path:
    """The directory that a wheel of Python files alone is installed in by being unpacked."""
    site = where / wheel.name.partition("-")[0]
    with zipfile.ZipFile(wheel) as file:
        file.extractall(site)
    return site


def metadata_of(site: Path) -> Path:
    (found,) = site.glob("*.dist-info")
    return found


def requires(site: Path) -> list[Requirement]:
    return [Requirement(line) for line in metadata.PathDistribution(metadata_of(site)).requires or ()]


def asked(requirement: Requirement, extras: Iterable[str]) -> bool:
    return requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in ("", *extras))


def ours(wanted: str, sites: Mapping[str, Path]) -> set[str]:
    """The wheels that `pip install WANTED` would install, of ours."""
    found: set[str] = set()
    rest, seen = [Requirement(wanted)], set[str]()
    while rest:
        each = rest.pop()
        name = canonicalize_name(each.name)
        if name not in sites or str(each) in seen:
            continue
        seen.add(str(each))
        found.add(name)
        rest += [other for other in requires(sites[name]) if asked(other, each.extras)]
    return found


def above(name: str, sites: Mapping[str, Path]) -> set[str]:
    """The wheels that require this one."""
    return {other for other in sites if other != name and name in ours(other, sites)}


def points(names: Iterable[str], sites: Mapping[str, Path], *groups: str) -> list[str]:
    """The names of the entry points that these wheels have in these groups."""
    return [
        point.name
        for name in sorted(names)
        for point in metadata.PathDistribution(metadata_of(sites[name])).entry_points
        if point.group in groups
    ]


def in_a_run(names: set[str], sites: Mapping[str, Path]) -> set[str]:
    """Core, the wheels that take part in a run with all that they require, an engine, and a backend if none is one."""
    parts = {"corerl", ENGINE, TRANSPORT, *(name for name in names if points([name], sites, *PARTS))}
    parts = parts.union(*(ours(name, sites) for name in parts))
    return parts if points(parts - {"corerl"}, sites, "corerl.backends") else {*parts, BACKEND}


def covering(sets: Iterable[frozenset[str]], sites: Mapping[str, Path]) -> list[frozenset[str]]:
    """Of these sets RUNS, one after the other, whose runs use most wheels."""
    backends = {name for name in sites if name != "corerl" and points([name], sites, "corerl.backends")}

    def used(names: frozenset[str]) -> set[str]:
        return set(names) - (backends - {backend_of(names, sites)})

    left, chosen = sorted(sets, key=lambda names: (len(names), sorted(names))), list[frozenset[str]]()
    missing = set[str]().union(*map(used, left)) - {"corerl", *LEAST}  # which train alone
    while missing and len(chosen) < RUNS:
        chosen.append(max(left, key=lambda names: len(used(names) & missing)))
        missing -= used(chosen[-1])
    return chosen


def backend_of(names: Iterable[str], sites: Mapping[str, Path]) -> str:
    """The wheel whose backend a run with these trains on."""
    own = [name for name in sorted(names) if name != "corerl" and points([name], sites, "corerl.backends")]
    return BACKEND if BACKEND in own else own[0]


# ---- looking, in a fork that has imported what is not ours -----------------------------------------------------------


def looked_at_each(sets: Iterable[Iterable[str]], sites: Mapping[str, Path]) -> list[Any]:
    """Of each set what `looked_at` returns, or nothing if its process has ended before."""
    found: list[Any] = []
    left = list(sets)
    while left:
        children = []
        for names in left[:JOBS]:
            reader, writer = os.pipe()
            if not (child := os.fork()):
                try:
                    with os.fdopen(writer, "w") as pipe:
                        pipe.write(json.dumps(looked_at(names, sites)))
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(0)
            os.close(writer)
            children.append((child, reader))
        del left[:JOBS]
        for child, reader in children:
            with os.fdopen(reader) as pipe:
                found.append(json.loads(pipe.read() or "{}"))
            os.waitpid(child, 0)
    return found


def looked_at(names: Iterable[str], sites: Mapping[str, Path]) -> dict[str, Any]:
    """What the commands say where these wheels are."""
    os.environ |= ENVIRONMENT
    sys.path[:0] = [str(sites[name]) for name in sorted(names)]
    sys.path.append(os.getcwd())  # where examples' functions are

    def said(*words: str) -> tuple[int, str]:
        from corerl.cli.main import main

        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                status = main(list(words))
            except SystemExit as end:
                status = int(end.code or 0)
        return status, out.getvalue() + err.getvalue()

    examples = {}
    for path in sorted(Path("examples").glob("*.toml")):
        status, text = said("config", "check", str(path))
        examples[path.name] = {"ok": status == 0, "text": text, "needs": needs(path) if status == 0 else []}
    return {
        "help": said("--help")[0],
        "plugins": plugins(),
        "examples": examples,
        "imported": imported(),
    }


def plugins() -> dict[str, list[dict[str, str]]]:
    """Of each kind of plugins the name of each, and why it cannot be loaded; "" if it can."""
    from corerl.errors import PluginError
    from corerl.plugin.registry import Kind, load, scan

    def fault(kind: Kind, name: str) -> str:
        try:
            load(kind, name)
        except PluginError as error:
            return str(error)
        return ""

    return {kind.value: [{"name": each.name, "fault": fault(kind, each.name)} for each in scan(kind)] for kind in Kind}


def imported() -> list[str]:
    """Modules of others' distributions that this process has imported, in the order in which it began to."""
    others = sysconfig.get_path("purelib")
    return [
        name
        for name, module in sys.modules.items()
        if (spec := getattr(module, "__spec__", None))
        and spec.name == name
        and spec.has_location
        and str(spec.origin).startswith(others)
    ]


def needs(path: Path) -> list[str]:
    from corerl.config.load import load_config
    from corerl.errors import ConfigError
    from corerl.plan.resolve import selected
    from corerl.plugin.registry import locate

    try:
        config = load_config(path)
    except ConfigError:  # it is fine, so it has the table of a command, which no run takes
        return []
    # Which transport `auto` becomes is known once processes are planned; both are of one wheel.
    chosen = [TRANSPORT] if config.run.has_engines and config.weights.transport == "auto" else []
    used = {locate(each.kind, each.name).distribution for each in selected(config) if each.used}
    return ["corerl", *used, *chosen]


def problems(title: str, names: Iterable[str], found: Any, needed: Mapping[str, set[str]]) -> list[str]:
    if not found:
        return [f"{title}: the process that looked has ended"]
    wrong = [f"{title}: corerl --help fails"] if found["help"] else []
    listed = [each for kind in found["plugins"].values() for each in kind]
    wrong += [f"{title}: {each['name']}: {each['fault']}" for each in listed if each["fault"]]
    for example, looked in found["examples"].items():
        lacks = needed[example] - set(names)
        if needed[example] and looked["ok"] != (not lacks):
            wrong.append(f"{title}: {example} lacks {lacks or 'nothing'}, but config check says {looked['text']}")
        elif lacks and "pip install 'corerl[" not in looked["text"]:
            wrong.append(f"{title}: {example} lacks {lacks}, but no extra is named: {looked['text']}")
    return wrong


# ---- training --------------------------------------------------------------------------------------------------------


def train(names: Iterable[str], sites: Mapping[str, Path], needed: Mapping[str, set[str]]) -> list[str]:
    """Train with these wheels on PYTHONPATH."""
    path = os.pathsep.join([str(sites[name]) for name in sorted(names)] + [os.getcwd()])
    return run(sys.executable, {"PYTHONPATH": path}, set(names), sites, needed)


def train_bare(names: set[str], sites: Mapping[str, Path], needed: Mapping[str, set[str]]) -> list[str]:
    """Train in an environment that has these wheels and, by links, what they require, and nothing else."""
    bare = Path("bare")
    venv.create(bare, symlinks=True)
    (site,) = bare.glob("lib/python*/site-packages")
    for name in names:
        for entry in sites[name].iterdir():
            (site / entry.name).symlink_to(entry)
    rest, seen = [each for name in sorted(names) for each in requires(sites[name])], set[str]()
    while rest:
        each = rest.pop()
        name = canonicalize_name(each.name)
        if name in seen or name in sites or not asked(each, ()):
            continue
        seen.add(name)
        found = metadata.distribution(name)
        rest += [Requirement(line) for line in found.requires or ()]
        link(found, site)
    print(f"an environment of {len(seen)} distributions and {len(names)} wheels")
    return run(str(bare.absolute() / "bin" / "python"), {"PYTHONPATH": os.getcwd()}, names, sites, needed)


def link(distribution: metadata.Distribution, site: Path) -> None:
    """Link a distribution's modules and metadata, second-level ones where several distributions share a directory."""
    for top in {Path(str(file)).parts[0] for file in distribution.files or () if ".." not in Path(str(file)).parts}:
        source = Path(str(distribution.locate_file(top)))
        if not source.exists() or top == "__pycache__":
            continue
        if source.is_dir() and not (source / "__init__.py").exists() and not top.endswith("-info"):
            (site / top).mkdir(exist_ok=True)
            for entry in source.iterdir():
                if not (site / top / entry.name).exists():
                    (site / top / entry.name).symlink_to(entry)
        elif not (site / top).exists():
            (site / top).symlink_to(source)


def run(
    python: str,
    own: Mapping[str, str],
    names: set[str],
    sites: Mapping[str, Path],
    needed: Mapping[str, set[str]],
) -> list[str]:
    """Two steps of the example that needs most of these wheels, with a backend and a transport of theirs."""
    others = names - {"corerl"}
    fitting = [each for each in needed if needed[each] and needed[each] <= {*names, *LEAST}]
    example = max(fitting, key=lambda each: (len(needed[each] & names), each))
    backend = points([backend_of(names, sites)], sites, "corerl.backends")[0]
    directory = Path("runs") / uuid.uuid4().hex
    words = [*QUICK, f"backend.name={backend}", f"run.dir={directory}"]
    words += [f"weights.transport={name}" for name in points(others - {TRANSPORT}, sites, "corerl.transports")]
    began = time.monotonic()
    ended = subprocess.run(
        [python, "-m", "corerl", "train", f"examples/{example}", *words],
        env={**os.environ, **ENVIRONMENT, **own, "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
    )
    rows = (directory / "metrics.jsonl").read_text().splitlines() if (directory / "metrics.jsonl").exists() else []
    title = f"{', '.join(sorted(others))}: {example} on {backend}"
    print(f"{title}: {time.monotonic() - began:.0f} s", flush=True)
    if ended.returncode or len(rows) != 2:
        said = f"{ended.stdout[-2000:]}{ended.stderr[-4000:]}"
        return [f"{title}: exit status {ended.returncode}, {len(rows)} steps\n{said}"]
    return []


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
