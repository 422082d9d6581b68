"""A plugin's settings as TOML, each with its default, type and help text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

import attrs

from corerl.config.words import class_fields, spell, to_plain, toml_key, toml_value
from corerl.errors import PluginBroken
from corerl.messages import one_line
from corerl.plugin.registry import Kind, Loaded

SELECTED_BY = {
    Kind.BACKENDS: "backend.name",
    Kind.ENGINES: "rollout.engine",
    Kind.SAMPLERS: "rollout.sampler",
    Kind.ALGORITHMS: "algorithm.name",
    Kind.TRANSPORTS: "weights.transport",
}
WIDTH = 100  # columns of a comment


def table_of(kind: Kind, loaded: Loaded) -> str:
    """One plugin's table for a config file, all settings at their defaults: adding it changes nothing in the run."""
    source = f" ({loaded.distribution} {loaded.version})" if loaded.distribution else ""
    lines = _comment(f"{kind.noun} {loaded.name}{source}: {loaded.spec.summary}")
    if kind not in (Kind.EXTENSIONS, *SELECTED_BY):  # it has no table
        return "\n".join([*lines, *_comment("there are no settings")]) + "\n"
    if kind is Kind.EXTENSIONS:
        lines += _comment("extensions listed in a config replace the default ones; the first is the outermost")
        header = ["[[extensions]]", f"name = {toml_value(loaded.name)}"]
        path = "extensions.options"
    else:
        lines += _comment(f"selected by {SELECTED_BY[kind]} = {toml_value(loaded.name)}")
        header, path = [], f"{kind.value}.{toml_key(loaded.name)}"
    try:
        defaults = loaded.spec.config()
    except Exception as error:
        raise PluginBroken(
            f"{kind.noun} {loaded}: {loaded.spec.config.__name__}() raised {one_line(error)}; every setting needs a "
            "valid default"
        ) from error
    body = _table(loaded.spec.config, defaults, path)
    if not class_fields(loaded.spec.config):
        lines += _comment("there are no settings")
    return "\n".join([*lines, *header, *body]) + "\n"


def _table(cls: type, options: Any, path: str) -> Iterator[str]:
    """The lines of a table and its subtables. TOML wants a table's own settings before its subtables."""
    yield f"[{path}]"
    inside = []
    for attribute in class_fields(cls).values():
        value = getattr(options, attribute.name)
        if attrs.has(type(value)):
            inside.append((attribute, value))
            continue
        yield from _comment(_about(attribute))
        if value is None:
            yield f"# {attribute.name} ="
        else:
            yield f"{attribute.name} = {toml_value(to_plain(value))}"
    for attribute, value in inside:
        yield ""
        yield from _comment(attribute.metadata.get("help", ""))
        yield from _table(type(value), value, f"{path}.{attribute.name}")


def _about(attribute: attrs.Attribute[Any]) -> str:
    help_text = attribute.metadata.get("help", "")
    default = attribute.default
    unset = "; unset" if default is None else ""
    computed = "; computed from the others by default" if getattr(default, "takes_self", False) else ""
    return f"{help_text} ({spell(attribute.type)}{unset}{computed})".strip()


def _comment(text: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False, break_long_words=False
    )
