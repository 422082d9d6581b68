"""The plain backend, but for one detail that its passes leave out while the weights that it sends are whole; named in a
config as 'tests.driver.forgetful:SPEC'."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import evolve, field, frozen
from torch import nn
from transformers import PreTrainedModel

from corerl.config.options import option
from corerl.config.schema import RoleConfig
from corerl.models.build import stored_buffers
from corerl.plugin.hooks import Context
from corerl.types import ParallelLayout
from corerl_testing import smallest_config
from corerl_testing.models import drawn_model
from corerl_testing.plain.backend import PlainBackend
from corerl_testing.plain.spec import SPEC as PLAIN

NAME = "tests.driver.forgetful:SPEC"
BIAS = "e_score_correction_bias"


def window(model: PreTrainedModel) -> None:
    """A token sees all before it."""
    model.config.sliding_window = 128


def sinks(model: PreTrainedModel) -> None:
    """Attention adds up to 1: transformers' sdpa takes no sinks, and does not say so."""
    model.config._attn_implementation = "sdpa"


def softcap(model: PreTrainedModel) -> None:
    """Logits are not capped."""
    model.config.final_logit_softcapping = None


def router_bias(model: PreTrainedModel) -> None:
    """Routers choose by their scores alone, as if the biases were still zeros."""
    for module in model.modules():
        if BIAS in module._buffers:
            zeros = torch.zeros_like(module._buffers[BIAS])  # type: ignore[arg-type]
            swapped: dict[str, Any] = {}

            def left_out(module: nn.Module, *_: Any, zeros: Any = zeros, swapped: Any = swapped) -> None:
                swapped["bias"], module._buffers[BIAS] = module._buffers[BIAS], zeros

            def put_back(module: nn.Module, *_: Any, swapped: Any = swapped) -> None:
                module._buffers[BIAS] = swapped["bias"]

            module.register_forward_pre_hook(left_out)
            module.register_forward_hook(put_back)


@frozen(kw_only=True)
class Forgotten:
    """One detail, and a model that has it, with weights so large that it matters as much as in a trained one."""

    leave_out: Callable[[PreTrainedModel], None]
    model_type: str
    fields: Mapping[str, Any] = field(factory=dict)


LEFT_OUT = {
    "window": Forgotten(leave_out=window, model_type="mistral"),
    "sinks": Forgotten(leave_out=sinks, model_type="gpt_oss"),
    # At the default of 30 a model that small is as certain of its tokens as without a cap.
    "softcap": Forgotten(leave_out=softcap, model_type="gemma2", fields={"final_logit_softcapping": 3.0}),
    "router_bias": Forgotten(leave_out=router_bias, model_type="glm4_moe", fields={"num_experts_per_tok": 1}),
}


def model_with(what: str) -> PreTrainedModel:
    """A small model that has this detail."""
    chosen = LEFT_OUT[what]
    model = drawn_model(smallest_config(chosen.model_type, initializer_range=0.3, **chosen.fields))
    with torch.no_grad():
        for bias in stored_buffers(model).values():
            bias.copy_(torch.linspace(-1, 1, len(bias)))
    return model


def forgetting(leaves_out: str, model: Path) -> list[str]:
    """Overrides of a small run of the model in this directory, whose trainer leaves that out; empty: nothing."""
    return [
        f"backend.name={NAME}",
        f'backends."{NAME}".leaves_out={leaves_out}',
        f"model.path={model}",
        "model.config={}",
        "train.layout=whole",
        "rollout.context_length=64",
        "checkpoint.export=false",
    ]


@frozen(kw_only=True)
class ForgetfulConfig:
    leaves_out: str = option("what is missing; empty: nothing", default="")


class ForgetfulBackend(PlainBackend):
    def build(self, config: RoleConfig, context: Context) -> ParallelLayout:
        layout = super().build(config, context)
        if config.options.leaves_out:
            LEFT_OUT[config.options.leaves_out].leave_out(self.model)
        return layout


SPEC = evolve(PLAIN, implementation="tests.driver.forgetful:ForgetfulBackend", config=ForgetfulConfig)
