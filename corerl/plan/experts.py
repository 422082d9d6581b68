"""What a model's config and its experts ask for that training does otherwise, or not at all: said before a run, or
refused."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedConfig

from corerl.config.schema import Config
from corerl.models.experts import experts_of
from corerl.plan.resolve import has_value_head, is_frozen
from corerl.plugin.spec import ACTOR

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Coefficients of terms that transformers adds to its loss, if the code of the model's class reads them.
AUX_LOSS = ("router_aux_loss_coef", "aux_loss_coef")  # and if output_router_logits is set
Z_LOSS = ("router_z_loss_coef", "z_loss_coefficient")
# Fields that count layers of a checkpoint which predict tokens after the next one, and which transformers never builds.
FURTHER = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
OTHER_HEADS = ("classifier_dropout", "summary_first_dropout")  # which no language model reads


def against_aux_loss(config: Config, built: Mapping[str, PreTrainedModel]) -> Iterator[str]:
    """What contradicts `train.aux_loss_coef`, with the roles' models on meta."""
    from corerl.models.routing import routers  # slow to import: takes seconds

    for role, model in built.items():
        coef, table = config.train_of(role).aux_loss_coef, config.train_table_of(role)
        if not coef or is_frozen(config, role) or not config.run.trains:
            continue
        name = type(model).__name__
        if not experts_of(model.config.get_text_config().to_dict()):
            yield f"{table}.aux_loss_coef: {coef:g}, but the {role}'s model has no experts; set it to 0"
        elif "load_balancing_loss_func" not in inspect.getsource(type(model)):
            yield f"{table}.aux_loss_coef: {coef:g}, but transformers has no such loss for {name}; set it to 0"
        elif not routers(model):
            yield f"{table}.aux_loss_coef: {coef:g}, but it is not known which modules of {name} route; set it to 0"
        elif role == ACTOR and config.rollout.source == "streamed":
            yield (
                f"{table}.aux_loss_coef: {coef:g}, but that loss weighs tokens by how many a step has, which is not "
                "known when rollout.source='streamed' begins with it; set it to 0, or rollout.source to 'synchronous'"
            )


def unread_fields(config: Config, models: Mapping[str, PreTrainedConfig]) -> list[str]:
    """A line for the fields of each trained model's config that change what transformers trains, and not a run."""
    from corerl.models.build import architecture_of  # slow to import: takes seconds

    lines: list[str] = []
    for role, hf in models.items():
        if is_frozen(config, role) or has_value_head(config, role) or not config.run.trains:
            continue
        fields = {**hf.to_dict(), **hf.get_text_config().to_dict()}
        read = inspect.getsource(architecture_of(hf))
        table, train = config.model_table_of(role), config.train_table_of(role)
        where = f"{table}.path: config.json" if config.model_of(role).path else f"{table}.config"
        if not config.train_of(role).aux_loss_coef and fields.get("output_router_logits"):
            for name, coef in _set(fields, AUX_LOSS, read).items():
                term = f"{name}={coef:g} with output_router_logits"
                lines.append(
                    f"{where}: {term} changes transformers' loss, not CoreRL's; set {train}.aux_loss_coef={coef:g} to "
                    "balance the load of experts here too"
                )
        for name, coef in _set(fields, Z_LOSS, read).items():
            lines.append(f"{where}: {name}={coef:g} changes transformers' loss, not CoreRL's, which has no such term")
        if noise := _noise(hf):
            lines.append(f"{where}: {noise}: training here is without this noise, so that log-probs are the engine's")
        if config.model_of(role).path and (further := next((each for each in FURTHER if fields.get(each)), "")):
            lines.append(
                f"{where}: {further}={fields[further]}: layers that predict further tokens are neither trained nor "
                "exported"
            )
    return list(dict.fromkeys(lines))


def without_adapters(config: Config, models: Mapping[str, PreTrainedConfig]) -> list[str]:
    """A line for each role with adapters whose model has experts in fused tensors, which have none."""
    lines: list[str] = []
    for role, hf in models.items():
        if (lora := config.lora_of(role)) is None or not config.run.trains:
            continue
        from corerl.plan.model_files import with_adapters  # slow to import: takes seconds

        adapted = with_adapters(hf, lora, value_head=has_value_head(config, role))
        from corerl.models.lora import LoraLinear, adapter_parameters

        own = adapter_parameters(adapted)
        sizes = {name: param for name, param in adapted.named_parameters() if name not in own}
        fused = [name for name, param in sizes.items() if param.dim() == 3]
        if not fused:
            continue
        covered = sum(module.weight.numel() for module in adapted.modules() if isinstance(module, LoraLinear))
        share = covered / sum(math.prod(param.shape) for param in sizes.values())
        kinds = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in fused))
        lines.append(
            f"{config.lora_table_of(role)}: adapters cover {100 * share:.2g} % of the weights: {len(fused)} fused "
            f"tensors of experts ({kinds}) get none"
        )
    return list(dict.fromkeys(lines))


def _set(fields: Mapping[str, Any], names: tuple[str, ...], read: str) -> dict[str, float]:
    """The coefficients that are set, of those that the source `read` names."""
    found = {name: fields.get(name) for name in names if f".{name}" in read}
    return {name: value for name, value in found.items() if isinstance(value, int | float) and value}


def _noise(hf: PreTrainedConfig) -> str:
    """The fields that add noise to transformers' training, as "attention_dropout=0.1", but for a model type's own
    defaults, which those who train it seldom know of."""
    from corerl.models.build import NOISE

    text = hf.get_text_config()
    usual, fields = type(text)().to_dict(), text.to_dict()
    given = {name: value for name, value in fields.items() if any(word in name for word in NOISE)}
    return ", ".join(
        f"{name}={value:g}"
        for name, value in given.items()
        if isinstance(value, int | float) and value and value != usual.get(name) and name not in OTHER_HEADS
    )
