"""The roles' models before any process: their configs, what transformers builds of these on meta, the files that hold
their weights; and what a config asks for that training does otherwise."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from attrs import frozen
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from corerl.config.problems import Problems
from corerl.config.schema import Config, LoraConfig, ModelConfig, TrainConfig
from corerl.kinds import experts_of
from corerl.models.build import NOISE, architecture_of
from corerl.models.config import class_name, context_length, hf_config, reads_pictures
from corerl.models.files import kept_digest, look_at
from corerl.models.layouts import Layout, choose_layout, position_limit
from corerl.models.names import shapes_of
from corerl.models.routing import routers
from corerl.models.tokenizer import load_tokenizer, require_room_for_tokens, require_same_tokens
from corerl.plan.model_files import (
    AS_ACTOR,
    require_adapters,
    require_memory,
    require_same_tensors,
    require_weights,
    saved_shapes,
    untrained,
)
from corerl.plan.resolve import Plugins
from corerl.plugin.spec import ACTOR

# Coefficients of terms of transformers' loss, if the code of the model's class reads them -> whether CoreRL has it too,
# which transformers adds only with output_router_logits.
TERMS = dict.fromkeys(("router_aux_loss_coef", "aux_loss_coef", "moe_loss_weight"), True)
TERMS |= dict.fromkeys(("router_z_loss_coef", "z_loss_coefficient"), False)
# Fields that count layers of a checkpoint which predict tokens after the next one, and which transformers never builds.
FURTHER = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
OTHER_HEADS = {"classifier_dropout", "summary_first_dropout"}  # which no language model reads


@frozen(kw_only=True)
class RoleModel:
    """A role's model, with the tables of the config that describe it, for messages."""

    role: str
    settings: ModelConfig
    table: str
    train: TrainConfig
    train_table: str
    lora: LoraConfig | None
    lora_table: str
    critic: bool  # it has a value head
    trained: bool  # by this run
    frozen: bool  # in any run
    hf: PreTrainedConfig
    built: PreTrainedModel  # on meta
    layout: Layout  # the way through it

    @property
    def source(self) -> str:
        """The setting that a problem with the model's config is about."""
        return f"{self.table}.path" if self.settings.path else f"{self.table}.config"


def load_configs(config: Config, roles: Iterable[str]) -> dict[str, PreTrainedConfig]:
    """The config of each role's model. Raises all problems together."""
    tables: dict[str, PreTrainedConfig] = {}  # roles share the actor's
    problems = Problems()
    for role in roles:
        own, table = config.model_of(role), config.model_table_of(role)
        if table not in tables:
            with problems.stage(f"{table}.path" if own.path else f"{table}.config"):
                tables[table] = hf_config(own)
    problems.raise_all()
    return {role: tables[config.model_table_of(role)] for role in roles}


def load_tokens(config: Config, plugins: Plugins, configs: Mapping[str, PreTrainedConfig]) -> PreTrainedTokenizerBase:
    """The tokenizer, for whose tokens each model has room. Raises all problems together."""
    problems = Problems()
    with problems.stage("model.tokenizer"):
        tokenizer = load_tokenizer(tokenizer=config.model.tokenizer, path=config.model.path)
    problems.raise_all()
    rows = configs[ACTOR].get_text_config().vocab_size
    for role, hf in configs.items():
        own, table = config.model_of(role), config.model_table_of(role)
        with problems.stage():
            require_room_for_tokens(hf, tokenizer, own, table=table)
            if plugins.is_frozen(role) and table != "model":
                require_same_tokens(hf, tokenizer, own, rows=rows, table=table)
    problems.raise_all()
    return tokenizer


