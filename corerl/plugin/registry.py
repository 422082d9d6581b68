"""Find plugins by name: scan what is installed, say what is wrong with each, and load the light spec of the chosen one.

It does its own scan because the stock loaders stop at the first broken plugin, silently let the first of two equal
names win, and return nothing for an unknown name.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, StrEnum
from typing import TYPE_CHECKING, Any

import attrs
from attrs import asdict, field, frozen

from corerl.errors import PluginBroken, PluginConflict, PluginError, PluginIncompatible, PluginNotFound
from corerl.imports import Where, importable
from corerl.messages import did_you_mean, nearest, one_line
from corerl.plugin.api import API
from corerl.plugin.moved import PAGE, as_list, method_now, used, where_now
from corerl.plugin.spec import (
    AlgorithmSpec,
    BackendSpec,
    CommandSpec,
    DisplaySpec,
    EngineSpec,
    ExtensionSpec,
    SamplerSpec,
    Spec,
    ToolFormatSpec,
    TransportSpec,
)

if TYPE_CHECKING:
    from importlib.metadata import Distribution


class Kind(Enum):
    """A group of plugins; the value is also the name of its tables in the config."""

    BACKENDS = "backends"
    ENGINES = "engines"
    SAMPLERS = "samplers"
    EXTENSIONS = "extensions"
    DISPLAYS = "displays"
    ALGORITHMS = "algorithms"
    COMMANDS = "commands"
    TOOL_FORMATS = "tool_formats"
    TRANSPORTS = "transports"

    @property
    def group(self) -> str:
        """The entry-point group."""
        return f"corerl.{self.value}"

    @property
    def noun(self) -> str:
        return self.value.removesuffix("s").replace("_", " ")

    @property
    def spec(self) -> type:
        """The class of which an entry point in this group must name an instance."""
        return {
            Kind.BACKENDS: BackendSpec,
            Kind.ENGINES: EngineSpec,
            Kind.SAMPLERS: SamplerSpec,
            Kind.EXTENSIONS: ExtensionSpec,
            Kind.DISPLAYS: DisplaySpec,
            Kind.ALGORITHMS: AlgorithmSpec,
            Kind.COMMANDS: CommandSpec,
            Kind.TOOL_FORMATS: ToolFormatSpec,
            Kind.TRANSPORTS: TransportSpec,
        }[self]


# The commands of core, modules of `corerl.cli`: a plugin's of the same name is only reached as 'distribution:name'.
CORE_COMMANDS = ("train", "eval", "export", "config", "plugins", "options")

# How to install a first-party plugin that is missing; the only place in core that knows other wheels' plugins by name.
INSTALL_HINTS: dict[Kind, dict[str, str]] = {
    Kind.BACKENDS: {
        "deepspeed": "pip install 'corerl[deepspeed]'",
        "fsdp": "pip install 'corerl[fsdp]'",
        "megatron": "pip install 'corerl[megatron]'",
        "plain": "pip install 'corerl[testing]'",
    },
    Kind.ENGINES: {"sglang": "pip install 'corerl[sglang]'"},
    Kind.SAMPLERS: {"episodes": "pip install 'corerl[agents]'"},
    Kind.EXTENSIONS: {
        **dict.fromkeys(
            ("curves", "memory", "nan-guard", "profiler", "tensorboard", "trace"), "pip install 'corerl[observe]'"
        ),
        "elastic": "pip install 'corerl[elastic]'",
        "forecast": "pip install 'corerl[forecast]'",
        "mlflow": "pip install 'corerl[mlflow]'",
        "wandb": "pip install 'corerl[wandb]'",
    },
    Kind.DISPLAYS: {"live": "pip install 'corerl[observe]'"},
    Kind.ALGORITHMS: {},
    Kind.COMMANDS: {
        "doctor": "pip install 'corerl[doctor]'",
        "models": "pip install 'corerl[doctor]'",
        "new-backend": "pip install 'corerl[testing]'",
        "scale": "pip install 'corerl[elastic]'",
        "verify": "pip install 'corerl[testing]'",
    },
    Kind.TOOL_FORMATS: {},
    Kind.TRANSPORTS: {"delta": "pip install 'corerl[delta]'"},
}


class Status(StrEnum):
    OK = "ok"
    BROKEN = "broken"
    INCOMPATIBLE = "incompatible"
    CONFLICT = "conflict"


@frozen(kw_only=True)
class Installed:
    """An entry point that was found, and whether it can be used."""

    name: str
    distribution: str
    version: str
    value: str  # "package.module:SPEC"
    status: Status
    reason: str = ""  # empty if the status is ok
    api: tuple[int, int] | None = None  # None if the spec could not be loaded
    summary: str = ""
    shadowed: tuple[str, ...] = ()  # other metadata of this distribution, which are not used


@frozen(kw_only=True)
class Copy:
    """One of the metadata directories of a distribution."""

    version: str
    entry_points: frozenset[tuple[str, str, str]]  # (group, name, value)
    path: str  # the dist-info or egg-info

    def says_as(self, other: Copy) -> bool:
        return (self.version, self.entry_points) == (other.version, other.entry_points)

    def __str__(self) -> str:
        return f"{self.version} in {self.path}"


@frozen(kw_only=True)
class Entry:
    """An entry point, from metadata alone."""

    name: str  # also the name of its table in the config
    distribution: str  # empty if the config names 'package.module:SPEC'
    version: str
    value: str  # "package.module:SPEC"
    location: str = field(eq=False, default="")  # the directory that contains the metadata
    metadata: str = field(eq=False, default="")  # the metadata's own directory or file

    def __str__(self) -> str:
        return f"{self.name!r} ({self.distribution} {self.version})" if self.distribution else repr(self.name)


@frozen(kw_only=True)
class Loaded(Entry):
    """An entry point with its spec."""

    spec: Any  # of the kind's class


def installed(kind: Kind, fatal: Mapping[str, str] | None = None) -> list[Installed]:
    """Every plugin of this kind on sys.path, sorted by name. Imports each spec; broken plugins are listed too. Those in
    `fatal`, 'distribution:name' -> why, end the process that imports them: they are listed without that."""
    entries = scan(kind)
    found = []
    for entry in entries:
        rivals = [other for other in entries if other.name == entry.name and other is not entry]
        status, reason, api, summary = Status.OK, "", None, ""
        try:
            if why := (fatal or {}).get(f"{entry.distribution}:{entry.name}"):
                raise PluginBroken(why)
            spec = _load_spec(kind, entry)
            api, summary = spec.api, spec.summary
            _require_usable(kind, entry, spec)
        except PluginIncompatible as error:
            status = Status.INCOMPATIBLE
            reason = f"written for API {_dotted(error.api)}, but this corerl supports {_dotted(API)}"
            reason += f"; what changed: {PAGE}" if error.api < API else ""
        except PluginBroken as error:
            status, reason = Status.BROKEN, one_line(error.__cause__) if error.__cause__ else error.message
        if status is Status.OK and (conflict := _conflict(kind, entry, rivals)):
            status, reason = Status.CONFLICT, conflict
        found.append(
            Installed(
                name=entry.name,
                distribution=entry.distribution,
                version=entry.version,
                value=entry.value,
                status=status,
                reason=reason,
                api=api,
                summary=summary,
                shadowed=tuple(str(copy) for copy in copies(entry)[1:]),
            )
        )
    return found


def usable(kind: Kind) -> list[Loaded]:
    """Every plugin of this kind that can be used, with its spec; of one name there may be several."""
    found = []
    for entry in scan(kind):
        with contextlib.suppress(PluginError):  # `installed` tells
            found.append(_loaded(kind, entry))
    return found


def installed_names(kind: Kind) -> list[str]:
    """The names of the installed plugins, from metadata alone: no plugin is imported."""
    return sorted({entry.name for entry in scan(kind)})


def copies(of: Entry) -> list[Copy]:
    """The copies of a distribution's metadata that differ, the one in use first; a healthy install has one.

    Copies that say the same do not count: an editable install by setuptools has one from the install and one from the
    source tree.
    """
    from importlib.metadata import distributions

    found: dict[str, Copy] = {}
    for distribution in distributions(name=of.distribution) if of.distribution else ():
        path = _path(distribution)
        # The same directory may be reached twice (lib64 links) and counts once.
        try:
            version = distribution.version or "damaged"
            points = frozenset((point.group, point.name, point.value) for point in distribution.entry_points)
        except Exception:  # parsing damaged metadata raises all sorts of errors
            version, points = "damaged", frozenset()
        found.setdefault(os.path.realpath(path), Copy(version=version, entry_points=points, path=path))
    ordered = sorted(found.values(), key=lambda copy: copy.path != of.metadata)
    return [each for each in ordered if each is ordered[0] or not each.says_as(ordered[0])]


def found_twice(of: Entry) -> str:
    """A sentence that lists the copies of the distribution's metadata; "" if there is only one."""
    found = copies(of)
    if len(found) < 2:
        return ""
    return f"{of.distribution} is found {_times(len(found))}: {found[0]} (used), {', '.join(map(str, found[1:]))}"


