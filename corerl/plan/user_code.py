"""Name what a config makes a process import besides CoreRL, and refuse what must not be imported."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from attrs import frozen

from corerl.config.schema import Config
from corerl.plan.check import require_no_code_of_a_model
from corerl.plan.resolve import TABLES, distributions_of, selected
from corerl.plugin.registry import Kind, scan
from corerl.plugin.requirements import require_met

FUNCTION = re.compile(r"([\w.]+):\w+")


@frozen(kw_only=True)
class UserCode:
    modules: tuple[str, ...]  # with the user's functions
    plugins: tuple[tuple[Kind, str], ...]


def code_of(config: Config) -> UserCode:
    """What a run of the config imports.

    Raises ConfigError as `require_no_code_of_a_model` does, and PluginIncompatible if what is installed is not what
    CoreRL and the plugins require: then the imports that a command does next may raise anything."""
    require_no_code_of_a_model(config)
    require_met(distributions_of(config))
    plugins = [(each.kind, each.name) for each in selected(config)]
    # Tables of plugins that are not selected are checked too, which imports their specs.
    plugins += [(kind, name) for kind in TABLES for name in getattr(config, kind.value)]
    # And the spec of an extension says whether it joins without being listed.
    plugins += [(Kind.EXTENSIONS, f"{each.distribution}:{each.name}") for each in scan(Kind.EXTENSIONS)]
    return UserCode(
        modules=tuple(
            dict.fromkeys(
                [*(name.partition(":")[0] for name in functions_of(config).values()), *_modules_of_extensions(config)]
            )
        ),
        plugins=tuple(dict.fromkeys(plugins)),
    )


def functions_of(config: Config) -> dict[str, str]:
    """The user's functions that a run may call, named as 'module:function', by the settings that name them."""
    algorithm = config.algorithm
    names = {
        **{f"{table}.name": name for table, name in rewards_of(config).items()},
        **{f"{table}.answer": each.answer or "" for table, each in config.eval.tables.items()},
        **_function_of_sampler(config),
        "rollout.postprocess": config.rollout.postprocess,
    }
    if config.run.mode != "eval":  # which asks nothing of the algorithm
        names["algorithm.loss"] = algorithm.loss
        names["algorithm.advantages"] = algorithm.advantages
        names["algorithm.postprocess"] = algorithm.postprocess
    return {setting: name for setting, name in names.items() if ":" in name}


def _function_of_sampler(config: Config) -> dict[str, str]:
    """The option `function` of the run's sampler, which is not known here to have one."""
    name = config.rollout.sampler.rpartition(":")[2]
    options = config.samplers.get(name, {})
    given = options.get("function") if isinstance(options, Mapping) else getattr(options, "function", None)
    return {f"samplers.{name}.function": given} if isinstance(given, str) else {}


def _modules_of_extensions(config: Config) -> Iterator[str]:
    """The modules of what may be functions among the options of extensions, whose checks may import them."""
    for each in config.chosen_extensions:
        for value in each.options.values() if isinstance(each.options, Mapping) else ():
            if isinstance(value, str) and (found := FUNCTION.fullmatch(value)):
                yield found[1]


def rewards_of(config: Config) -> dict[str, str]:
    """The names of all reward functions, by the tables that name them."""
    tables = {f"eval.sets[{number}].reward": each.reward for number, each in enumerate(config.eval.sets)}
    names: dict[str, str] = {}
    for table, reward in {"reward": config.reward, **tables}.items():
        if reward is not None and reward.functions:
            names |= {f"{table}.functions[{place}]": each.name for place, each in enumerate(reward.functions)}
        elif reward is not None:
            names[table] = reward.name
    return names
