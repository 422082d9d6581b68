"""The roles' models before any process: their configs, what transformers builds of these on meta, the files that hold
their weights; and what a config asks for that training does otherwise."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import evolve, frozen
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from corerl.config.problems import Problems
from corerl.config.schema import Config, LoraConfig, ModelConfig, TrainConfig
from corerl.kinds import experts_of
from corerl.models.config import class_name, context_length, hf_config, reads_pictures
from corerl.models.tokenizer import load_tokenizer, require_room_for_tokens, require_same_tokens
from corerl.plan.resolve import Plugins
from corerl.plugin.spec import ACTOR

if TYPE_CHECKING:
    from corerl.models.layouts import Layout

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
    built: PreTrainedModel | None = None  # on meta; None if it cannot be built
    layout: Layout | None = None  # the way through it

    @property
    def source(self) -> str:
        """The setting that a problem with the model's config is about."""
        return f"{self.table}.path" if self.settings.path else f"{self.table}.config"


def load_models(config: Config, roles: Sequence[str], plugins: Plugins, problems: Problems) -> dict[str, RoleModel]:
    """The models of these roles, of valid configs, not built yet."""
    configs: dict[str, PreTrainedConfig] = {}  # table -> config: roles share the actor's
    found: dict[str, RoleModel] = {}
    for role in roles:
        own, table = config.model_of(role), config.model_table_of(role)
        if table not in configs and problems.none_in(table):
            with problems.stage(f"{table}.config", path=f"{table}.path" if own.path else f"{table}.config"):
                configs[table] = hf_config(own)
        if table in configs:
            found[role] = RoleModel(
                role=role,
                settings=own,
                table=table,
                train=config.train_of(role),
                train_table=config.train_table_of(role),
                lora=config.lora_of(role),
                lora_table=config.lora_table_of(role),
                critic=plugins.is_critic(role),
                trained=config.run.trains and not plugins.is_frozen(role),
                frozen=plugins.is_frozen(role),
                hf=configs[table],
            )
    return found


def load_tokens(
    model: ModelConfig, models: Mapping[str, RoleModel], problems: Problems
) -> PreTrainedTokenizerBase | None:
    """The tokenizer, for whose tokens each model has room."""
    # Where transformers looks for a tokenizer, it reads the config.json there, and fails at the same place.
    needed = () if model.tokenizer else ("model.config",)
    tokenizer: PreTrainedTokenizerBase | None = None
    if problems.none_in("model.path", "model.tokenizer", *needed):
        with problems.stage("model.tokenizer"):
            tokenizer = load_tokenizer(tokenizer=model.tokenizer, path=model.path)
    actor = models.get(ACTOR)
    if tokenizer is None:
        return None
    for each in models.values():
        with problems.stage(f"{each.table}.vocabulary"):
            require_room_for_tokens(each.hf, tokenizer, each.settings, table=each.table)
            if each.frozen and each.table != "model":
                rows = actor.hf.get_text_config().vocab_size if actor is not None else None
                require_same_tokens(each.hf, tokenizer, each.settings, rows=rows, table=each.table)
    return tokenizer


def build(model: RoleModel, *, elsewhere: bool, wanted: int, streamed: bool, problems: Problems) -> RoleModel:
    """The model on meta, with the way through it, checked against the role's settings. `elsewhere`: on a cluster, whose
    memory is not known. `wanted` is rollout.context_length, `streamed` whether the actor's steps begin early."""
    from corerl.models.layouts import (
        choose_layout,  # slow to import, as are the next ones: takes seconds
        position_limit,
    )
    from corerl.plan import model_files

    with problems.stage(f"{model.table}.config", path=model.source):
        built = model_files.built(model.hf, value_head=model.critic)
        if not elsewhere:
            model_files.require_memory(built, there=model_files.memory_here())
        model = evolve(model, built=built)
    if model.built is None:
        return model
    with problems.stage(f"{model.train_table}.layout", path=f"{model.train_table}.layout"):
        model = evolve(model, layout=choose_layout(built, model.train.layout))
    if (positions := position_limit(built, wanted=wanted)) is not None:
        whose = "" if model.role == ACTOR else f"{model.role}'s "
        problems.add(f"rollout.context_length: {wanted}, but the {whose}model has {positions} positions; lower it")
    for line in against_aux_loss(model, streamed=streamed and model.role == ACTOR):
        problems.add(line)
    return model


def check_adapters(model: RoleModel, problems: Problems) -> None:
    """Check that the model has the modules that are to have adapters, and that a PEFT directory has these."""
    if model.lora is None or not problems.none_in(model.lora_table, model.table):
        return
    from corerl.plan.model_files import require_adapters, with_adapters  # slow to import

    with problems.stage(f"{model.lora_table}.targets", path=f"{model.lora_table}.targets"):
        adapted = with_adapters(model.hf, model.lora, value_head=model.critic)
        if model.lora.path:
            with problems.stage(f"{model.lora_table}.path", path=f"{model.lora_table}.path"):
                require_adapters(Path(model.lora.path), adapted)