def kinds_of(name: str) -> list[Kind]:
    """The kinds that have an installed or installable plugin of this name; from metadata alone.

    For 'package.module:SPEC' the spec is imported and its class decides. Raises PluginBroken if the import fails or the
    object is not a spec.
    """
    module, colon, _ = name.partition(":")
    found = [kind for kind in Kind if name in INSTALL_HINTS[kind] or any(is_named(entry, name) for entry in scan(kind))]
    if not found and colon and _is_module(module):
        spec = _import("plugin", name, name, cure=lambda: "")
        found = [kind for kind in Kind if isinstance(spec, kind.spec)]
        if not found:
            wanted = ", ".join(kind.spec.__name__ for kind in Kind)
            raise PluginBroken(f"plugin {name} is a {type(spec).__name__}, expected one of {wanted}")
    return found


def unknown(name: str) -> PluginNotFound:
    """The error for a name that no kind knows."""
    names = {kind: installed_names(kind) for kind in Kind}
    listed = "; ".join(f"{kind.value}: {', '.join(known) or 'none'}" for kind, known in names.items())
    known = sorted({each for kind, names_of in names.items() for each in [*names_of, *INSTALL_HINTS[kind]]})
    return PluginNotFound(f"unknown plugin {name!r}; installed {listed}{did_you_mean(name, known)}")


