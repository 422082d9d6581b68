"""The roles' models before any process: their configs, what transformers builds of these on meta, the files that hold
their weights; and what a config asks for that training does otherwise."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from attrs import frozen
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from corerl.checkpoint.format import WEIGHTS, unusable
from corerl.checkpoint.reader import CheckpointSource
from corerl.config.schema import Config, LoraConfig, ModelConfig, TrainConfig
from corerl.errors import CheckpointError, ModelError
from corerl.kinds import experts_of
from corerl.messages import listed
from corerl.models.attention import carries_state
from corerl.models.build import VALUE_HEAD_WEIGHT, stored_buffers
from corerl.models.config import context_length, hf_config, reads_pictures
from corerl.models.files import meta_model, model_files, shapes_of_tower
from corerl.models.layouts import Layout, choose_layout, position_limit
from corerl.models.lora import PeftFiles
from corerl.models.names import hf_boxes, peft_names, shapes_of
from corerl.models.parts import parts_of
from corerl.models.readers import SafetensorsSource
from corerl.models.routing import routers
from corerl.models.tokenizer import load_tokenizer, require_room_for_tokens, require_same_tokens
from corerl.plan.check import Problems
from corerl.plan.resolve import Plugins
from corerl.plugin.spec import ACTOR
from corerl.weights.adapters import is_adapter

GIB = 2**30
FLOATS = ("F64", "F32", "BF16", "F16")  # as safetensors names them
SHOWN = 8  # names in one line
OWN = (
    "but its config.json needs {}: they belong to different models, or the file is incomplete; download or save them "
    "again"
)
AS_ACTOR = (
    "but the actor's model needs {}, whose shapes its reference takes; a reference of another size, or with an "
    "embedding padded to another number of rows, is a role: set roles.reference.model.path instead"
)


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
            built = meta_model(hf, value_head=critic)
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
                    layout=choose_layout(built, train.layout, pictures=bool(settings.pictures)),
                )
    longest = longest_sample(config, next(iter(configs.values())))  # the actor's, unless a role is alone
    for role, model in found.items():
        if (positions := position_limit(model.built, wanted=longest)) is not None:
            whose = "" if role == ACTOR else f"{role}'s "
            given = config.rollout.context_length or f"0, which is the {longest} of the actor's model"
            problems.add(
                f"rollout.context_length: {given}, but the {whose}model has {positions} positions; set it to that"
            )
        problems.add(*against_sharing(model))
        problems.add(*against_aux_loss(model, streamed=config.rollout.source == "streamed" and role == ACTOR))
        check_adapters(model, problems)
        if model.settings.pictures and role != ACTOR and sight_of(model.hf) != sight_of(configs[ACTOR]):
            problems.add(
                f"{model.table}: a {model.hf.model_type} model, which has other tokens for pictures than the actor's "
                f"{configs[ACTOR].model_type}, whose rows the role reads; use a model of the same family"
            )
    problems.raise_all()
    return found


def sight_of(hf: PreTrainedConfig) -> tuple[object, ...]:
    """What decides which tokens stand for a picture."""
    tower = getattr(hf, "vision_config", None)
    own = [getattr(hf, name, None) for name in ("model_type", "image_token_id", "image_token_index")]
    return (*own, *(getattr(tower, name, None) for name in ("patch_size", "spatial_merge_size", "image_size")))


def check_adapters(model: RoleModel, problems: Problems) -> None:
    """Check that the model has the modules that are to have adapters, and that a PEFT directory has these."""
    if model.lora is None:
        return
    with problems.stage(f"{model.lora_table}.targets"):
        adapted = meta_model(model.hf, value_head=model.critic, lora=model.lora)
        shapes_of(adapted)
        if model.lora.path:
            with problems.stage(f"{model.lora_table}.path"):
                require_adapters(Path(model.lora.path), adapted)


def check_files(model: RoleModel, part: Path | None, *, setting: str, refers: bool, problems: Problems) -> None:
    """Check that the files which the role starts from hold its model: those of `part`, its directory in a checkpoint
    that `setting` names, and the model's. `refers`: the KL reference is read from the latter in any case."""
    path, where = model.settings.path, f"{model.table}.path"
    if part and not model.frozen:
        with problems.stage(setting):
            shapes = saved_shapes(
                model.hf, value_head=model.critic, lora=model.lora, tower=trains_tower(model.settings, model.hf)
            )
            require_same_tensors(part, model.role, shapes)
    read = path and (not part or refers or model.frozen or model.lora is not None)
    with problems.stage(where):
        if read:
            require_weights(path, model.built, model.hf)
        shows = bool(model.settings.pictures) and reads_pictures(model.hf)
        # A frozen tower is in no checkpoint.
        if path and shows and (read or not trains_tower(model.settings, model.hf)):
            shapes, cure = shapes_of_tower(model.hf), "use the original model, not a quantized one"
            require_tensors(model_files(path, model.hf), shapes, needs=OWN, cure=cure)


def longest_sample(config: Config, actor: PreTrainedConfig) -> int:
    """Maximum tokens of a sample; 0 if neither the config nor the model sets a limit."""
    return config.rollout.context_length or context_length(actor) or 0


# ---- files -----------------------------------------------------------------------------------------------------------


def require_memory(model: PreTrainedModel) -> None:
    """Raise ModelError if the weights alone, in 16 bits, need more than all host and device memory of this machine."""
    devices = range(torch.cuda.device_count())
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    there += sum(torch.cuda.get_device_properties(index).total_memory for index in devices)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    count = sum(tensor.numel() for _, tensor in tensors)
    if 2 * count > there:
        name, largest = max(tensors, key=lambda each: each[1].numel())
        raise ModelError(
            f"the model has {count:.3g} parameters, which take {2 * count / GIB:.3g} GiB in 16 bits, and this machine "
            f"has {there / GIB:.3g} GiB in all; correct its fields (its largest tensor is {name!r}, "
            f"{list(largest.shape)}), or set cluster.address to a cluster that holds it"
        )


