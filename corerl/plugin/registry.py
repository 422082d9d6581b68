"""Find plugins by name: scan what is installed, say what is wrong with each, and load the light spec of the one chosen.

A scan of its own, since the stock loaders stop at the first broken plugin, let the first of two equal names win in
silence, and answer an unknown name with nothing.
"""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Iterator, Sequence
from enum import Enum, StrEnum
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from corerl.errors import PluginBroken, PluginConflict, PluginIncompatible, PluginNotFound
from corerl.plugin.hookspecs import API
from corerl.plugin.spec import BackendSpec, EngineSpec, ExtensionSpec, Spec

if TYPE_CHECKING:
    from importlib.metadata import Distribution


class Kind(Enum):
    """A group of plugins; the value is also the name of its tables in the config."""

    BACKENDS = "backends"
    ENGINES = "engines"
    EXTENSIONS = "extensions"

    @property
    def group(self) -> str:
        """Of entry points."""
        return f"corerl.{self.value}"

    @property
    def noun(self) -> str:
        return self.value.removesuffix("s")

    @property
    def spec(self) -> type:
        """What an entry point of this group must name an instance of."""
        return {Kind.BACKENDS: BackendSpec, Kind.ENGINES: EngineSpec, Kind.EXTENSIONS: ExtensionSpec}[self]


# The only place in core that knows first-party backends by name: what to type when one of them is not there.
INSTALL_HINTS: dict[Kind, dict[str, str]] = {
    Kind.BACKENDS: {
        "deepspeed": "pip install 'corerl[deepspeed]'",
        "fsdp": "pip install 'corerl[fsdp]'",
        "megatron": "pip install 'corerl[megatron]'",
    },
    Kind.ENGINES: {},
    Kind.EXTENSIONS: {},
}


class Status(StrEnum):
    OK = "ok"
    BROKEN = "broken"
    INCOMPATIBLE = "incompatible"
    CONFLICT = "conflict"


@frozen(kw_only=True)
class Installed:
    """One entry point that was found, and whether it could be used."""

    name: str
    distribution: str
    version: str
    value: str  # "package.module:SPEC"
    status: Status
    reason: str = ""  # empty where the status is ok
    api: tuple[int, int] | None = None  # None where the spec could not be loaded
    summary: str = ""


@frozen(kw_only=True)
class Loaded:
    """A plugin's spec, and where it came from."""

    name: str  # also of its table in the config
    distribution: str  # empty where the config named 'package.module:SPEC'
    version: str
    value: str
    spec: Any  # BackendSpec, EngineSpec or ExtensionSpec

    def __str__(self) -> str:
        return f"{self.name!r} ({self.distribution} {self.version})" if self.distribution else repr(self.name)


@frozen(kw_only=True)
class _Entry:
    name: str
    distribution: str
    version: str
    value: str
    location: str = field(eq=False)  # directory of the metadata

    def __str__(self) -> str:
        return f"{self.name!r} ({self.distribution} {self.version})" if self.distribution else repr(self.name)


def installed(kind: Kind) -> list[Installed]:
    """Every plugin of this kind on sys.path, by name. Imports each one's spec; broken ones are listed too."""
    entries = _scan(kind)
    found = []
    for entry in entries:
        rivals = [other for other in entries if other.name == entry.name and other is not entry]
        status, reason, api, summary = Status.OK, "", None, ""
        try:
            spec = _load_spec(kind, entry)
            api, summary = spec.api, spec.summary
            _require_api(kind, entry, spec)
        except PluginIncompatible:
            assert api is not None
            status, reason = Status.INCOMPATIBLE, f"written for API {_dotted(api)}, this corerl speaks {_dotted(API)}"
        except PluginBroken as error:
            status, reason = Status.BROKEN, one_line(error.__cause__) if error.__cause__ else error.message
        if status is Status.OK and rivals:
            status, reason = Status.CONFLICT, _rivalry(entry, rivals)
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
            )
        )
    return found


def installed_names(kind: Kind) -> list[str]:
    """The names alone, from metadata: no plugin is imported."""
    return sorted({entry.name for entry in _scan(kind)})


def nearest(name: str, known: Sequence[str]) -> str:
    """The known name that is most like `name`, or "" where none is."""
    return next(iter(difflib.get_close_matches(name, known, n=1)), "")


def load(kind: Kind, name: str) -> Loaded:
    """The plugin called `name`, 'distribution:name' or 'package.module:SPEC'.

    Raises PluginNotFound, PluginConflict (several distributions offer the name), PluginBroken (its real cause chained)
    or PluginIncompatible (another API).
    """
    entries = _scan(kind)
    left, colon, right = name.partition(":")
    if colon:
        wanted = [e for e in entries if e.name == right and _normalised(e.distribution) == _normalised(left)]
        if not wanted and _is_module(left):
            entry = _Entry(name=name, distribution="", version="", value=name, location="")
            return _loaded(kind, entry)
    else:
        wanted = [e for e in entries if e.name == name]
    if not wanted:
        raise PluginNotFound(_not_found(kind, name, entries))
    if len(wanted) > 1:
        raise PluginConflict(f"{kind.noun} {name!r} is {_rivalry(wanted[0], wanted[1:])}")
    return _loaded(kind, wanted[0])