def load(kind: Kind, name: str) -> Loaded:
    """Load the plugin named by 'name', 'distribution:name' or 'package.module:SPEC'.

    Raises PluginNotFound, PluginConflict (several distributions offer the name), PluginBroken (with its cause chained)
    or PluginIncompatible (written for another API).
    """
    return _loaded(kind, locate(kind, name))


def locate(kind: Kind, name: str) -> Entry:
    """The entry point that `load` would load; nothing is imported. Raises PluginNotFound or PluginConflict."""
    entries = scan(kind)
    wanted = [entry for entry in entries if is_named(entry, name)]
    module, colon, _ = name.partition(":")
    if not wanted and colon and _is_module(module):
        return Entry(name=name, distribution="", version="", value=name)
    if not wanted:
        raise _not_found(kind, name, entries)
    if (len(wanted) > 1 or name == wanted[0].name) and (conflict := _conflict(kind, wanted[0], wanted[1:])):
        raise PluginConflict(f"{kind.noun} {name!r} is {conflict}")
    return wanted[0]


def load_implementation(kind: Kind, loaded: Loaded, value: str = "") -> Any:
    """Import the class that the spec names, and with it torch; or `value`, where the spec names several. Raises
    PluginBroken with its cause chained, or with the methods that it lacks."""
    code = value or loaded.spec.implementation
    found = _import(kind.noun, str(loaded), code, cure=lambda: _cure(loaded))
    if lacks := sorted(getattr(found, "__abstractmethods__", ())):
        moved = "".join(method_now(name) for name in dir(found) if kind is Kind.BACKENDS)
        raise PluginBroken(
            f"{kind.noun} {loaded}: {code} lacks {', '.join(lacks)}, which "
            + ("have no default; implement them" if len(lacks) > 1 else "has no default; implement it")
            + moved
        )
    return found


