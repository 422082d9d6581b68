"""What each version of the contract has moved, renamed or removed, and where it is now: for messages to older plugins,
and for the table in docs/versioning.md."""

from __future__ import annotations

import re
from collections.abc import Mapping

PAGE = "docs/versioning.md"
NAMES = re.compile(r"pip install [\w'\[\]]+|(?:corerl|Backend)[\w.]*(?::\w+)?(?:\([^)]*\))?")
NO_NAME = re.compile(r"cannot import name '(\w+)' from '(corerl[\w.]*)'")

# API -> what was there before -> where it is now. What was there: a module ("corerl.testing", with all below it), a
# name ("corerl.ops.upload:upload"), a method of Backend or a hook ("Backend.train"), or anything else of which only
# the documentation speaks ("the command ...").
MOVED: Mapping[tuple[int, int], Mapping[str, str]] = {
    (2, 0): {
        "Backend.train": (
            "Backend.forward_backward(batch, loss, outputs, last), which adds gradients, and "
            "Backend.optimizer_step(step, scale), which scales and clips them and takes the step"
        ),
        "counting applied steps in `Backend.adam_step`": "core counts them",
        "`with Backend.using(weights)` in `forward`": "core puts the snapshot in place before `forward`",
        "Backend.initial_weights": "Backend.initial_weights(chunks): takes the chunks that are to be read",
        "Backend.update_weights": "Backend.update_weights(sender, version, adapters)",
        "Backend.stream": "Backend.stream_of(adapters=False)",
        "corerl.backend.adamw": "corerl.backend: adamw, moments, set_adam_step, set_lr",
        "corerl.backend.base:Extra": "corerl.backend: ExtraState",
        "corerl.backend.passes:StepLosses": (
            "corerl.backend: StepLosses(model, batch, loss, outputs, ...), whose result() has its metrics and tokens"
        ),
        "corerl.models.policy:CausalPolicy": "corerl.models: make_policy(config, ...), which builds its model",
        "corerl.config.structuring:attempt": "corerl.config: try_structure",
        "corerl.plugin.context": "corerl.plugin: Context",
        "corerl.ops.upload": "corerl.ops: upload",
        "corerl.plugin.probing:library": "corerl.plugin: check_library",
        "corerl.plugin.probing:nccl": "corerl.plugin: check_nccl",
        "corerl.plugin.probing:version": "corerl.plugin: version_numbers",
        "corerl.plugin.events:Worked": "corerl.plugin: CallFinished",
        "corerl.plugin.events:Shown": "corerl.plugin: SampleShown",
        "the field `mend` of `corerl.plugin.Finding`": "`fix`",
        "corerl.rollout.engine": "corerl.engines",
        "corerl.rollout.episodes": "corerl_agents, which pip install 'corerl[agents]' brings",
        "corerl.rollout.offered:misfit": "corerl.engines: shape_mismatch",
        "corerl.rollout.receiving": "corerl.engines: Receiving",
        "corerl.rollout.serving": "corerl.engines: EngineLifecycle",
        "corerl.rollout.rewards:Reward": "corerl.rollout: Reward",
        "corerl.rollout.rewards:position_match": "corerl.rollout: position_match",
        "corerl.rollout.sources:Scored": "corerl.rollout: ScoredRollout",
        "the methods `begin`, `commit` and `give_up` of a WeightSender": "`open`, `finish` and the attribute `lost`",
        "the decorator `corerl.hookimpl`": "not needed: methods are hooks by their names, and generators wrap them",
        "corerl.testing": "corerl_testing, which pip install 'corerl[testing]' brings",
        "the argument `told` of an engine's `generate`": "`on_finished`",
        "the commands `corerl backends`, `engines`, `extensions` and `algorithms`": "`corerl plugins KIND`",
        "the settings `cluster.scaler` and `cluster.spare_timeout`": (
            "options of the extension `elastic`, which pip install 'corerl[elastic]' brings"
        ),
        "the settings `rollout.function` and `[rollout.episodes]`": "`[samplers.episodes]`",
    },
}


def table() -> str:
    """Rows of Markdown: of each API, what was there before, and where it is now."""
    lines = ["| since | before | now |", "|---|---|---|"]
    for api, rows in MOVED.items():
        lines += [f"| {dotted(api)} | {_quoted(old)} | {_quoted(new)} |" for old, new in rows.items()]
    return "\n".join(lines) + "\n"


def where_now(error: BaseException) -> str:
    """The end of a message about an import that failed because something of core's is missing: where that is now. "" if
    it is not core's."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        missing = error.name
    elif isinstance(error, ImportError) and (found := NO_NAME.match(str(error))):
        missing = f"{found[2]}:{found[1]}"
    else:
        return ""
    if not re.match(r"corerl(\.|:|$)", missing):
        return ""
    name = missing.replace(":", ".")
    if moved := _moved(missing):
        return f"; {name} {moved}; see {PAGE}"
    return f"; this corerl has no {name}: it is of another version, see {PAGE}"


def method_now(name: str) -> str:
    """A clause that says what replaces this method of Backend, or hook; "" if there still is one of that name."""
    moved = _moved(f"Backend.{name}")
    return f"; {name} {moved}, see {PAGE}" if moved and not moved.startswith(f"is Backend.{name}(") else ""


def _moved(name: str) -> str:
    """The newest row about a name, "module:name" or "module", or about a module that it is in."""
    module = name.partition(":")[0]
    for api, rows in reversed(list(MOVED.items())):
        for old, new in rows.items():
            if old == name or (":" not in old and f"{module}.".startswith(f"{old}.")):
                return f"is {new} since API {dotted(api)}"
    return ""


def dotted(api: tuple[int, int]) -> str:
    return ".".join(map(str, api))


def _quoted(text: str) -> str:
    """With names of core's as code."""
    return text if "`" in text else NAMES.sub(lambda found: f"`{found[0].replace(':', '.')}`", text)