def load_implementation(kind: Kind, loaded: Loaded) -> Any:
    """Import the class that the spec names; where torch comes in. Raises PluginBroken with its cause chained."""
    return _import(kind, str(loaded), loaded.spec.implementation, cure=loaded.distribution)


def _scan(kind: Kind) -> list[_Entry]:
    # importlib.metadata costs more to import than all of `import corerl`, so it is imported when first needed.
    from importlib.metadata import distributions

    # `entry_points()` keeps one distribution of a name, and a stale egg-info can be that one: look at them all, and
    # drop what was only found twice (lib64 links, editable installs).
    entries: dict[tuple[str, str, str], _Entry] = {}
    for distribution in distributions():
        for entry in _entries_of(distribution, kind):
            entries.setdefault((entry.name, entry.value, _normalised(entry.distribution)), entry)
    return sorted(entries.values(), key=lambda entry: (entry.name, entry.distribution))


def _entries_of(distribution: Distribution, kind: Kind) -> Iterator[_Entry]:
    try:
        points = [point for point in distribution.entry_points if point.group == kind.group]
        if not points:
            return
        name, version = distribution.metadata["Name"], distribution.version
    except Exception:  # someone else's damaged metadata; parsing it raises all sorts of errors
        return
    for point in points:
        yield _Entry(
            name=point.name,
            distribution=name,
            version=version,
            value=point.value,
            location=str(distribution.locate_file("")),
        )


def _loaded(kind: Kind, entry: _Entry) -> Loaded:
    spec = _load_spec(kind, entry)
    _require_api(kind, entry, spec)
    return Loaded(name=entry.name, distribution=entry.distribution, version=entry.version, value=entry.value, spec=spec)


def _load_spec(kind: Kind, entry: _Entry) -> Spec:
    spec = _import(kind, str(entry), entry.value, cure=entry.distribution)
    if not isinstance(spec, kind.spec):
        raise PluginBroken(
            f"{kind.noun} {entry}: {entry.value} is a {type(spec).__name__}, expected a {kind.spec.__name__}; "
            "its entry point must name the spec"
        )
    return spec  # type: ignore[return-value]  # isinstance of a class chosen at run time


def _import(kind: Kind, label: str, value: str, *, cure: str) -> Any:
    """The object that 'package.module:attribute' names."""
    module, _, attributes = value.partition("[")[0].strip().partition(":")
    try:
        found = importlib.import_module(module)
        for attribute in attributes.split("."):
            found = getattr(found, attribute)
    except (Exception, SystemExit) as error:
        advice = f"; mend or reinstall {cure}" if cure else ""
        raise PluginBroken(f"{kind.noun} {label} cannot be loaded from {value}: {one_line(error)}{advice}") from error
    return found


def _require_api(kind: Kind, entry: _Entry, spec: Spec) -> None:
    major, minor = spec.api
    if major == API[0] and minor <= API[1]:
        return
    raise PluginIncompatible(
        f"{kind.noun} {entry} was written for API {_dotted(spec.api)}, this corerl speaks {_dotted(API)}; "
        f"install a release of {entry.distribution or 'it'} for API {_dotted(API)}, or the corerl that it was made for"
    )


def _not_found(kind: Kind, name: str, entries: Sequence[_Entry]) -> str:
    hints = INSTALL_HINTS[kind]
    known = sorted({entry.name for entry in entries})
    qualified = [f"{entry.distribution}:{entry.name}" for entry in entries]
    near = nearest(name, qualified if ":" in name else sorted({*known, *hints}))
    text = f"unknown {kind.noun} {name!r}; installed: {', '.join(known) or 'none'}"
    if near and near != name:
        text += f"; did you mean {near!r}?"
    if near in hints and near not in known:
        text += f"; to install {near!r}: {hints[near]}"
    return text


def _rivalry(entry: _Entry, rivals: Sequence[_Entry]) -> str:
    everyone = [entry, *rivals]
    if len({_normalised(each.distribution) for each in everyone}) == 1:
        # One distribution with two sets of metadata: no name can tell them apart.
        return (
            f"offered twice by {entry.distribution}, as "
            + " and ".join(f"{each.value} in {each.location}" for each in everyone)
            + f"; uninstall {entry.distribution} until it is gone, then install it once"
        )
    return (
        f"offered by {' and '.join(f'{each.distribution} {each.version}' for each in everyone)}; choose one by writing "
        + " or ".join(f"'{each.distribution}:{each.name}'" for each in everyone)
    )


def _is_module(path: str) -> bool:
    """Whether `path` can only be meant as a module: dotted, or one that can be imported."""
    if not all(part.isidentifier() for part in path.split(".")):
        return False
    from importlib.util import find_spec

    return "." in path or find_spec(path) is not None


def _normalised(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def _dotted(api: tuple[int, int]) -> str:
    return ".".join(map(str, api))


def one_line(error: BaseException) -> str:
    """The type and the first line of an error's text."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}".removesuffix(": ")
