"""Fill in what a config leaves open: adapters, vocabulary, precision, absolute paths; and change its sizes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import evolve
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from corerl.config.schema import Config, LoraConfig, ModelConfig, TrainConfig
from corerl.data.files import is_pattern
from corerl.errors import ConfigError
from corerl.models.lora import saved_settings
from corerl.models.tokenizer import CHARACTERS, known_tokens
from corerl.plan.check import Problems
from corerl.plan.resolve import Plugins, backend_name
from corerl.plugin.capabilities import Capability
from corerl.plugin.spec import ACTOR

# ---- adapters --------------------------------------------------------------------------------------------------------


def settle_adapters(config: Config, problems: Problems) -> Config:
    """The config with a value for all that the roles' adapters leave open: of a PEFT directory, or the common one."""
    for role in config.chosen_roles:
        lora, table = config.lora_of(role), config.lora_table_of(role)
        if lora is None:
            continue
        saved: Mapping[str, Any] = {}
        if lora.path:
            with problems.stage(f"{table}.path"):
                saved = saved_settings(lora.path)
        for name, value in saved.items():
            asked = getattr(lora, name)
            if asked is not None and (set(asked) != set(value) if name == "targets" else asked != value):
                problems.add(f"{table}.{name}: {asked!r}, but the adapters in {lora.path} have {value!r}; remove it")
        config = _with_lora(config, role, lora.settled(saved))
    return config


def _with_lora(config: Config, role: str, lora: LoraConfig) -> Config:
    return evolve(config, lora=lora) if role == ACTOR else _with_roles(config, {role: {"lora": lora}})


def _with_roles(config: Config, changes: Mapping[str, Mapping[str, Any]]) -> Config:
    """The config with these settings of roles, by role."""
    roles: Any = {role: evolve(getattr(config.roles, role), **changed) for role, changed in changes.items()}
    return evolve(config, roles=evolve(config.roles, **roles)) if roles else config


# ---- vocabulary ------------------------------------------------------------------------------------------------------


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

    own = {role: {"model": of(role)} for role in config.roles.own_models if role in models}
    return _with_roles(evolve(config, model=of(ACTOR)), own)


# ---- precision and recomputation -------------------------------------------------------------------------------------


def with_choices(config: Config, plugins: Plugins, device: str, *, bfloat16: bool) -> Config:
    """The config with a precision for every role in place of 'auto', for devices with or without `bfloat16`, and with
    nothing recomputed in place of 'auto'. Roles that share a table in which they now differ get their own."""
    trains: dict[str, TrainConfig] = {}
    for role in config.chosen_roles:
        half = bfloat16 and plugins.supports(role, Capability.BFLOAT16)
        trains[role] = config.train_of(role).settled(device, bfloat16=half)
        if plugins.is_frozen(role):
            trains[role] = trains[role].of_passes()
    sharing = [role for role in trains if config.chosen_roles[role].train is None]
    trained = [trains[role] for role in sharing if not plugins.is_frozen(role)]
    if trained and all(each == trained[0] for each in trained):
        config = evolve(config, train=trained[0])
    own: dict[str, dict[str, Any]] = {}
    for role, train in trains.items():
        table = config.train_of(role)
        if train != (table.of_passes() if plugins.is_frozen(role) and role in sharing else table):
            own[role] = {"train": train}
    return _with_roles(config, own)


# ---- paths -----------------------------------------------------------------------------------------------------------


def with_absolute_paths(config: Config) -> Config:
    """Make paths absolute, for processes with another working directory and for later readers of the run's config."""

    def there(source: str) -> str:
        found = source and (os.path.exists(source) or is_pattern(source))
        return str(Path(source).absolute()) if found else source

    def absolute(model: ModelConfig) -> ModelConfig:
        own = model.tokenizer
        return evolve(
            model,
            path=model.path and str(Path(model.path).absolute()),
            tokenizer=own if not own or own.startswith(CHARACTERS) else str(Path(own).absolute()),
        )

    data = config.data
    sources = tuple(evolve(each, source=there(each.source)) for each in data.sources)
    sets = tuple(evolve(each, source=there(each.source)) for each in config.eval.sets)
    config = evolve(
        config,
        model=absolute(config.model),
        data=evolve(data, source=there(data.source), sources=sources),
        eval=evolve(config.eval, sets=sets),
        rollout=evolve(config.rollout, saved=there(config.rollout.saved)),
        algorithm=evolve(config.algorithm, reference=there(config.algorithm.reference)),
    )
    for role in config.chosen_roles:
        lora = config.lora_of(role)
        if lora is not None and lora.path:
            config = _with_lora(config, role, evolve(lora, path=str(Path(lora.path).absolute())))
    return _with_roles(config, {role: {"model": absolute(model)} for role, model in config.roles.own_models.items()})


# ---- sizes -----------------------------------------------------------------------------------------------------------


def with_sizes(
    config: Config, role: str, *, ranks: int = 0, backend: str = "", options: Mapping[str, Any] | None = None
) -> Config:
    """The config with another number of ranks of the role, another backend or other options; what is left out stays,
    but for the options of another backend."""
    choice = config.chosen_roles[role]
    if options is None and backend in ("", backend_name(config, role)):
        options = choice.options
    changed = {"ranks": ranks or choice.ranks, "backend": backend or choice.backend, "options": options}
    return _with_roles(config, {role: changed})
