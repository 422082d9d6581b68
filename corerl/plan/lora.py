"""Settle and check the roles that train adapters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from attrs import evolve
from transformers import PreTrainedConfig

from corerl.config.problems import Problems
from corerl.config.schema import Config, LoraConfig
from corerl.models.config import class_name, reads_pictures
from corerl.plan.resolve import has_value_head, is_frozen
from corerl.plugin.spec import ACTOR


def settle_adapters(config: Config, problems: Problems) -> Config:
    """The config with a value for all that the roles' adapters leave open: of a PEFT directory, or the common one."""
    for role in config.chosen_roles:
        lora, table = config.lora_of(role), config.lora_table_of(role)
        if lora is None:
            continue
        saved: Mapping[str, Any] = {}
        if lora.path:
            from corerl.models.peft_files import saved_settings  # slow to import: takes seconds

            with problems.stage(f"{table}.path", path=f"{table}.path"):
                saved = saved_settings(lora.path)
        for line in _other_than_saved(lora, saved, table):
            problems.add(line)
        if lora.path and lora.init != LoraConfig().init:
            problems.add(f"{table}.init: {lora.init!r}, but those of {table}.path have begun; remove one of the two")
        config = _with(config, role, lora.settled(saved))
    return config


def against_adapters(config: Config) -> Iterator[str]:
    """What contradicts that a role trains adapters. The algorithm is known."""
    for role in config.chosen_roles:
        if config.lora_of(role) is not None and is_frozen(config, role):
            yield f"{config.lora_table_of(role)}: set, but the {role} is never trained; remove it"
    if config.lora_of(ACTOR) is not None and config.algorithm.reference:
        yield (
            f"algorithm.reference: {config.algorithm.reference!r}, but with [lora] the reference policy has the "
            "actor's weights without what it has learned; for another one set roles.reference.model.path"
        )


def against_sending(config: Config) -> Iterator[str]:
    """What contradicts how adapters are sent, in every mode."""
    if config.weights.lora == "adapter" and config.lora is None:
        yield "weights.lora: 'adapter', but the actor trains no adapters; set [lora], or remove it"
    if config.weights.lora == "adapter" and config.weights.quantize != "none":
        yield (
            f"weights.lora: 'adapter', but weights.quantize={config.weights.quantize!r} would round what the adapters "
            "are beside; set it to 'none', or weights.lora to 'merged'"
        )


def check_adapters(config: Config, models: Mapping[str, PreTrainedConfig], problems: Problems) -> None:
    """Check that the models have the modules that are to have adapters, and that a PEFT directory has these."""
    for role, hf in models.items():
        lora, table = config.lora_of(role), config.lora_table_of(role)
        if lora is None or not problems.none_in(table, config.model_table_of(role)):
            continue
        from corerl.plan.model_files import require_adapters, with_adapters  # slow to import

        value_head = problems.none_in("algorithm's spec") and has_value_head(config, role)
        with problems.stage(f"{table}.targets", path=f"{table}.targets"):
            adapted = with_adapters(hf, lora, value_head=value_head)
            if lora.path:
                with problems.stage(f"{table}.path", path=f"{table}.path"):
                    require_adapters(Path(lora.path), adapted)


def named_for(config: Config, models: Mapping[str, PreTrainedConfig]) -> Iterator[str]:
    """A line for each role whose adapters may not fit what AutoModelForCausalLM builds of the checkpoint."""
    for role, hf in models.items():
        if config.lora_of(role) is not None and config.run.trains and reads_pictures(hf):
            yield (
                f"{config.lora_table_of(role)}: adapters are named for the modules of {class_name(hf)}, the class of "
                "the checkpoint; load them onto a model of AutoModelForImageTextToText"
            )


def with_absolute_adapters(config: Config) -> Config:
    """The config with absolute paths of adapters."""
    for role in config.chosen_roles:
        lora = config.lora_of(role)
        if lora is not None and lora.path:
            config = _with(config, role, evolve(lora, path=str(Path(lora.path).absolute())))
    return config


def _other_than_saved(lora: LoraConfig, saved: Mapping[str, Any], table: str) -> Iterator[str]:
    for name, value in saved.items():
        asked = getattr(lora, name)
        if asked is not None and (sorted(asked) if name == "targets" else asked) != (
            sorted(value) if name == "targets" else value
        ):
            yield f"{table}.{name}: {asked!r}, but the adapters in {lora.path} have {value!r}; remove it"


def _with(config: Config, role: str, lora: LoraConfig) -> Config:
    if role == ACTOR:
        return evolve(config, lora=lora)
    own: dict[str, Any] = {role: evolve(config.roles.beside_actor[role], lora=lora)}
    return evolve(config, roles=evolve(config.roles, **own))