def require_tensors(files: SafetensorsSource, shapes: Mapping[str, tuple[int, ...]], *, needs: str, cure: str) -> None:
    """Raise ModelError if the files lack one of the tensors, or have it in another shape (then `needs` says who needs
    which), or not in floating point (then `cure` says what to do). Reads only the files' headers."""
    for name, shape in shapes.items():
        if (found := files.shape(name)) != shape:
            what = "lacks" if found is None else f"has {list(found)} for"
            raise ModelError(f"{files.where(name)} {what} {name!r}, {needs.format(list(shape))}")
        if (dtype := files.dtype(name)) not in FLOATS:
            raise ModelError(
                f"{files.where(name)} has values of type {dtype} for {name!r}, wanted one of {', '.join(FLOATS)}; "
                f"{cure}"
            )


def require_adapters(directory: Path, model: PreTrainedModel) -> None:
    """Raise ModelError unless the PEFT directory has the adapters of `model`, and no others."""
    names = peft_names(model)
    files = PeftFiles(directory, names)
    wanted = {name: shape for name, shape in shapes_of(model).items() if is_adapter(name)}
    needs = "this model needs {}; use adapters of the same model"
    require_tensors(files, wanted, needs=needs, cure="save the adapters again")
    if others := sorted(files.names - set(names.values())):
        raise ModelError(
            f"{directory} has tensors that no adapter of this model is, as {listed(others, SHOWN)}; use adapters of "
            "linear layers of the same model"
        )


def trains_tower(model: ModelConfig, hf: PreTrainedConfig) -> bool:
    """Whether a role that is trained trains what reads pictures too."""
    return bool(model.pictures) and model.tower == "trained" and reads_pictures(hf)


def saved_shapes(
    model: PreTrainedConfig, *, value_head: bool, lora: LoraConfig | None, tower: bool = False
) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor that a role's checkpoint holds, by name: with adapters no other weights that could be
    trained, and a `tower` only if it is trained."""
    held = meta_model(model, value_head=value_head, lora=lora)
    shapes = {**shapes_of(held), **(shapes_of_tower(model) if tower else {})}
    if lora is None:
        return shapes
    kept = names_of_buffers(held)
    return {
        name: shape for name, shape in shapes.items() if is_adapter(name) or name == VALUE_HEAD_WEIGHT or name in kept
    }


def names_of_buffers(held: PreTrainedModel) -> set[str]:
    """Those of a model's stored buffers in its files."""
    return {box.name for name in stored_buffers(held) for box in hf_boxes(held)[name]}


def require_same_tensors(directory: Path, role: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError if a role's part of a checkpoint is not there, lacks any tensor of its `saved_shapes`, has
    one in another shape, or holds adapters of a role that trains all weights, or the other way round."""
    if not directory.is_dir():
        raise unusable(
            directory.parent,
            f"{directory.parent} has no {role}, but this run does; resume with the [algorithm] and [roles] it was "
            "trained with, or start a new run from its export",
        )
    held = CheckpointSource(directory, *WEIGHTS).shapes
    adapters = any(is_adapter(name) for name in held)
    if adapters != any(is_adapter(name) for name in shapes):
        what, wanted = ("adapters", "all weights") if adapters else ("all weights", "adapters")
        raise CheckpointError(
            f"{directory} holds {what}, this run's {role} trains {wanted}; resume with the [lora] it was trained with, "
            "or start a new run from its export"
        )
    for name, shape in shapes.items():
        found = held.get(name)
        if found != shape:
            what = "lacks" if found is None else f"has {list(found)} for"
            table = "[lora]" if is_adapter(name) else "[model]"
            raise CheckpointError(
                f"{directory} {what} {name!r}, this run's {role} needs {list(shape)}; resume with the {table} it was "
                "trained with, or start a new run in another run.dir"
            )


def require_weights(directory: str, model: PreTrainedModel, config: PreTrainedConfig, *, needs: str = OWN) -> None:
    """Raise ModelError if a model directory's files are damaged, or do not hold the model of `config`."""
    files, shapes = model_files(directory, config), shapes_of(model)
    if VALUE_HEAD_WEIGHT in shapes and files.shape(VALUE_HEAD_WEIGHT) is None:
        del shapes[VALUE_HEAD_WEIGHT]  # it then comes from the run's seed
    require_tensors(files, shapes, needs=needs, cure="use the original model, not a quantized one")


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


def against_sharing(model: RoleModel) -> Iterator[str]:
    """What contradicts `train.share_prefixes`."""
    if not model.train.share_prefixes:
        return
    if model.layout.name == "whole":
        why = f"the {model.role}'s model passes padded rows" + (f": {model.layout.why}" if model.layout.why else "")
    elif carries_state(parts_of(model.built).decoder):
        why = f"layers of the {model.role}'s model carry a state along a row, which branches cannot share"
    else:
        return
    yield f"{model.train_table}.share_prefixes: true, but {why}; set it to false"


def against_replay(config: Config, hf: PreTrainedConfig) -> Iterator[str]:
    """What contradicts `algorithm.routing_replay`."""
    replay = config.algorithm.routing_replay
    if replay != "none" and experts_of(hf.to_dict()) <= 1:
        yield f"algorithm.routing_replay: {replay!r}, but the model has no experts; set it to 'none'"
