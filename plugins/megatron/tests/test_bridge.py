"""Models of Megatron-Bridge, which a stand-in plays: the boxes, log-probs and steps of the table's, and refusals."""

from __future__ import annotations

import sys
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from attrs import evolve
from megatron.core.tensor_parallel import ColumnParallelLinear
from torch import Tensor, nn

from corerl.types import Output
from corerl_megatron.families import BRIDGE_INSTALL
from corerl_testing import (
    TRAIN,
    Ranks,
    Runs,
    Setup,
    different,
    error_of,
    grad_norm_of,
    in_order,
    loss_of,
    make_samples,
    start,
    tiny_fields,
    whole,
)
from plugins.megatron.tests import ranks
from plugins.megatron.tests.bridge import EXPERT, HF, LAYER, MAPPINGS, Whole, provider_of
from plugins.megatron.tests.test_families import SP2

FIELDS = tiny_fields("glm4-moe")  # a dense layer, and one of experts with a shared one and a bias in a buffer
STEPS = 2


@pytest.mark.parametrize(
    ("world_size", "options", "fields"),
    [
        (1, {}, {}),
        (2, SP2, {}),
        (2, {**SP2, "expert_parallel": 2, "expert_tensor_parallel": 1}, {}),
        (2, {"pipeline_parallel": 2}, {"tie_word_embeddings": True}),
    ],
    ids=["one rank", "tp2", "tp2 ep2", "pp2, tied"],
)
def test_a_model_of_the_bridge_equals_the_tables(
    runs: Runs, world_size: int, options: dict[str, Any], fields: dict[str, Any]
) -> None:
    samples = make_samples(7)
    setup = Setup(backend="megatron", model="", fields={**FIELDS, **fields}, options=options)
    on = runs.rank_sets[world_size]
    found, wanted = (on.run(build, setup, samples, STEPS) for build in (ranks.built_by_bridge, ranks.built))
    assert [each.boxes for each in found] == [each.boxes for each in wanted]
    for output in (Output.LOGPROBS, Output.ENTROPY):
        of_both = [in_order([each.outputs for each in side], samples, output) for side in (found, wanted)]
        np.testing.assert_array_equal(*of_both)
    for step in range(STEPS):
        of_found, of_wanted = ([each.results[step] for each in side] for side in (found, wanted))
        assert (loss_of(of_found), grad_norm_of(of_found)) == (loss_of(of_wanted), grad_norm_of(of_wanted))
    states = [whole([each.state for each in side]) for side in (found, wanted)]
    assert different(*states, keys=states[1]) == []


def refused(one: Ranks, fields: dict[str, Any] | None = None, **played: Any) -> str:
    setup = Setup(backend="megatron", model="", fields=fields or FIELDS)
    return one.run(partial(ranks.start_by_bridge, **played), setup)[0]


class Doubled(Whole):
    def hf_to_megatron(self, weights: Any, module: nn.Module) -> Tensor:
        doubled: Tensor = weights * 2
        return doubled


class Less(Whole):
    def hf_to_megatron(self, weights: Any, module: nn.Module) -> Tensor:
        less: Tensor = weights - 1
        return less


class Broken(Whole):
    def hf_to_megatron(self, weights: Any, module: nn.Module) -> Tensor:
        raise KeyError("q_lora_rank")


class Capped(ColumnParallelLinear):  # type: ignore[misc]
    """Stands for a head that does more than multiply."""


ROUTER = f"{LAYER}.mlp.router.weight"


@pytest.mark.parametrize(
    ("played", "message"),
    [
        ({"provider": lambda config: SimpleNamespace(share_embeddings_and_output_weights=False)}, "a SimpleNamespace,"),
        ({"provider": partial(provider_of, head=Capped)}, "Megatron-Bridge computes logits by a Capped, wanted one"),
        ({"provider": partial(provider_of, num_layers=1, moe_layer_freq=[1])}, "which a model of this config lacks"),
        ({"provider": partial(provider_of, num_layers=1, moe_layer_freq=[0])}, "has no parameter for Hugging Face"),
        ({"mappings": {**MAPPINGS, f"{EXPERT}.linear_fc2.weight": None}}, "maps no Hugging Face tensor"),
        ({"mappings": {**MAPPINGS, ROUTER: Doubled(f"{HF}.mlp.gate.weight")}}, "as boxes: it computes new values"),
        ({"mappings": {**MAPPINGS, ROUTER: Less(f"{HF}.mlp.gate.weight")}}, "gate.weight subtracts 1 from its values"),
        ({"mappings": {**MAPPINGS, ROUTER: Broken(f"{HF}.mlp.gate.weight")}}, "read (KeyError: 'q_lora_rank')"),
    ],
)
def test_what_is_no_box_is_refused_with_its_tensor(runs: Runs, played: dict[str, Any], message: str) -> None:
    assert message in refused(runs.rank_sets[1], **played)


def test_families_and_losses_that_it_lacks_are_refused(runs: Runs) -> None:
    one = runs.rank_sets[1]
    assert refused(one, tiny_fields("llama")) == (
        "ModelError: Megatron-Bridge cannot build a llama model (ValueError: No bridge for ['LlamaForCausalLM']); use "
        "another backend"
    )
    setup = Setup(backend="megatron", model="", fields=FIELDS, train=evolve(TRAIN, aux_loss_coef=0.1))
    assert one.run(ranks.start_by_bridge, setup)[0] == (
        "ModelError: train.aux_loss_coef=0.1, but the routers of a glm4_moe model have no softmax, of "
        "whose probabilities this loss is; set it to 0"
    )


def test_a_missing_bridge_is_told_with_what_to_install(runs: Runs) -> None:
    setup = Setup(backend="megatron", model="", fields=FIELDS, options={"bridge": True})
    with mock.patch.dict(sys.modules, {"megatron.bridge": None}):
        found = runs.rank_sets[1].run(lambda: error_of(lambda: start(setup)))
    assert found == [
        (
            "PluginError: backends.megatron.bridge=true, but megatron-bridge cannot be imported "
            "(ModuleNotFoundError: import of megatron.bridge halted; None in sys.modules); "
            f"{BRIDGE_INSTALL}"
        )
    ]
