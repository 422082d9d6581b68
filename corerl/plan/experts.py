"""What a model's config and its experts ask for that training does otherwise, or not at all: said before a run, or
refused."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from transformers import PreTrainedConfig

from corerl.config.schema import Config
from corerl.models.experts import experts_of
from corerl.plan.resolve import has_value_head, is_frozen
from corerl.plugin.spec import ACTOR

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Coefficients of terms of transformers' loss, if the code of the model's class reads them -> whether CoreRL has it too,
# which transformers adds only with output_router_logits.
TERMS = dict.fromkeys(("router_aux_loss_coef", "aux_loss_coef", "moe_loss_weight"), True)
TERMS |= dict.fromkeys(("router_z_loss_coef", "z_loss_coefficient"), False)
# Fields that count layers of a checkpoint which predict tokens after the next one, and which transformers never builds.
FURTHER = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
OTHER_HEADS = {"classifier_dropout", "summary_first_dropout"}  # which no language model reads


def against_aux_loss(config: Config, built: Mapping[str, PreTrainedModel]) -> Iterator[str]:
    """What contradicts `train.aux_loss_coef`, with the roles' models on meta."""
    from corerl.models.routing import routers  # slow to import: takes seconds

    for role, model in built.items():
        coef, name, cure = config.train_of(role).aux_loss_coef, type(model).__name__, "set it to 0"
        if not coef or is_frozen(config, role) or not config.run.trains:
            continue
        if not experts_of(model.config.get_text_config().to_dict()):
            why = f"the {role}'s model has no experts"
        elif "load_balancing_loss_func" not in inspect.getsource(type(model)):
            why = f"transformers has no such loss for {name}"
        elif not routers(model):
            why = f"it is not known which modules of {name} route"
        elif role == ACTOR and config.rollout.source == "streamed":
            why = "that loss weighs tokens by how many the step has, unknown as rollout.source='streamed' begins"
            cure = "set it to 0, or rollout.source to 'synchronous'"
        else:
            continue
        yield f"{config.train_table_of(role)}.aux_loss_coef: {coef:g}, but {why}; {cure}"


def unread_fields(config: Config, models: Mapping[str, PreTrainedConfig]) -> list[str]:
    """A line for each field of a trained model's config that changes what transformers trains, and not a run."""
    from corerl.models.build import NOISE, architecture_of  # slow to import: takes seconds
    from corerl.models.config import reads_pictures

    found: dict[str, None] = {}  # once, also if roles share a model
    for role, hf in models.items():
        if is_frozen(config, role) or has_value_head(config, role) or not config.run.trains:
            continue
        lines: list[str] = []
        text, own = hf.get_text_config().to_dict(), config.model_of(role)
        fields = {**hf.to_dict(), **text, **(text.get("ffn_config") or {})}  # the last is DBRX's
        numbers = {name: value for name, value in fields.items() if isinstance(value, int | float) and value}
        read, coef = inspect.getsource(architecture_of(hf)), f"{config.train_table_of(role)}.aux_loss_coef"
        for name in (name for name in TERMS if name in numbers and f".{name}" in read):
            said = ", which has no such term"
            if TERMS[name]:
                if config.train_of(role).aux_loss_coef or not fields.get("output_router_logits"):
                    continue
                said = f"; set {coef}={numbers[name]:g} to have it"
            lines.append(f"{name}={numbers[name]:g} changes transformers' loss, not CoreRL's{said}")
        # Of the text decoder: nothing else runs.
        noise = {name for name in numbers if name in text and any(word in name for word in NOISE)} - OTHER_HEADS
        # Those who train a type with noise by default seldom know of it.
        usual = type(hf.get_text_config())().to_dict() if noise else {}
        if given := [f"{name}={numbers[name]:g}" for name in sorted(noise) if numbers[name] != usual.get(name)]:
            lines.append(f"{', '.join(given)}: trained without this noise here, so that log-probs are the engine's")
        if own.path and not reads_pictures(hf):  # else an export has them as they are: see `untrained`
            further = "layers that predict further tokens are neither trained nor exported"
            lines += [f"{name}={numbers[name]}: {further}" for name in FURTHER if name in numbers]
        where = config.model_table_of(role) + (".path: config.json: " if own.path else ".config: ")
        found |= dict.fromkeys(where + line for line in lines)
    return list(found)


def without_adapters(config: Config, models: Mapping[str, PreTrainedConfig]) -> list[str]:
    """A line for each role with adapters whose model has experts in fused tensors, which have none."""
    lines: list[str] = []
    for role, hf in models.items():
        lora, experts = config.lora_of(role), experts_of(hf.get_text_config().to_dict())
        if lora is None or not experts or not config.run.trains:
            continue
        from corerl.models.lora import LoraLinear, adapter_parameters  # slow to import: takes seconds
        from corerl.plan.model_files import with_adapters

        adapted = with_adapters(hf, lora, value_head=has_value_head(config, role))
        new = adapter_parameters(adapted)
        sizes = {name: param.shape for name, param in adapted.named_parameters() if name not in new}
        if fused := [name for name, shape in sizes.items() if len(shape) == 3 and shape[0] == experts]:
            covered = sum(module.weight.numel() for module in adapted.modules() if isinstance(module, LoraLinear))
            share = 100 * covered / sum(map(math.prod, sizes.values()))
            kinds = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in fused))
            lines.append(
                f"{config.lora_table_of(role)}: adapters cover {share:.2g} % of the weights: {len(fused)} fused "
                f"tensors of experts ({kinds}) get none"
            )
    return lines