def scan(kind: Kind) -> Sequence[Entry]:
    """Every entry point of this kind on sys.path, from metadata alone."""
    return _scanned(kind, importable())


@functools.lru_cache(maxsize=32)
def _scanned(kind: Kind, where: Where) -> Sequence[Entry]:
    """What is installed there: each worker and each command asks several times."""
    # importlib.metadata costs more to import than all of `import corerl`, so it is imported when first needed.
    from importlib.metadata import distributions

    # `entry_points()` keeps one distribution per name, which can be a stale egg-info: look at all of them, and drop
    # plain duplicates (lib64 links, editable installs).
    entries: dict[tuple[str, str, str], Entry] = {}
    for distribution in distributions():
        for entry in _read(distribution, kind):
            entries.setdefault((entry.name, entry.value, _normalized(entry.distribution)), entry)
    return tuple(sorted(entries.values(), key=lambda entry: (entry.name, entry.distribution)))


def _read(distribution: Distribution, kind: Kind) -> Sequence[Entry]:
    try:
        # Most distributions are not ours. A substring test is quick; parsing them all would dominate the scan.
        if kind.group not in (distribution.read_text("entry_points.txt") or ""):
            return ()
        points = [point for point in distribution.entry_points if point.group == kind.group]
        name, version = distribution.metadata["Name"], distribution.version
    except Exception:  # someone else's damaged metadata, which raises all sorts of errors
        return ()
    if not name or not version:  # a missing value is None in some Pythons and raises in others
        return ()
    return [
        Entry(
            name=point.name,
            distribution=name,
            version=version,
            value=point.value,
            location=str(distribution.locate_file("")),
            metadata=_path(distribution),
        )
        for point in points
    ]


def _loaded(kind: Kind, entry: Entry) -> Loaded:
    spec = _load_spec(kind, entry)
    _require_usable(kind, entry, spec)
    return Loaded(**asdict(entry), spec=spec)


def _load_spec(kind: Kind, entry: Entry) -> Spec:
    spec = _import(kind.noun, str(entry), entry.value, cure=lambda: _cure(entry))
    if not isinstance(spec, kind.spec):
        raise PluginBroken(
            f"{kind.noun} {entry}: {entry.value} is a {type(spec).__name__}, expected a {kind.spec.__name__}; "
            "its entry point must name the spec"
        )
    api: Any = spec.api  # type: ignore[attr-defined]
    if not (isinstance(api, tuple) and len(api) == 2 and all(isinstance(number, int) for number in api)):
        raise PluginBroken(f"{kind.noun} {entry}: {entry.value} has api={api!r}, expected (major, minor)")
    return spec  # type: ignore[return-value]  # isinstance of a class chosen at run time


def _import(noun: str, label: str, value: str, *, cure: Callable[[], str]) -> Any:
    """Import the object that 'package.module:attribute' names. If that fails, `cure()` ends the error message."""
    module, _, attributes = value.partition("[")[0].strip().partition(":")
    try:
        found = importlib.import_module(module)
        for attribute in attributes.split("."):
            found = getattr(found, attribute)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a module may raise anything
        raise PluginBroken(
            f"{noun} {label} cannot be loaded from {value}: {one_line(error)}{where_now(error) or cure()}"
        ) from error
    return found


def _cure(of: Entry) -> str:
    """The end of the error message for a plugin that cannot be imported: what to do about it."""
    if not of.distribution:
        return ""
    twice = found_twice(of)
    return f"; {twice}" * bool(twice) + f"; repair or reinstall {of.distribution}"


