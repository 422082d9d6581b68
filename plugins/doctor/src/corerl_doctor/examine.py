"""All checks of `corerl doctor`, ordered so that one finding explains the next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from corerl.config import Config, load_config
from corerl.errors import ConfigError
from corerl.observability import NOTICES_FILE, read_notices
from corerl.plan import selected
from corerl.plugin import Entry, Finding, Kind, Level
from corerl_doctor import installation
from corerl_doctor.child import run_check, run_checks


def examine(
    name: str = "",
    *,
    file: str = "",
    overrides: Sequence[str] = (),
    nodes: bool = False,
    layers: bool = False,
    run_dir: str = "",
) -> Iterator[Finding]:
    """Examine the plugin `name`, the plugins that the config in `file` selects, or briefly all installed ones; and
    repeat the notices of the run in `run_dir`.

    No plugin is imported in this process: each is checked in another process, which may crash.
    """
    yield from installation.interpreter()
    yield from installation.requirements(["corerl"])
    yield from installation.driver()
    found = []
    for notice in read_notices(Path(run_dir)) if run_dir else ():
        found.append(notice.text)
        yield Finding(
            level=Level.WARNING,
            what=notice.text,
            why=f"noted by the run with {notice.step} steps done",
            fix=f"see {Path(run_dir) / NOTICES_FILE}",
        )
    config: Config | None = None
    if file:
        try:
            config = load_config(file, overrides)
        except ConfigError as error:
            for line in error.message.splitlines():
                yield Finding(level=Level.ERROR, what=line, why="the run would not start", fix=f"edit {file}")
    if name:
        entries = [(kind, entry) for kind, entry in installation.all_entries() if entry.is_named(name)]
        yield from _installed(entries)
        if entries or ":" in name:
            yield from run_check("corerl_doctor.run:devices")
        yield from run_check("corerl_doctor.plugins:check_named", name)
    if config is not None:
        chosen = dict.fromkeys((each.kind, each.name) for each in selected(config) if each.used)
        for finding in _selected(list(chosen)):
            found.append(finding.what)
            yield finding
        listed = None if config.extensions is None else [each.name for each in config.extensions]
        yield from run_check("corerl_doctor.plugins:check_joining", listed)
        for finding in run_check("corerl_doctor.run:run", file, list(overrides), nodes, layers):
            # A plugin's own finding has a better cure, and a run's notice says when that was.
            if not any(what in finding.what for what in found):
                yield finding
    if not name and not file:
        yield from _all()


def _selected(chosen: Sequence[tuple[Kind, str]]) -> Iterator[Finding]:
    """Examine these plugins in full, with their implementations and probes, which need torch."""
    yield from _installed(
        [
            (kind, entry)
            for kind, entry in installation.all_entries()
            for k, name in chosen
            if k is kind and entry.is_named(name)
        ]
    )
    yield from run_check("corerl_doctor.run:devices")
    yield from run_checks("corerl_doctor.plugins:check_plugins", [(kind.value, name) for kind, name in chosen])


def _installed(entries: Sequence[tuple[Kind, Entry]]) -> Iterator[Finding]:
    yield from installation.duplicates(entries)
    yield from installation.editable(entries)
    yield from installation.requirements(sorted({entry.distribution for _, entry in entries} - {"", "corerl"}))


def _all() -> Iterator[Finding]:
    """Examine every entry point, but only its spec."""
    entries = installation.all_entries()
    yield from _installed(entries)
    named = [(kind.value, f"{entry.distribution}:{entry.name}") for kind, entry in entries]
    yield from run_checks("corerl_doctor.plugins:check_specs", named)