def build_models(config: Config, plugins: Plugins, configs: Mapping[str, PreTrainedConfig]) -> dict[str, RoleModel]:
    """The models of roles, of their `configs`, checked against the roles' settings. Raises all problems together."""
    found: dict[str, RoleModel] = {}
    problems = Problems()
    for role, hf in configs.items():
        settings, train, critic = config.model_of(role), config.train_of(role), plugins.is_critic(role)
        table, train_table = config.model_table_of(role), config.train_table_of(role)
        with problems.stage(f"{table}.path" if settings.path else f"{table}.config"):
            built = look_at(hf, value_head=critic)
            if not config.cluster.address:
                require_memory(built)
            with problems.stage(f"{train_table}.layout"):
                found[role] = RoleModel(
                    role=role,
                    settings=settings,
                    table=table,
                    train=train,
                    train_table=train_table,
                    lora=config.lora_of(role),
                    lora_table=config.lora_table_of(role),
                    critic=critic,
                    trained=config.run.trains and not plugins.is_frozen(role),
                    frozen=plugins.is_frozen(role),
                    hf=hf,
                    built=built,
                    layout=choose_layout(built, train.layout),
                )
    longest = config.rollout.context_length
    for role, model in found.items():
        if (positions := position_limit(model.built, wanted=longest)) is not None:
            whose = "" if role == ACTOR else f"{role}'s "
            problems.add(f"rollout.context_length: {longest}, but the {whose}model has {positions} positions; lower it")
        problems.add(*against_aux_loss(model, streamed=config.rollout.source == "streamed" and role == ACTOR))
        check_adapters(model, problems)
    problems.raise_all()
    return found


def check_adapters(model: RoleModel, problems: Problems) -> None:
    """Check that the model has the modules that are to have adapters, and that a PEFT directory has these."""
    if model.lora is None:
        return
    with problems.stage(f"{model.lora_table}.targets"):
        adapted = look_at(model.hf, value_head=model.critic, lora=model.lora)
        shapes_of(adapted)
        if model.lora.path:
            with problems.stage(f"{model.lora_table}.path"):
                require_adapters(Path(model.lora.path), adapted)


def check_files(
    model: RoleModel, part: Path | None, *, setting: str, refers: bool, problems: Problems
) -> Iterator[str]:
    """Check that the files which the role starts from hold its model: those of `part`, its directory in a checkpoint
    that `setting` names, and the model's. `refers`: the KL reference is read from the latter in any case. Yields
    notices about what else they hold."""
    path, where = model.settings.path, f"{model.table}.path"
    if part and not model.frozen:
        with problems.stage(setting):
            shapes = saved_shapes(model.hf, value_head=model.critic, lora=model.lora)
            require_same_tensors(part, model.role, shapes)
    read = path and (not part or refers or model.frozen or model.lora is not None)
    with problems.stage(where):
        if path and not model.frozen and (kept := untrained(path, model.hf, model.built)):
            yield f"{where}: {kept}"
        if read and (unused := require_weights(path, model.built, model.hf)):
            yield f"{where}: {unused}"


def check_reference(reference: str, actor: RoleModel, problems: Problems) -> Iterator[str]:
    """Check that the directory of `algorithm.reference` holds the actor's model."""
    with problems.stage("algorithm.reference"):
        if unused := require_weights(reference, actor.built, actor.hf, needs=AS_ACTOR):
            yield f"algorithm.reference: {unused}"


def longest_sample(config: Config, actor: PreTrainedConfig) -> int:
    """Maximum tokens of a sample; 0 if neither the config nor the model sets a limit."""
    return config.rollout.context_length or context_length(actor) or 0


def kept_digests(models: Mapping[str, RoleModel]) -> dict[str, str]:
    """The digests of what exports of trained roles copy from their models' directories, if anything."""
    return {
        role: kept_digest(each.settings.path, each.hf)
        for role, each in models.items()
        if each.trained and each.settings.path and reads_pictures(each.hf)
    }


# ---- what training does otherwise ------------------------------------------------------------------------------------