def check_files(
    model: RoleModel, part: Path | None, *, setting: str, refers: bool, problems: Problems
) -> Iterator[str]:
    """Check that the files which the role starts from hold its model: those of `part`, its directory in a checkpoint
    that `setting` names, and the model's. `refers`: the KL reference is read from the latter in any case. Yields
    notices about what else they hold."""
    from corerl.plan.model_files import require_same_tensors, require_weights, saved_shapes, untrained  # slow to import

    path, built = model.settings.path, model.built
    if built is None:
        return
    if path and not model.frozen and problems.none_in("model", model.table):
        with problems.stage(f"{model.table}.weights", path=f"{model.table}.path"):
            if kept := untrained(path, model.hf, built):
                yield f"{model.table}.path: {kept}"
    if part and not model.frozen and problems.none_in(model.lora_table):
        with problems.stage("checkpoint.model", path=setting):
            shapes = saved_shapes(model.hf, value_head=model.critic, lora=model.lora)
            require_same_tensors(part, model.role, shapes)
    read = path and (not part or refers or model.frozen or model.lora is not None)
    if read and problems.none_in("model", model.table, "checkpoint"):
        with problems.stage(f"{model.table}.weights", path=f"{model.table}.path"):
            if unused := require_weights(path, built, model.hf):
                yield f"{model.table}.path: {unused}"


def check_reference(reference: str, actor: RoleModel, problems: Problems) -> Iterator[str]:
    """Check that the directory of `algorithm.reference` holds the actor's model."""
    from corerl.plan.model_files import AS_ACTOR, require_weights  # slow to import

    if actor.built is not None and problems.none_in("model", "algorithm"):
        with problems.stage("algorithm.reference", path="algorithm.reference"):
            if unused := require_weights(reference, actor.built, actor.hf, needs=AS_ACTOR):
                yield f"algorithm.reference: {unused}"


def longest_sample(config: Config, actor: RoleModel | None) -> int:
    """Maximum tokens of a sample; 0 if neither the config nor the model sets a limit."""
    own = context_length(actor.hf) if actor is not None else None
    return config.rollout.context_length or own or 0


def kept_digests(models: Mapping[str, RoleModel]) -> dict[str, str]:
    """The digests of what exports of trained roles copy from their models' directories, if anything."""
    from corerl.models.files import kept_digest  # slow to import: takes seconds

    return {
        role: kept_digest(each.settings.path, each.hf)
        for role, each in models.items()
        if each.trained and each.settings.path and reads_pictures(each.hf)
    }


# ---- what training does otherwise ------------------------------------------------------------------------------------


def against_replay(replay: str, actor: RoleModel) -> Iterator[str]:
    if replay != "none" and experts_of(actor.hf.to_dict()) <= 1:
        yield f"algorithm.routing_replay: {replay!r}, but the model has no experts; set it to 'none'"


def against_aux_loss(model: RoleModel, *, streamed: bool) -> Iterator[str]:
    """What contradicts `train.aux_loss_coef` of a built model."""
    from corerl.models.routing import routers  # slow to import: takes seconds

    coef, built = model.train.aux_loss_coef, model.built
    if not coef or built is None or not model.trained:
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
    from corerl.models.build import NOISE, architecture_of  # slow to import: takes seconds

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
    if model.lora is None or not count:
        return
    from corerl.models.lora import LoraLinear, adapter_parameters  # slow to import: takes seconds
    from corerl.plan.model_files import with_adapters

    adapted = with_adapters(model.hf, model.lora, value_head=model.critic)
    new = adapter_parameters(adapted)
    sizes = {name: param.shape for name, param in adapted.named_parameters() if name not in new}
    if fused := [name for name, shape in sizes.items() if len(shape) == 3 and shape[0] == count]:
        covered = sum(module.weight.numel() for module in adapted.modules() if isinstance(module, LoraLinear))
        share = 100 * covered / sum(map(math.prod, sizes.values()))
        names = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in fused))
        yield (
            f"{model.lora_table}: adapters cover {share:.2g} % of the weights: {len(fused)} fused tensors of experts "
            f"({names}) get none"
        )


def unpacked(models: Mapping[str, RoleModel]) -> list[str]:
    """A line for each reason why a role's model is not packed, though packing would be faster."""
    layouts = [(each.train_table, each.layout) for each in models.values() if each.layout is not None]
    lines = [f"{table}.layout: whole, on padded rows, because {layout.why}" for table, layout in layouts if layout.why]
    return list(dict.fromkeys(lines))
