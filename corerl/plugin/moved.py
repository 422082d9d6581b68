"""What each version of the contract has moved, renamed or taken away, and where it is now: for the messages that a
plugin of an older version gets, and for the table in docs/versioning.md."""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from attrs import frozen

PAGE = "docs/versioning.md"
NAMES = re.compile(r"pip install [\w'\[\]]+|(?:corerl|Backend)[\w.]*(?::\w+)?(?:\([^)]*\))?")
NO_NAME = re.compile(r"cannot import name '(\w+)' from '(corerl[\w.]*)'")


@frozen
class Moved:
    """A module ("corerl.testing", with all below it), a name ("corerl.ops.upload:upload"), a method of Backend or a
    hook ("Backend.train"), or anything else of which only the documentation tells ("the command ...")."""

    old: str
    new: str


MOVED: Mapping[tuple[int, int], Sequence[Moved]] = {  # the API that brought it -> what was there before
    (2, 0): (
        Moved(
            "Backend.train",
            "Backend.forward_backward(batch, loss, outputs, last), which adds gradients, and "
            "Backend.optimizer_step(step, scale), which scales and clips them and takes the step",
        ),
        Moved("Backend.initial_weights", "Backend.initial_weights(chunks): takes the chunks that are to be read"),
        Moved("Backend.update_weights", "Backend.update_weights(sender, version, adapters)"),
        Moved("Backend.stream", "Backend.stream_of(adapters=False)"),
        Moved("corerl.backend.adamw", "corerl.backend: adamw, moments, set_adam_step, set_lr"),
        Moved("corerl.backend.base:Extra", "corerl.backend: ExtraState"),
        Moved(
            "corerl.backend.passes:StepLosses",
            "corerl.backend: StepLosses(model, batch, loss, outputs, ...), whose result() has its metrics and tokens",
        ),
        Moved("corerl.models.policy:CausalPolicy", "corerl.models: make_policy(config, ...), which builds its model"),
        Moved("corerl.config.structuring:attempt", "corerl.config: try_structure"),
        Moved("corerl.ops.upload", "corerl.ops: upload"),
        Moved("corerl.plugin.probing:library", "corerl.plugin: check_library"),
        Moved("corerl.plugin.probing:nccl", "corerl.plugin: check_nccl"),
        Moved("corerl.plugin.probing:version", "corerl.plugin: version_numbers"),
        Moved("corerl.plugin.events:Worked", "corerl.plugin: CallFinished"),
        Moved("corerl.plugin.events:Shown", "corerl.plugin: SampleShown"),
        Moved("the field `mend` of `corerl.plugin.Finding`", "`fix`"),
        Moved("corerl.rollout.engine", "corerl.engines"),
        Moved("corerl.rollout.episodes", "corerl_agents, which pip install 'corerl[agents]' brings"),
        Moved("corerl.rollout.offered:misfit", "corerl.engines: shape_mismatch"),
        Moved("corerl.rollout.receiving", "corerl.engines: Receiving"),
        Moved("corerl.rollout.serving", "corerl.engines: EngineLifecycle"),
        Moved("corerl.rollout.rewards:Reward", "corerl.rollout: Reward"),
        Moved("corerl.rollout.rewards:position_match", "corerl.rollout: position_match"),
        Moved("corerl.rollout.sources:Scored", "corerl.rollout: ScoredRollout"),
        Moved("corerl.testing", "corerl_testing, which pip install 'corerl[testing]' brings"),
        Moved("the commands `corerl backends`, `engines`, `extensions` and `algorithms`", "`corerl plugins KIND`"),
        Moved(
            "the settings `cluster.scaler` and `cluster.spare_timeout`",
            "options of the extension `elastic`, which pip install 'corerl[elastic]' brings",
        ),
        Moved("the settings `rollout.function` and `[rollout.episodes]`", "`[samplers.episodes]`"),
    ),
}


def table() -> str:
    """Rows of Markdown: of each API, what was there before, and where it is now."""
    lines = ["| since | before | now |", "|---|---|---|"]
    for api, rows in MOVED.items():
        lines += [f"| {_dotted(api)} | {_quoted(row.old)} | {_quoted(row.new)} |" for row in rows]
    return "\n".join(lines) + "\n"


def where_now(error: BaseException) -> str:
    """The end of a message about an import that failed for want of something of core's own: where that is now. "" if
    it is not core's."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        missing = error.name
    elif isinstance(error, ImportError) and (found := NO_NAME.match(str(error))):
        missing = f"{found[2]}:{found[1]}"
    elif isinstance(error, AttributeError) and (module := getattr(error.obj, "__name__", "")):
        missing = f"{module}:{error.name}"
    else:
        return ""
    if not re.match(r"corerl(\.|:|$)", missing):
        return ""
    if (since := _row(missing)) is None:
        return f"; this corerl has no {_spoken(missing)}: it is of another version, see {PAGE}"
    return f"; {_spoken(missing)} {_told(*since)}; the others that moved: {PAGE}"


def method_now(name: str) -> str:
    """A clause that says what replaces this method of Backend, or hook; "" if there still is one of that name."""
    since = _row(f"Backend.{name}")
    if since is None or since[1].new.startswith(f"Backend.{name}("):
        return ""
    return f"; {name} {_told(*since)}, see {PAGE}"


def used(value: str, api: tuple[int, int]) -> list[Moved]:
    """What the package behind 'package.module:SPEC', of this API, uses that has moved since, by its source files. Files
    that cannot be read or parsed, such as templates, are left out."""
    try:
        spec = find_spec(value.partition(":")[0].partition(".")[0])
    except ValueError:  # the module is loaded but has no __spec__
        return []
    if spec is None or spec.origin is None:
        return []
    whole = Path(spec.origin).name == "__init__.py"
    files = sorted(Path(spec.origin).parent.rglob("*.py")) if whole else [Path(spec.origin)]
    since = {row.old: row for at, rows in MOVED.items() if at > api for row in rows}
    found: dict[str, Moved] = {}
    for file in files:
        with contextlib.suppress(OSError, ValueError, SyntaxError):
            for name in _names_in(ast.parse(file.read_text(encoding="utf-8"))):
                if (row := _row(name)) is not None and row[1].old in since:
                    found.setdefault(row[1].old, row[1])
    return list(found.values())


def as_list(rows: Sequence[Moved]) -> str:
    return ", ".join(f"{row.old.replace(':', '.')} (now {row.new})" for row in rows)


def _names_in(module: ast.Module) -> Iterator[str]:
    """The names of core's that a file imports, and the methods of its backends."""
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}:{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ClassDef) and any(ast.unparse(base).endswith("Backend") for base in node.bases):
            yield from (f"Backend.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef))


def _row(name: str) -> tuple[tuple[int, int], Moved] | None:
    """The newest row about a name, "module:name" or "module", or about a module that it is in."""
    module = name.partition(":")[0]
    for api, rows in reversed(list(MOVED.items())):
        for row in rows:
            if row.old == name or (":" not in row.old and f"{module}.".startswith(f"{row.old}.")):
                return api, row
    return None


def _told(api: tuple[int, int], row: Moved) -> str:
    return f"is {row.new} since API {_dotted(api)}"


def _spoken(missing: str) -> str:
    return missing.replace(":", ".")


def _quoted(text: str) -> str:
    """With names of core's as code."""
    return text if "`" in text else NAMES.sub(lambda found: f"`{_spoken(found[0])}`", text)


def _dotted(api: tuple[int, int]) -> str:
    return ".".join(map(str, api))
