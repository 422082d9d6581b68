"""The one way from a plugin's name to its spec, options and code, for plugins of every kind: find the entry point,
import the spec, check its API and its class of options, structure the options, import the implementation.

It does its own scan because the stock loaders stop at the first broken plugin, silently let the first of two equal
names win, and return nothing for an unknown name.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import re
import sys
from collections.abc import Sequence
from enum import Enum
from typing import Any

import attrs
from attrs import asdict, frozen

from corerl.config.structuring import structure
from corerl.errors import PluginBroken, PluginConflict, PluginError, PluginIncompatible, PluginNotFound
from corerl.imports import Where, importable
from corerl.messages import install_hint, nearest, one_line
from corerl.plugin.spec import (
    API,
    AlgorithmSpec,
    BackendSpec,
    CommandSpec,
    EngineSpec,
    ExtensionSpec,
    FormatSpec,
    PicturesSpec,
    SamplerSpec,
    Spec,
    TransportSpec,
)


class Kind(Enum):
    """A group of plugins: the name of its tables in the config, and the class of its specs."""

    BACKENDS = "backends", BackendSpec
    ENGINES = "engines", EngineSpec
    SAMPLERS = "samplers", SamplerSpec
    EXTENSIONS = "extensions", ExtensionSpec
    ALGORITHMS = "algorithms", AlgorithmSpec
    COMMANDS = "commands", CommandSpec
    TRANSPORTS = "transports", TransportSpec
    PICTURES = "pictures", PicturesSpec
    FORMATS = "formats", FormatSpec

    spec: type[Spec]

    def __new__(cls, value: str, spec: type[Spec] = Spec) -> Kind:
        kind = object.__new__(cls)
        kind._value_, kind.spec = value, spec
        return kind

    @property
    def group(self) -> str:
        """The entry-point group."""
        return f"corerl.{self.value}"

    @property
    def noun(self) -> str:
        return "reader" if self is Kind.PICTURES else str(self.value).removesuffix("s")


# The commands of core: a plugin's of the same name is only reached as 'distribution:name'.
CORE_COMMANDS = ("train", "eval", "export", "config")

# Name -> the extra that brings a first-party plugin, for `corerl.messages.install_hint`; the only place in core that
# knows other wheels' plugins by name.
EXTRAS: dict[Kind, dict[str, str]] = {
    kind: {name: extra for extra, names in extras.items() for name in names.split()}
    for kind, extras in {
        Kind.BACKENDS: {"deepspeed": "deepspeed", "fsdp": "fsdp", "megatron": "megatron", "testing": "plain"},
        Kind.ENGINES: {"sglang": "sglang", "testing": "fake", "transformers": "transformers"},
        Kind.SAMPLERS: {
            "agents": "episodes",
            "openenv": "openenv",
            "reasoning-gym": "reasoning-gym",
            "verifiers": "verifiers",
            "vision": "count-shapes",
        },
        Kind.EXTENSIONS: {
            "observe": "console curves hooks memory nan-guard profiler tensorboard trace",
            "doctor": "advice",
            "elastic": "elastic",
            "forecast": "forecast",
            "mlflow": "mlflow",
            "wandb": "wandb",
        },
        Kind.ALGORITHMS: {
            "algorithms": "cispo dapo distill dr-grpo gspo gspo-token ppo reinforce++ reinforce++-baseline rloo",
        },
        Kind.COMMANDS: {
            "doctor": "doctor options plugins",
            "elastic": "scale",
            "testing": "models new-backend verify",
            "tinker": "serve",
        },
        Kind.TRANSPORTS: {"delta": "disk delta", "transports": "collective ipc"},
        Kind.PICTURES: {"vision": "vision"},
        Kind.FORMATS: {"data": "datasets"},
    }.items()
}


CHANGES = "docs/versioning.md and `corerl doctor` say what has moved"


@frozen(kw_only=True)
class Entry:
    """An entry point, from metadata alone."""

    name: str  # also the name of its table in the config
    distribution: str  # empty if the config names 'package.module:SPEC'
    version: str
    value: str  # "package.module:SPEC"

    def __str__(self) -> str:
        return f"{self.name!r} ({self.distribution} {self.version})" if self.distribution else repr(self.name)

    def is_named(self, name: str) -> bool:
        """Whether `name`, plain or as 'distribution:name', refers to this entry point."""
        left, colon, right = name.rpartition(":")
        return self.name == right and (not colon or _normalized(self.distribution) == _normalized(left))


@frozen(kw_only=True)
class Loaded(Entry):
    """An entry point with its spec."""

    spec: Any  # of the kind's class


# ---- find ------------------------------------------------------------------------------------------------------------


def scan(kind: Kind) -> Sequence[Entry]:
    """Every entry point of this kind on sys.path, from metadata alone."""
    return _scanned(kind, importable())


def installed_names(kind: Kind) -> list[str]:
    """The names of the installed plugins, from metadata alone: no plugin is imported."""
    return sorted({entry.name for entry in scan(kind)})


def locate(kind: Kind, name: str) -> Entry:
    """The entry point that `load` would load; nothing is imported. Raises PluginNotFound or PluginConflict."""
    entries = scan(kind)
    match [entry for entry in entries if entry.is_named(name)]:
        case [entry]:
            return entry
        case [] if _is_module(name):
            return Entry(name=name, distribution="", version="", value=name)
        case []:
            raise _not_found(kind, name, entries)
        case rivals:
            raise PluginConflict(f"{kind.noun} {name!r} is {_conflict(rivals)}")


@functools.lru_cache(maxsize=32)
def _scanned(kind: Kind, where: Where) -> Sequence[Entry]:
    """What is installed there: each worker and each command asks several times."""
    found = []
    for each in _entry_points(where).select(group=kind.group):
        if each.dist is not None:
            distribution, version = _installed_as(each.dist)
            found.append(Entry(name=each.name, distribution=distribution, version=version, value=each.value))
    return tuple(sorted(found, key=lambda entry: (entry.name, entry.distribution)))


def _installed_as(distribution: Any) -> tuple[str, str]:
    """Name and version; "" if an interrupted install has left its entry points alone."""
    try:
        return distribution.name or "", distribution.version or ""
    except FileNotFoundError:  # of the package importlib_metadata, which once imported answers in Python's place
        return "", ""


@functools.lru_cache(maxsize=4)
def _entry_points(where: Where) -> Any:  # EntryPoints; in Python 3.11 another class that also has `select`
    # importlib.metadata costs more to import than all of `import corerl`, so it is imported when first needed.
    from importlib.metadata import entry_points

    return entry_points()


# ---- load ------------------------------------------------------------------------------------------------------------


def load(kind: Kind, name: str) -> Loaded:
    """Load the plugin named by 'name', 'distribution:name' or 'package.module:SPEC'.

    Raises PluginNotFound, PluginConflict (several distributions offer the name), PluginBroken (with its cause chained)
    or PluginIncompatible (written for another API).
    """
    return _loaded(kind, locate(kind, name))


def usable(kind: Kind) -> list[Loaded]:
    """Every plugin of this kind that can be used, with its spec; of one name there may be several."""
    found = []
    for entry in scan(kind):
        with contextlib.suppress(PluginError):  # `corerl plugins` reports it
            found.append(_loaded(kind, entry))
    return found


def load_implementation(kind: Kind, loaded: Loaded, value: str = "", *, base: type | None = None) -> Any:
    """Import the class that the spec names, and with it torch; or `value`, where the spec names several. Raises
    PluginBroken with its cause chained, if it is no subclass of `base`, or with the methods that it lacks."""
    code = value or loaded.spec.implementation
    found = _imported(f"{kind.noun} {loaded}", code, loaded.distribution)
    if base is not None and not (isinstance(found, type) and issubclass(found, base)):
        wanted = ".".join([*base.__module__.split(".")[:2], base.__name__])  # where it is public
        raise PluginBroken(f"{kind.noun} {loaded}: {code} is {found!r}, wanted a subclass of {wanted}")
    if lacks := sorted(getattr(found, "__abstractmethods__", ())):
        raise PluginBroken(f"{kind.noun} {loaded}: {code} must implement {', '.join(lacks)}; {CHANGES}")
    return found


def options_of(loaded: Loaded, options: Any, *, path: str) -> Any:
    """The plugin's options as its config class; they may be a plain table, as they cross Ray. Raises ConfigError with
    paths below `path`, their table."""
    cls = loaded.spec.config
    return options if isinstance(options, cls) else structure(options, cls, path=path)


def _loaded(kind: Kind, entry: Entry) -> Loaded:
    """Import an entry point's spec and check it: its class, then its API version, on which all else depends, then its
    config class."""
    what = f"{kind.noun} {entry}"
    spec = _imported(what, entry.value, entry.distribution)
    if not isinstance(spec, kind.spec):
        raise PluginBroken(f"{what}: {entry.value} is a {type(spec).__name__}, expected a {kind.spec.__name__}")
    api: Any = spec.api
    if not (isinstance(api, tuple) and len(api) == 2 and all(isinstance(number, int) for number in api)):
        raise PluginBroken(f"{what}: {entry.value} has api={api!r}, expected (major, minor)")
    if api[0] != API[0] or api[1] > API[1]:
        changed = f"{CHANGES}; " if api < API else ""
        error = PluginIncompatible(
            f"{what} was written for API {_dotted(api)}, but this corerl supports {_dotted(API)}; {changed}install a "
            f"release of {entry.distribution or 'it'} for API {_dotted(API)}, or a corerl that supports {_dotted(api)}"
        )
        error.api = api
        raise error
    if not (isinstance(spec.config, type) and attrs.has(spec.config)):
        raise PluginBroken(f"{what}: {entry.value} has config={spec.config!r}, expected a frozen attrs class")
    return Loaded(**asdict(entry), spec=spec)


def _imported(what: str, value: str, distribution: str = "") -> Any:
    """Import the object that 'package.module:attribute' names."""
    module, _, attributes = value.partition("[")[0].strip().partition(":")
    try:
        found = importlib.import_module(module)
        for attribute in attributes.split("."):
            found = getattr(found, attribute)
    except (Exception, SystemExit) as error:  # a module may raise anything
        if isinstance(error, ImportError) and f"{error.name}.".startswith("corerl."):
            advice = f"; {CHANGES}"
        else:
            advice = f"; repair or reinstall {distribution}" if distribution else ""
        raise PluginBroken(f"{what} cannot be loaded from {value}: {one_line(error)}{advice}") from error
    return found


# ---- what is wrong ---------------------------------------------------------------------------------------------------


def _not_found(kind: Kind, name: str, entries: Sequence[Entry]) -> PluginNotFound:
    extras = EXTRAS[kind]
    known = sorted({*(entry.name for entry in entries), *(CORE_COMMANDS if kind is Kind.COMMANDS else ())})
    qualified = [f"{entry.distribution}:{entry.name}" for entry in entries]
    near = nearest(name, qualified if ":" in name else sorted({*known, *extras}))
    text = f"unknown {kind.noun} {name!r}; installed: {', '.join(known) or 'none'}"
    if near and near != name:
        text += f"; did you mean {near!r}?"
    install = install_hint(extras[near]) if near in extras and near not in known else ""
    error = PluginNotFound(text + (f"; to install {near!r}: {install}" if install else ""))
    error.install = install
    return error


def _conflict(rivals: Sequence[Entry]) -> str:
    return (
        f"provided by {' and '.join(f'{each.distribution} {each.version}' for each in rivals)}; choose one by "
        "writing " + " or ".join(f"'{each.distribution}:{each.name}'" for each in rivals)
    )


def _is_module(name: str) -> bool:
    """Whether `name` is 'package.module:SPEC' of a dotted or importable module."""
    module, colon, _ = name.partition(":")
    if not colon or module == "__main__" or not all(part.isidentifier() for part in module.split(".")):
        return False  # __main__ is a different module in every process
    from importlib.util import find_spec

    return "." in module or module in sys.modules or find_spec(module) is not None


def _normalized(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def _dotted(api: tuple[int, int]) -> str:
    return ".".join(map(str, api))
