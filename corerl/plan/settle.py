"""Settle what a config leaves open: the precision by the device, and where relative paths begin."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import evolve

from corerl.config.schema import Config, ModelConfig, TrainConfig
from corerl.data.files import is_pattern
from corerl.errors import ConfigError
from corerl.models.tokenizer import CHARACTERS, known_tokens
from corerl.plan.lora import with_absolute_adapters
from corerl.plan.resolve import backend_name, is_frozen
from corerl.plugin.capabilities import Capability
from corerl.plugin.registry import Kind, load
from corerl.plugin.spec import ACTOR

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase


# What decides on recomputation where the config leaves it open.
BY_MEMORY = "pip install 'corerl[forecast]' to have it chosen by the memory that training needs"


def with_choices(config: Config, device: str, *, bfloat16: bool) -> Config:
    """The config with a precision for every role in place of 'auto', for devices with or without `bfloat16`, and with
    nothing recomputed in place of 'auto'."""
    trains = {}
    for role in config.chosen_roles:
        train = config.train_of(role)
        half = bfloat16 and supports(config, role, Capability.BFLOAT16)
        trains[role] = train.settled(device, bfloat16=half)
    return with_trains(config, trains)


def with_vocabulary(
    config: Config, models: Mapping[str, PreTrainedConfig], tokenizer: PreTrainedTokenizerBase
) -> Config:
    """The config with a `vocabulary` for every model whose embedding has more rows, and 0 for all others. Raises
    ConfigError if the config leaves out some of the tokenizer's."""
    known = known_tokens(tokenizer)
    asked = config.model.vocabulary or known
    if asked < known:
        raise ConfigError(
            f"model.vocabulary: {asked}, but the tokenizer has ids up to {known - 1}; set it to at least {known}, or "
            "leave it out"
        )

    def of(role: str) -> ModelConfig:
        rows = models[role].get_text_config().vocab_size
        return evolve(config.model_of(role), vocabulary=asked if asked < rows else 0)

    own: dict[str, Any] = {
        role: evolve(config.roles.beside_actor[role], model=of(role))
        for role in config.roles.own_models
        if role in models
    }
    return evolve(config, model=of(ACTOR), roles=evolve(config.roles, **own))


def supports(config: Config, role: str, capability: Capability) -> bool:
    return bool(load(Kind.BACKENDS, backend_name(config, role)).spec.support(capability).full)


def with_trains(config: Config, trains: Mapping[str, TrainConfig]) -> Config:
    """The config with these training settings of all its roles, in their tables; roles that share one in which they
    now differ get tables of their own."""
    frozen = {role: train.of_passes() for role, train in trains.items() if is_frozen(config, role)}
    sharing = [role for role in trains if config.chosen_roles[role].train is None]
    shared = {role: trains[role] for role in sharing if role not in frozen}
    if len(set(map(repr, shared.values()))) == 1:
        config = evolve(config, train=next(iter(shared.values())))
    else:
        shared = {}
    shared |= {role: train for role, train in frozen.items() if role in sharing and train == config.train.of_passes()}
    trains = {**trains, **frozen}
    own: dict[str, Any] = {
        role: evolve(config.chosen_roles[role], train=trains[role]) for role in trains if role not in shared
    }
    return evolve(config, roles=evolve(config.roles, **own)) if own else config


def settled(before: Config, after: Config, *, decided: Collection[str] = (), advice: str = "") -> Iterator[str]:
    """A line for each setting that was settled, but for those that extensions have `decided`; with `advice` where they
    might decide on recomputation."""
    for role in before.chosen_roles:
        table, was, now = before.train_table_of(role), before.train_of(role), after.train_of(role)
        trained = before.run.trains and not is_frozen(before, role)
        for name in ("precision", "recompute") if trained else ("precision",):
            if getattr(was, name) == "auto" and f"{table}.{name}" not in decided:
                open_to = advice and name == "recompute" and supports(before, role, Capability.RECOMPUTE)
                more = f"; {advice}" if open_to else ""
                yield f"{table}.{name}: 'auto' is {getattr(now, name)!r} for the {role}{more}"


def with_absolute_paths(config: Config) -> Config:
    """Make paths absolute, for processes with another working directory and for later readers of the run's config."""

    def there(source: str) -> str:
        found = source and (os.path.exists(source) or is_pattern(source))
        return str(Path(source).absolute()) if found else source

    data = config.data
    data = evolve(
        data, source=there(data.source), sources=tuple(evolve(each, source=there(each.source)) for each in data.sources)
    )
    sets = tuple(evolve(each, source=there(each.source)) for each in config.eval.sets)
    config = evolve(config, model=_absolute(config.model), data=data, eval=evolve(config.eval, sets=sets))
    config = evolve(config, rollout=evolve(config.rollout, saved=there(config.rollout.saved)))
    config = evolve(config, algorithm=evolve(config.algorithm, reference=there(config.algorithm.reference)))
    config = with_absolute_adapters(config)
    own = {
        role: evolve(config.roles.beside_actor[role], model=_absolute(model))
        for role, model in config.roles.own_models.items()
    }
    return evolve(config, roles=evolve(config.roles, **own))


def _absolute(model: ModelConfig) -> ModelConfig:
    def absolute(directory: str) -> str:
        return str(Path(directory).absolute()) if directory and not directory.startswith(CHARACTERS) else directory

    return evolve(model, path=absolute(model.path), tokenizer=absolute(model.tokenizer))
