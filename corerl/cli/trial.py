"""Import plugins and the user's modules in another process first: one that ends its process would end the command with
no word, and with whatever status it likes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from corerl.messages import listed

if TYPE_CHECKING:
    from corerl.config.schema import Config
    from corerl.plugin.registry import Kind

CODE = ("*.py", "*.so", "*/*.py")  # what can be imported
SHOWN = 3  # files in one line


def try_imports(config: Config) -> Callable[[], None]:
    """Start to import what `config` names, beside this process; call the result to wait for it. That raises UserError,
    in one line, if an import ended its process. An import that merely raises is reported by whoever needs it.

    Raises ConfigError at once if the working directory, where modules are looked for, is a model's with Python files.
    Raises PluginIncompatible at once if what is installed is not what CoreRL and the plugins require: then the imports
    that a command does next may raise anything."""
    from corerl.plugin.options import TABLES, distributions_of, selected
    from corerl.plugin.requirements import require_met

    _require_no_code_of_a_model(config)
    require_met(distributions_of(config))

    rewards = (config.reward.name, *(each.name for each in config.reward.functions))
    names = (*rewards, config.rollout.function, config.rollout.postprocess)
    names += (config.algorithm.loss, config.algorithm.advantages, config.algorithm.postprocess)
    modules = [name.partition(":")[0] for name in names if ":" in name]
    plugins = [(each.kind, each.name) for each in selected(config)]
    # Tables of plugins that are not selected are checked too, which imports their specs.
    plugins += [(kind, name) for kind in TABLES for name in getattr(config, kind.value)]
    return beside(modules, list(dict.fromkeys(plugins)))


def _require_no_code_of_a_model(config: Config) -> None:
    from corerl.errors import ConfigError

    tables = {config.model_table_of(role): config.model_of(role) for role in config.chosen_roles}
    for table, model in tables.items():
        for name, directory in ((f"{table}.path", model.path), (f"{table}.tokenizer", model.tokenizer)):
            if directory and os.path.isdir(directory) and os.path.samefile(directory, os.curdir):
                code = sorted(str(file) for pattern in CODE for file in Path().glob(pattern))
                if code:
                    raise ConfigError(
                        f"{name}: {directory!r} is the working directory, where modules are looked for, and has "
                        f"code that may have come with the model ({listed(code, SHOWN)}); run the command in another "
                        "directory"
                    )


def require_plugins(plugins: Sequence[tuple[Kind, str]]) -> None:
    """Raise UserError, in one line, if importing the spec of one of these ends its process."""
    beside([], plugins)()


def fatal_plugins(kind: Kind, names: Sequence[str]) -> dict[str, str]:
    """Those of the plugins whose spec ends the process that imports it, each with what happened."""
    from corerl.errors import UserError

    try:
        require_plugins([(kind, name) for name in names])
        return {}
    except UserError:  # of the first: which of the others do, another process for each tells
        pass
    fatal: dict[str, str] = {}
    for name in names:
        try:
            require_plugins([(kind, name)])
        except UserError as error:
            fatal[name] = error.message
    return fatal


def beside(modules: Sequence[str], plugins: Sequence[tuple[Kind, str]]) -> Callable[[], None]:
    """Start to import these in another process; the result waits for it."""
    from corerl.doctor.child import look
    from corerl.errors import UserError
    from corerl.plugin.spec import Finding

    # What comes with CoreRL ends no process: a run of nothing else needs no trial.
    foreign = [(kind.value, name) for kind, name in plugins if not _own(kind, name)]
    found: list[Finding] = []
    if not foreign and not modules:
        return lambda: None
    thread = threading.Thread(
        target=lambda: found.extend(look("corerl.doctor.plugins:look_imports", list(modules), foreign)),
        name="trial of imports",
        daemon=True,
    )
    thread.start()

    def result() -> None:
        thread.join()
        for finding in found:
            raise UserError(f"{finding.what}; {finding.mend}")

    return result


def _own(kind: Kind, name: str) -> bool:
    from corerl.errors import PluginError
    from corerl.plugin.registry import locate

    try:
        return locate(kind, name).value.startswith("corerl.")
    except PluginError:  # there is nothing to import
        return True