def against_aux_loss(model: RoleModel, *, streamed: bool) -> Iterator[str]:
    """What contradicts `train.aux_loss_coef`."""
    coef, built = model.train.aux_loss_coef, model.built
    if not coef or not model.trained:
        return
    name, cure = type(built).__name__, "set it to 0"
    if not experts_of(built.config.get_text_config().to_dict()):
        why = f"the {model.role}'s model has no experts"
    elif "load_balancing_loss_func" not in inspect.getsource(type(built)):
        why = f"transformers has no such loss for {name}"
    elif not routers(built):
        why = f"it is not known which modules of {name} route"
    elif streamed:
        why = "that loss weighs tokens by how many the step has, unknown as rollout.source='streamed' begins"
        cure = "set it to 0, or rollout.source to 'synchronous'"
    else:
        return
    yield f"{model.train_table}.aux_loss_coef: {coef:g}, but {why}; {cure}"


def notices_of(model: RoleModel) -> Iterator[str]:
    """Lines about a trained model: fields of its config that change what transformers trains, and not a run; weights
    without adapters, and adapters that other classes lack."""
    if model.trained and not model.critic:
        where = f"{model.source}: config.json: " if model.settings.path else f"{model.source}: "
        yield from (where + line for line in _unread_fields(model))
    if model.trained and model.lora is not None:
        yield from without_adapters(model)
        if reads_pictures(model.hf):
            yield (
                f"{model.lora_table}: adapters are named for the modules of {class_name(model.hf)}, the class of the "
                "checkpoint; load them onto a model of AutoModelForImageTextToText"
            )


def _unread_fields(model: RoleModel) -> Iterator[str]:
    config = model.hf.get_text_config()
    text = config.to_dict()
    fields = {**model.hf.to_dict(), **text, **(text.get("ffn_config") or {})}  # the last is DBRX's
    numbers = {name: value for name, value in fields.items() if isinstance(value, int | float) and value}
    read = inspect.getsource(architecture_of(model.hf))
    for name in (name for name in TERMS if name in numbers and f".{name}" in read):
        advice = ", which has no such term"
        if TERMS[name]:
            if model.train.aux_loss_coef or not fields.get("output_router_logits"):
                continue
            advice = f"; set {model.train_table}.aux_loss_coef={numbers[name]:g} to have it"
        yield f"{name}={numbers[name]:g} changes transformers' loss, not CoreRL's{advice}"
    # Of the text decoder: nothing else runs.
    noise = {name for name in numbers if name in text and any(word in name for word in NOISE)} - OTHER_HEADS
    # Those who train a type with noise by default seldom know of it.
    usual = type(config)().to_dict() if noise else {}
    if given := [f"{name}={numbers[name]:g}" for name in sorted(noise) if numbers[name] != usual.get(name)]:
        yield f"{', '.join(given)}: trained without this noise here, so that log-probs are the engine's"
    if model.settings.path and not reads_pictures(model.hf):  # else an export has them unchanged: see `untrained`
        further = "layers that predict further tokens are neither trained nor exported"
        yield from (f"{name}={numbers[name]}: {further}" for name in FURTHER if name in numbers)


def without_adapters(model: RoleModel) -> Iterator[str]:
    """A line if a model with adapters has experts in fused tensors, which get none."""
    count = experts_of(model.hf.get_text_config().to_dict())
    parameters = model.built.named_parameters()
    fused = [name for name, param in parameters if param.dim() == 3 and len(param) == count]
    if model.lora is not None and fused:
        names = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in fused))
        yield f"{model.lora_table}: {len(fused)} fused tensors of experts ({names}) get no adapters"


def unpacked(models: Mapping[str, RoleModel]) -> list[str]:
    """A line for each reason why a role's model is not packed, though packing would be faster."""
    whys = {each.train_table: each.layout.why for each in models.values() if each.layout.why}
    return [f"{table}.layout: whole, on padded rows, because {why}" for table, why in whys.items()]