def _require_usable(kind: Kind, entry: Entry, spec: Spec) -> None:
    """Check the spec's API version first, since all its other fields depend on it, then its config class."""
    major, minor = spec.api
    if major != API[0] or minor > API[1]:
        error = PluginIncompatible(
            f"{kind.noun} {entry} was written for API {_dotted(spec.api)}, but this corerl supports {_dotted(API)}; "
            f"{_changes(entry, spec.api)}install a release of {entry.distribution or 'it'} for API {_dotted(API)}, "
            f"or a corerl that supports {_dotted(spec.api)}"
        )
        error.api = spec.api
        raise error
    if not (isinstance(spec.config, type) and attrs.has(spec.config)):
        raise PluginBroken(
            f"{kind.noun} {entry}: {entry.value} has config={spec.config!r}, expected a frozen attrs class"
        )


def _changes(entry: Entry, api: tuple[int, int]) -> str:
    """The clause of the error for a plugin of an older API: what has changed since, and what it uses of that."""
    if api > API:
        return ""
    uses = used(entry.value, api)
    own = f"; of that it uses {as_list(uses)}" if uses else ""
    return f"what changed: {PAGE}, the table of API {_dotted(API)}{own}; "


def _not_found(kind: Kind, name: str, entries: Sequence[Entry]) -> PluginNotFound:
    hints = INSTALL_HINTS[kind]
    known = sorted({*(entry.name for entry in entries), *(CORE_COMMANDS if kind is Kind.COMMANDS else ())})
    qualified = [f"{entry.distribution}:{entry.name}" for entry in entries]
    near = nearest(name, qualified if ":" in name else sorted({*known, *hints}))
    text = f"unknown {kind.noun} {name!r}; installed: {', '.join(known) or 'none'}"
    if near and near != name:
        text += f"; did you mean {near!r}?"
    install = "" if near in known else hints.get(near, "")
    error = PluginNotFound(text + f"; to install {near!r}: {install}" * bool(install))
    error.install = install
    return error


def _conflict(kind: Kind, entry: Entry, rivals: Sequence[Entry]) -> str:
    """Why this entry point's name alone does not mean it; "" if it does."""
    if kind is Kind.COMMANDS and entry.name in CORE_COMMANDS:
        whole = f"{entry.distribution}:{entry.name}"
        return f"core's own; write {whole!r} for that of {entry.distribution} {entry.version}"
    return _rivalry(entry, rivals) if rivals else ""


def _rivalry(entry: Entry, rivals: Sequence[Entry]) -> str:
    everyone = [entry, *rivals]
    if len({_normalized(each.distribution) for each in everyone}) == 1:
        # One distribution with two copies of its metadata: no name can tell them apart.
        return (
            f"provided twice by {entry.distribution}, as "
            + " and ".join(f"{each.value} in {each.location}" for each in everyone)
            + f"; uninstall {entry.distribution} until no copy is left, then install it once"
        )
    return (
        f"provided by {' and '.join(f'{each.distribution} {each.version}' for each in everyone)}; choose one by "
        "writing " + " or ".join(f"'{each.distribution}:{each.name}'" for each in everyone)
    )


def _is_module(path: str) -> bool:
    """Whether `path` can only mean a module: it is dotted or importable."""
    if path == "__main__" or not all(part.isidentifier() for part in path.split(".")):
        return False  # __main__ is a different module in every process
    from importlib.util import find_spec

    try:
        return "." in path or find_spec(path) is not None
    except ValueError:  # the module is loaded but has no __spec__
        return False


def is_named(entry: Entry, name: str) -> bool:
    """Whether `name`, plain or as 'distribution:name', refers to this entry point."""
    left, colon, right = name.rpartition(":")
    return entry.name == right and (not colon or _normalized(entry.distribution) == _normalized(left))


def _path(distribution: Distribution) -> str:
    """The path of the metadata; a non-standard finder may only know the directory around it."""
    return str(getattr(distribution, "_path", distribution.locate_file("")))


def _times(count: int) -> str:
    return "twice" if count == 2 else f"{count} times"


def _normalized(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def _dotted(api: tuple[int, int]) -> str:
    return ".".join(map(str, api))
