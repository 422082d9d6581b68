"""Write what the code knows best into the pages: a line `<!-- reference: NAME -->` becomes Markdown made from it.

config        a table for each table of the TOML file, from corerl.config.schema
hooks         each hook with its exact arguments, from corerl.plugin.hookspecs
capabilities  what a backend can declare, from corerl.plugin.capabilities
errors        the tree of errors with their exit status, from corerl.errors
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from itertools import groupby

from sphinx.application import Sphinx

from corerl import errors
from corerl.config.describe import FieldHelp, describe
from corerl.config.schema import Config
from corerl.plugin import hookspecs
from corerl.plugin.capabilities import Capability

MARK = re.compile(r"^<!-- reference: (\w+) -->$", re.MULTILINE)
WORDS = ("required", "unset", "computed")  # stand where a default would; all others are TOML
# Say again what [train] and [model] say.
REPEATED = ("roles.actor.train.", "roles.critic.train.", "roles.critic.model.")


def table_of(entry: FieldHelp) -> str:
    return entry.path.rpartition(".")[0]


def config_reference() -> str:
    entries = [entry for entry in describe(Config) if not entry.path.startswith(REPEATED)]
    lines: list[str] = []
    for table, settings in groupby(sorted(entries, key=table_of), key=table_of):
        heading = f"`[[{table[:-2]}]]`" if table.endswith("[]") else f"`[{table}]`" if table else "Top level"
        lines += [f"## {heading}", "", "| key | type | default | meaning |", "|---|---|---|---|"]
        for setting in settings:
            key = setting.path.removeprefix(f"{table}.")
            default = setting.default if setting.default in WORDS else f"`{setting.default}`"
            lines.append(f"| `{key}` | {setting.type} | {default} | {setting.help} |")
        lines.append("")
    return "\n".join(lines)


def hooks_reference() -> str:
    lines: list[str] = []
    for name, function in vars(hookspecs.Hooks).items():
        if name.startswith("_"):
            continue
        signature = inspect.signature(function)
        arguments = ", ".join(str(p).replace("'", "") for p in signature.parameters.values() if p.name != "self")
        needs = ", ".join(f"`{kind}`" for kind in sorted(hookspecs.NEEDS.get(name, ()))) or "nothing"
        who = "the backend, alone" if name in hookspecs.REQUIRED else "every plugin that has it"
        lines += [f"### `{name}`", "", "```text", f"{name}({arguments}) -> {signature.return_annotation}", "```", ""]
        lines += [inspect.getdoc(function) or "", "", f"Answered by {who}. Must be resident: {needs}.", ""]
    return "\n".join(lines)


def capabilities_reference() -> str:
    return ", ".join(f"`{capability.name}`" for capability in Capability) + "."


def errors_reference() -> str:
    def walk(cls: type[errors.CorerlError], depth: int) -> Iterator[str]:
        summary = (inspect.getdoc(cls) or "").splitlines()[0]
        yield f"{'  ' * depth}- `{cls.__name__}` (exit status {cls.exit_status}): {summary}"
        for child in cls.__subclasses__():
            if child.__module__ == errors.__name__:
                yield from walk(child, depth + 1)

    return "\n".join(walk(errors.CorerlError, 0))


REFERENCES = {
    "config": config_reference,
    "hooks": hooks_reference,
    "capabilities": capabilities_reference,
    "errors": errors_reference,
}


def fill_in(app: Sphinx, document: str, source: list[str]) -> None:
    source[0] = MARK.sub(lambda mark: REFERENCES[mark[1]](), source[0])


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", fill_in)
    return {"parallel_read_safe": True}
