"""Low-rank adapters: every layout and family trains those of a transformers model, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from attrs import evolve, frozen

from corerl.config import ClusterInfo, LoraConfig, ModelConfig
from corerl.models import hf_config, meta_model, targets_in
from corerl.types import FloatArray, Output
from corerl.weights import adapters_of, is_adapter
from corerl_megatron.config import MegatronConfig
from corerl_megatron.families import FAMILIES, architecture, linear_layers
from corerl_megatron.spec import check
from corerl_testing import (
    DEEP,
    WEIGHTS_L2,
    RankFailed,
    Runs,
    Setup,
    Subject,
    Tensors,
    Trajectory,
    assert_follows,
    assert_outputs,
    assert_same_metrics,
    different,
    held_as_predicted,
    in_order,
    samples_at,
    tiny_config,
    together,
    weights_apart,
    whole,
)
from corerl_testing.scenarios import updates
from plugins.megatron.tests import ranks
from plugins.megatron.tests.test_families import CP2, EP2, PP2, SP2, TP2, drawn

STEPS = 3  # in the first, one of a pair of adapters has no gradient
OF_ONE = 3e-4  # L2 relative, of one tensor: gradients of several steps may nearly cancel in its first moment
ADAPTERS = LoraConfig(rank=4, alpha=8.0).settled({})
WHOLE = {"distributed_optimizer": False}
ETP1 = {**SP2, "expert_tensor_parallel": 1}
LAYOUTS: Mapping[str, tuple[int, Mapping[str, Any]]] = {  # ranks and options
    "one": (1, {}),
    "tp2, whole": (2, {**TP2, **WHOLE}),
    "tp2 sp": (2, SP2),
    "pp2": (2, PP2),
    "pp2 vpp2": (2, {**PP2, "virtual_pipeline": 2}),
    "cp2": (2, CP2),
    "ep2": (2, EP2),
    "tp2 sp etp1": (2, ETP1),
}
CASES = [  # beside the spec's variants, with which the conformance suite trains adapters
    *(("qwen3", layout) for layout in ("tp2 sp", "pp2 vpp2")),
    *((kind, "tp2 sp") for kind in ("qwen2", "qwen3-tied")),
    *(("qwen3-moe", layout) for layout in ("ep2", "tp2 sp etp1", "pp2")),
    ("glm4-moe", "tp2 sp"),  # a dense layer, and shared experts
]

Trained: TypeAlias = tuple[Trajectory, FloatArray]  # and what the model gives for a batch after the steps


@pytest.fixture(scope="module")
def of_plain(runs: Runs) -> Callable[[Setup], Trained]:
    """What the plain backend trains of a setup, once for all layouts."""
    known: dict[str, Trained] = {}

    def found(setup: Setup) -> Trained:
        plain = evolve(setup, backend="plain", options={})
        if repr(plain) not in known:
            known[repr(plain)] = trained(runs, 1, plain)
        return known[repr(plain)]

    return found


def trained(runs: Runs, world_size: int, setup: Setup) -> Trained:
    samples = samples_at(STEPS)
    reports = runs.rank_sets[world_size].run(ranks.steps_then_outputs, setup, STEPS, samples)
    output = Output.VALUES if setup.value_head else Output.LOGPROBS
    outputs = in_order([each.outputs for each in reports], samples, output)
    return together([each.trained for each in reports]), outputs


def set_up(runs: Runs, kind: str, options: Mapping[str, Any], **others: Any) -> Setup:
    """Stages in turns want two layers each."""
    kind = f"{kind}{DEEP}" if "virtual_pipeline" in options else kind
    return evolve(runs.setup("megatron", kind), options=options, **{"lora": ADAPTERS, **others})


def assert_trains_as(found: Trained, wanted: Trained, setup: Setup) -> None:
    (mine, outputs), (others, wanted_outputs) = found, wanted
    for key in ("param", "master", "exp_avg", "exp_avg_sq"):
        assert mine.state[key].keys() == others.state[key].keys()
    trains = {name for name in others.state["param"] if is_adapter(name) or name == "value_head.weight"}
    assert mine.state["master"].keys() == trains
    assert_follows(mine, others)
    assert_same_metrics(mine, others)
    for key in ("master", "exp_avg", "exp_avg_sq"):
        assert weights_apart(mine.state[key], others.state[key]) < WEIGHTS_L2
        assert apart(mine.state[key], others.state[key]) == []
    output = Output.VALUES if setup.value_head else Output.LOGPROBS
    assert_outputs(outputs, wanted_outputs, samples_at(STEPS), output)
    # No other weight moves by a bit, and each that is trained does.
    assert {each.removeprefix("param of ") for each in different(mine.state, mine.at_start, ["param"])} == trains


def apart(found: Tensors, wanted: Tensors) -> list[str]:
    def near(name: str) -> bool:
        return bool(np.linalg.norm(found[name] - wanted[name]) <= OF_ONE * np.linalg.norm(wanted[name]))

    return [name for name in wanted if not near(name)]


@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_adapters_train_as_the_plain_backends_do(
    runs: Runs, of_plain: Callable[[Setup], Trained], kind: str, layout: str
) -> None:
    world_size, options = LAYOUTS[layout]
    setup = set_up(runs, kind, options)
    assert_trains_as(trained(runs, world_size, setup), of_plain(setup), setup)


@pytest.mark.parametrize("layout", ["tp2 sp", "pp2"])
def test_a_critic_trains_its_adapters_and_its_head(
    runs: Runs, of_plain: Callable[[Setup], Trained], layout: str
) -> None:
    world_size, options = LAYOUTS[layout]
    setup = set_up(runs, "qwen3", options, value_head=True)
    assert_trains_as(trained(runs, world_size, setup), of_plain(setup), setup)


@pytest.mark.parametrize(
    ("targets", "options"),
    [
        (("all-linear",), SP2),
        (("down_proj",), {"recompute": "mlp"}),  # nothing before what is recomputed is trained
        (("down_proj",), {"recompute": "full"}),
    ],
)
def test_layers_that_are_recomputed_give_adapters_the_same_gradients(
    runs: Runs, of_plain: Callable[[Setup], Trained], targets: tuple[str, ...], options: Mapping[str, Any]
) -> None:
    setup = set_up(runs, "qwen3", options, lora=evolve(ADAPTERS, targets=targets))
    recomputed = evolve(setup, train=evolve(setup.train, recompute="full"))
    world_size = options.get("tensor_parallel", 1)
    assert_trains_as(trained(runs, world_size, recomputed), of_plain(setup), setup)


@pytest.mark.parametrize(("kind", "layout"), [("qwen3", "tp2 sp"), ("qwen2", "one"), ("glm4-moe", "one")])
def test_beside_adapters_transformer_engines_norms_are_modules_of_their_own(
    runs: Runs, of_plain: Callable[[Setup], Trained], kind: str, layout: str
) -> None:
    world_size, options = LAYOUTS[layout]
    setup, samples = set_up(runs, kind, options), samples_at(STEPS)
    reports, classes = zip(
        *runs.rank_sets[world_size].run(ranks.steps_with_engine_specified, setup, STEPS, samples), strict=True
    )
    assert classes[0] == {"TENorm", "TEColumnParallelLinear", "TERowParallelLinear", "TEDotProductAttention"}
    outputs = in_order([each.outputs for each in reports], samples, Output.LOGPROBS)
    assert_trains_as((together([each.trained for each in reports]), outputs), of_plain(setup), setup)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_linear_layer_of_a_family_can_have_an_adapter(runs: Runs, tmp_path: Path, model_type: str) -> None:
    directory = str(drawn(model_type, tmp_path))
    config = hf_config(ModelConfig(path=directory))
    targets = targets_in(meta_model(config), ADAPTERS)
    assert sorted(linear_layers(architecture(config.to_dict(), value_head=False))) == sorted(targets)
    (state,) = runs.rank_sets[1].run(ranks.at_start, Setup(backend="megatron", model=directory, lora=ADAPTERS))
    found = {box.name: box.shape for box in state["master"]}
    wanted = {}
    for layer, module in targets.items():
        a, b = adapters_of(f"{layer}.weight")
        wanted |= {a: (4, module.in_features), b: (module.out_features, 4)}
    assert found == wanted


@frozen(kw_only=True)
class WithAdapters(Subject):
    """The contract's checks of a role with adapters."""

    def of(self, setup: Setup) -> Setup:
        return evolve(super().of(setup), lora=ADAPTERS)


@pytest.mark.parametrize("layout", ["tp2 sp", "pp2"])
def test_engines_get_weights_with_the_adapters_product_added(runs: Runs, layout: str) -> None:
    setup = set_up(runs, "qwen3-tied", LAYOUTS[layout][1])
    reports = runs.rank_sets[2].run(updates.push_weights, setup, False)
    received = {name: values for each in reports for name, values in each.tensors.items()}
    weights = whole([each.state for each in reports])["param"]
    assert received.keys() == {name for name in weights if not is_adapter(name)}
    for name, values in received.items():
        a, b = (weights.get(each) for each in adapters_of(name))
        if a is None or b is None:
            assert values.tobytes() == weights[name].tobytes()
        else:
            product = 2.0 * b.astype(np.float64) @ a  # alpha / rank
            assert np.abs(product).max() > 1e-5
            np.testing.assert_allclose(values, weights[name] + product, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("layout", ["tp2, whole", "pp2", "cp2"])
def test_ranks_hold_beside_adapters_what_the_spec_predicts(runs: Runs, tmp_path: Path, layout: str) -> None:
    world_size, options = LAYOUTS[layout]
    subject = WithAdapters(backend="megatron", world_size=world_size, runs=runs, directory=tmp_path, options=options)
    for targets in (("all-linear",), ("k_proj", "down_proj")):
        setup = set_up(runs, "qwen3", options, lora=evolve(ADAPTERS, targets=targets))
        held_as_predicted(subject, evolve(setup, train=evolve(setup.train, precision="bfloat16")))


REFUSED = {
    "bridge": ({"bridge": True}, "bridge", "true, but low-rank adapters ([lora]) are only put beside the layers of"),
    "fp8": ({"fp8": "e4m3"}, "fp8", "'e4m3', but low-rank adapters ([lora]) have not been tried beside products in 8"),
    "native": ({"native_checkpoint": True}, "native_checkpoint", "true, but megatron-core's own checkpoint has no "),
}


@pytest.mark.parametrize(("options", "name", "text"), REFUSED.values(), ids=REFUSED)
def test_what_adapters_exclude_is_refused_before_the_start(options: dict[str, Any], name: str, text: str) -> None:
    def told(lora: LoraConfig | None) -> list[str]:
        cluster = ClusterInfo(device="cuda", ranks=1, model=tiny_config("qwen3").to_dict(), lora=lora)
        return [f"{problem.path}: {problem.text}" for problem in check(MegatronConfig(**options), cluster)]

    (added,) = set(told(ADAPTERS)) - set(told(None))
    assert added.startswith(f"{name}: {text}")


@pytest.mark.parametrize("target", ["model.layers.0.mlp.gate", "model.layers.1.mlp.experts.3.up_proj"])
def test_a_target_that_is_no_layer_is_refused(runs: Runs, target: str) -> None:
    with pytest.raises(RankFailed, match="Unsupported") as raised:
        runs.rank_sets[2].run(ranks.start_with_targets, set_up(runs, "qwen3-moe", PP2), [f"{target}.weight"])
    assert f"this backend cannot give {target}.weight adapters: they are no layers by themselves" in str(raised.value)
