"""Which linear layers get adapters, what they compute, and what is trained then."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve, frozen
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from corerl.backend import StateKey
from corerl.config.schema import LoraConfig, ModelConfig
from corerl.driver.export import write_adapters
from corerl.errors import ModelError
from corerl.models import names
from corerl.models.build import build_on_meta, materialize, stored_buffers
from corerl.models.files import initial_source, meta_model
from corerl.models.lora import (
    PEFT_CONFIG,
    PEFT_WEIGHTS,
    PeftFiles,
    peft_config,
    put_adapters,
    saved_settings,
    targets_in,
)
from corerl.models.names import hf_boxes, named_views, shapes_of
from corerl.plan.models import require_adapters
from corerl.types import LossSpec, Output
from corerl.weights.adapters import PREFIX, A, adapted, adapters_of, is_adapter
from corerl_testing import smallest_config
from corerl_testing.harness import Setup, forward, packed_for_training, running, samples_at
from corerl_testing.models import drawn_model, tiny_config
from corerl_testing.tolerances import LOGPROBS
from tests.with_peft import needs_peft, run_with_peft

LORA = LoraConfig(rank=3, alpha=7.0).settled({})
LINEAR = ("all-linear",)


def of(*targets: str) -> LoraConfig:
    return evolve(LORA, targets=targets)


@pytest.mark.parametrize(
    ("kind", "target", "told"),
    [
        ("qwen3", "q_porj", "Qwen3ForCausalLM has no module 'q_porj', did you mean 'q_proj'? linear layers that can"),
        ("qwen3-moe", "mlp", "'model.layers.0.mlp' is of class Qwen3MoeSparseMoeBlock, wanted a linear layer, or exp"),
        (
            "qwen3",
            "embed_tokens",
            "'model.embed_tokens' is of class Embedding, wanted a linear layer, or experts whose",
        ),
        ("qwen3", "lm_head", "'lm_head' is the head, whose matrix is read in chunks; leave it out of the targets"),
    ],
)
def test_a_target_that_cannot_have_an_adapter_is_told(kind: str, target: str, told: str) -> None:
    with pytest.raises(ModelError) as caught:
        targets_in(meta_model(tiny_config(kind)), of("q_proj", target))
    assert caught.value.message.startswith(told)


def test_a_model_without_linear_layers_to_adapt_is_refused() -> None:
    config = smallest_config("gpt2")  # whose layers are Conv1D
    with pytest.raises(ModelError) as caught:
        meta_model(config, lora=LORA)
    assert caught.value.message == (
        "GPT2LMHeadModel has no linear layers that could have adapters; train all its weights"
    )


def with_adapters(kind: str, lora: LoraConfig) -> PreTrainedModel:
    """The drawn model of a kind, with adapters of random numbers."""
    drawn = drawn_model(tiny_config(kind))
    model = build_on_meta(tiny_config(kind), dtype=torch.float32, attention="eager")
    put_adapters(model, lora, dtype=torch.float32)
    torch.manual_seed(4)
    known = dict(drawn.named_parameters())
    materialize(
        model,
        {
            name: nn.Parameter(known[name].detach().clone() if name in known else 0.1 * torch.randn(param.shape))
            for name, param in model.named_parameters()
        },
    )
    for name, buffer in stored_buffers(model).items():
        buffer.copy_(stored_buffers(drawn)[name])
    return model.eval()


@pytest.mark.parametrize(
    ("kind", "targets"),
    [
        ("qwen3-tied", LINEAR),
        ("qwen2", LINEAR),  # has biases
        ("qwen3-moe", (*LINEAR, "experts")),
        ("glm4-moe", ("mlp.experts",)),
    ],
)
def test_output_and_gradients_are_those_of_the_sum(kind: str, targets: tuple[str, ...]) -> None:
    """Of W + scale B A in place of W; then dL/dA = scale B^T dL/dW, and dL/dB = scale dL/dW A^T."""
    scale = 7.0 / math.sqrt(3)
    lora = evolve(LORA, rslora=True, targets=targets)
    assert lora.scale == scale and LORA.scale == 7.0 / 3
    model, merged = with_adapters(kind, lora), drawn_model(tiny_config(kind))
    tokens = torch.randint(3, 97, (2, 11), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        before = merged(tokens).logits
    adapters, weights = named_views(model), named_views(merged)
    adapted = [name for name in weights if adapters_of(name)[0] in adapters]
    pairs = {name: [adapters[each] for each in adapters_of(name)] for name in adapted}
    for name, (a, b) in pairs.items():
        weights[name].copy_(weights[name].double() + scale * b.double() @ a.double())
    found, wanted = model(tokens).logits, merged(tokens).logits
    assert (wanted - before).abs().max() > 0.1
    assert (found - wanted).abs().max() < 1e-5
    for each in (found, wanted):
        (each * torch.arange(each.numel()).view_as(each).sin()).sum().backward()
    mine, theirs = gradients(model), gradients(merged)
    for name, (a, b) in pairs.items():
        wanted_a, wanted_b = scale * b.T @ theirs[name], scale * theirs[name] @ a.T
        for one, other in zip(adapters_of(name), (wanted_a, wanted_b), strict=True):
            assert (mine[one] - other).norm() <= 1e-5 * other.norm()


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    """By the names of HF tensors."""
    boxes = hf_boxes(model)
    trained = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    return {box.name: box.view(grad) for name, grad in trained.items() for box in boxes[name]}


def test_experts_with_adapters_have_shapes_on_meta() -> None:
    experts = meta_model(tiny_config("qwen3-moe"), lora=of("experts")).get_submodule("model.layers.0.mlp.experts")
    with torch.device("meta"):
        found = experts(torch.empty(5, 64), torch.zeros(5, 2, dtype=torch.long), torch.empty(5, 2))
    assert found.shape == (5, 64)


def test_adapters_of_experts_go_on_from_a_directory_of_peft(tmp_path: Path) -> None:
    lora, hf = of("q_proj", "mlp.experts"), tiny_config("qwen3-moe")
    views = named_views(with_adapters("qwen3-moe", lora))
    held = {name: view.detach() for name, view in views.items() if is_adapter(name)}
    modules = sorted({adapted(name).removesuffix(".weight") for name in held})
    assert "model.layers.1.mlp.experts.7.up_proj" in modules
    write_adapters(tmp_path / "saved", held, peft_config(lora, base="", targets=modules))

    found = LoraConfig(path=str(tmp_path / "saved")).settled(saved_settings(tmp_path / "saved"))
    shapes = shapes_of(meta_model(hf, lora=found))
    assert {name for name in shapes if is_adapter(name)} == held.keys()
    require_adapters(tmp_path / "saved", meta_model(hf, lora=found))
    source = initial_source(ModelConfig(), hf, shapes, seed=0, lora=found)
    for name, wanted in held.items():
        assert torch.equal(source.read(name, (0, 0), shapes[name]), wanted)


def test_a_weight_split_in_files_gets_no_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    def split(model: PreTrainedModel, params: dict[str, Tensor]) -> dict[str, Tensor]:
        up = params.pop("model.layers.0.mlp.up_proj.weight")
        return {**params, "up.0.weight": up[:48], "up.1.weight": up[48:]}

    monkeypatch.setattr(names, "revert_weight_conversion", split)
    with pytest.raises(ModelError) as caught:
        shapes_of(meta_model(tiny_config("qwen3"), lora=LORA))
    assert caught.value.message == (
        "Qwen3ForCausalLM has no tensor 'model.layers.0.mlp.up_proj.weight' of its own in its files, so that it cannot "
        "have an adapter; leave it out of lora.targets"
    )
    assert any(map(is_adapter, shapes_of(meta_model(tiny_config("qwen3"), lora=of("self_attn.q_proj")))))


# One loss that needs nothing but log-probs: minus the sum of weights * advantages * ratio, as nothing is clipped.
RATIO = LossSpec(name="clipped", params={"clip_low": 0.999, "clip_high": 1e6}, outputs=(Output.LOGPROBS,))
GRADIENTS = 1e-5  # relative L2, in float32

# Kind of model -> what PEFT is asked for. No two ranks or scales are alike, and none is a default.
CASES: dict[str, dict[str, Any]] = {
    "qwen3-tied": {"r": 4, "lora_alpha": 10, "target_modules": ["q_proj", "v_proj"]},
    "qwen2": {"r": 3, "lora_alpha": 5, "target_modules": "all-linear", "use_rslora": True},  # layers have biases
    "llama": {"r": 5, "lora_alpha": 7, "target_modules": ["self_attn.o_proj", "down_proj"], "lora_dropout": 0.1},
    "qwen3-moe": {"r": 6, "lora_alpha": 9, "target_modules": ["q_proj", "k_proj", "o_proj"]},
}
MAKE = """
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

def adapted(path, settings):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings)).eval()

def named(model, part):
    return {name.replace(".default", ""): each for name, each in model.named_parameters() if part in name}

torch.manual_seed(3)
found = {}
for case in asked["cases"]:
    model = adapted(case["path"], case["settings"])
    for b in named(model, "lora_B").values():
        b.data.normal_(0, 0.05)
    model.save_pretrained(case["directory"])
    loss, logprobs = 0.0, []
    for tokens, factors, old in zip(case["tokens"], case["factors"], case["old"]):
        log_p = (model(input_ids=tokens[None]).logits[0, :-1] / case["temperature"]).log_softmax(-1)
        logprobs.append(log_p.gather(-1, tokens[1:, None])[:, 0])
        loss = loss - (factors[1:] * (logprobs[-1] - old[1:]).exp()).sum()
    loss.backward()
    gradients = {name: each.grad for name, each in named(model, "lora_").items()}
    found[case["kind"]] = [each.detach() for each in logprobs], gradients
for init in (True, "gaussian"):
    model = adapted(asked["cases"][0]["path"], {"r": 64, "target_modules": "all-linear", "init_lora_weights": init})
    found[str(init)] = {name: each.data for name, each in named(model, "lora_").items()}
"""


@frozen(kw_only=True, eq=False)
class Made:
    """What PEFT has made of one case, and computed."""

    setup: Setup  # goes on from it
    directory: Path
    logprobs: list[torch.Tensor]  # of each sample, from its second token on
    gradients: Mapping[str, torch.Tensor]


@pytest.fixture(scope="module")
def found(tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("peft")
    cases = []
    for kind, settings in CASES.items():
        samples = samples_at(0)
        setup = Setup(backend="plain", model=str(tiny_models[kind])).packed_by(10**6)
        with running(setup) as worker:
            (micro,) = packed_for_training(worker, setup, samples).micro_batches
        of_row = {int(row): place for place, row in enumerate(micro.rows)}
        spans = [slice(*micro.cu_seqlens[[of_row[row], of_row[row] + 1]]) for row in range(len(of_row))]
        factors = micro.columns["weights"] * micro.columns["advantages"]
        columns = {"tokens": micro.tokens, "factors": factors, "old": micro.columns["old_logprobs"]}
        case = {name: [torch.tensor(column[span]) for span in spans] for name, column in columns.items()}
        case |= {"kind": kind, "path": str(tiny_models[kind]), "directory": str(directory / kind)}
        cases.append({**case, "settings": settings, "temperature": samples.temperature})
    return {**run_with_peft(MAKE, {"cases": cases}, directory), "directory": directory}


@pytest.fixture
def made(found: dict[str, Any], tiny_models: dict[str, Path]) -> Callable[[str], Made]:
    def of(kind: str) -> Made:
        directory = found["directory"] / kind
        lora = LoraConfig(path=str(directory)).settled(saved_settings(directory))
        setup = Setup(backend="plain", model=str(tiny_models[kind]), lora=lora).packed_by(10**6)
        logprobs, gradients = found[kind]
        return Made(setup=setup, directory=directory, logprobs=logprobs, gradients=gradients)

    return of


@needs_peft
@pytest.mark.processes
@pytest.mark.parametrize("kind", CASES)
def test_adapters_of_peft_begin_with_its_logprobs_and_gradients(kind: str, made: Callable[[str], Made]) -> None:
    case, settings = made(kind), CASES[kind]
    lora = case.setup.lora
    assert lora is not None and lora.targets is not None
    assert (lora.rank, lora.alpha, lora.rslora) == (
        settings["r"],
        settings["lora_alpha"],
        settings.get("use_rslora", False),
    )
    if settings["target_modules"] != "all-linear":  # which PEFT replaces by the names it has found
        assert sorted(lora.targets) == sorted(settings["target_modules"])
    samples = samples_at(0)
    with running(case.setup) as worker:
        result = forward(worker, case.setup, samples, outputs=(Output.LOGPROBS,))
        backend: Any = worker.backend
        batch = packed_for_training(worker, case.setup, samples)
        backend.forward_backward(batch, RATIO, (), True)
        gradients = {f"{PREFIX}{name}": param.grad for name, param in backend.trained.items()}
        loaded = {each.name: each.view.clone() for each in backend.local_state(StateKey.MASTER)}
    for row, start, stop in zip(result.rows, result.offsets, result.offsets[1:], strict=False):
        found, wanted = result.outputs[Output.LOGPROBS][start + 1 : stop], case.logprobs[row].numpy()
        assert np.abs(wanted).min() > 1
        assert np.abs(found - wanted).max() < LOGPROBS.absolute
    held = load_file(case.directory / PEFT_WEIGHTS)
    assert loaded.keys() == held.keys() and all(torch.equal(loaded[name], held[name]) for name in held)
    assert gradients.keys() == case.gradients.keys()
    for name, gradient in case.gradients.items():
        assert gradient.norm() > 0
        assert (gradients[name] - gradient).norm() < GRADIENTS * gradient.norm(), name


@needs_peft
@pytest.mark.processes
@pytest.mark.parametrize(("init", "as_peft"), [("kaiming", "True"), ("gaussian", "gaussian")])
def test_new_adapters_begin_as_those_of_peft(
    init: str, as_peft: str, found: dict[str, Any], tiny_models: dict[str, Path]
) -> None:
    lora = evolve(LoraConfig(rank=64).settled({}), init=init)
    setup = Setup(backend="plain", model=str(tiny_models["qwen3-tied"]), lora=lora)
    with running(setup) as worker:
        held = {each.name: each.view.clone() for each in worker.backend.local_state(StateKey.MASTER)}
    wanted: dict[str, torch.Tensor] = found[as_peft]
    assert {name: each.shape for name, each in held.items()} == {name: each.shape for name, each in wanted.items()}
    assert all(bool((each[name] == 0).all()) for each in (held, wanted) for name in wanted if not name.endswith(A))
    deciles = torch.linspace(0, 1, 11)
    for inputs in {each.shape[1] for name, each in wanted.items() if name.endswith(A)}:
        of_each = [
            torch.cat(
                [each.flatten() for name, each in tensors.items() if name.endswith(A) and each.shape[1] == inputs]
            )
            for tensors in (held, wanted)
        ]
        ours, theirs = (torch.quantile(each, deciles) for each in of_each)
        assert (ours - theirs)[1:-1].abs().max() < 0.05 * theirs[-2]
        if init == "kaiming":  # whose ends are known, where a normal distribution has none
            assert (ours - theirs)[[0, -1]].abs().max() < 0.01 * theirs[-1]
    a = [each for name, each in held.items() if name.endswith(A)]
    assert not any(torch.equal(one, other) for place, one in enumerate(a) for other in a[:place])


# ---- what is refused -------------------------------------------------------------------------------------------------

PLAIN = peft_config(LoraConfig(rank=4, alpha=10.0).settled({}), base="hub/model", targets=["q_proj", "v_proj"])


def config_at(directory: Path, **changes: Any) -> Path:
    """A PEFT directory's config with some of its fields changed; ... takes a field away."""
    told = {name: value for name, value in {**PLAIN, **changes}.items() if value is not ...}
    (directory / PEFT_CONFIG).write_text(json.dumps(told))
    return directory


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"use_dora": True}, "use_dora=True; CoreRL cannot go on with such adapters"),
        ({"bias": "lora_only"}, "bias='lora_only'; CoreRL cannot go on with such adapters"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=['lm_head']; CoreRL cannot go on with such adapters"),
        ({"arrow_config": {"scale": 1}}, "arrow_config={'scale': 1}; CoreRL cannot go on with such adapters"),
        ({"a_field_to_come": 3}, "a_field_to_come=3; CoreRL cannot go on with such adapters"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'; CoreRL cannot go on with such adapters"),
        ({"peft_type": "IA3"}, "peft_type='IA3', wanted 'LORA'; CoreRL trains no other adapters"),
        ({"target_modules": ".*_proj"}, "target_modules='.*_proj', wanted a rank"),
        ({"target_modules": None}, "target_modules=None, wanted a rank"),
        ({"r": 0}, "r=0, lora_alpha=10.0"),
        ({"lora_alpha": 0}, "lora_alpha=0, target_modules"),
    ],
)
def test_what_corerl_would_compute_otherwise_is_refused(tmp_path: Path, changes: dict[str, Any], shown: str) -> None:
    with pytest.raises(ModelError) as caught:
        saved_settings(config_at(tmp_path, **changes))
    assert caught.value.message.startswith(f"{tmp_path}/{PEFT_CONFIG} has ") and shown in caught.value.message


SAVED = "name a directory that PEFT has saved"


@pytest.mark.parametrize(
    ("read", "name", "content", "told"),
    [
        (saved_settings, PEFT_CONFIG, None, f"/{PEFT_CONFIG} cannot be read .No such file or directory.; {SAVED}$"),
        (saved_settings, PEFT_CONFIG, '{"a": 1,', f"/{PEFT_CONFIG} is no JSON .Expecting property.*save the adapters"),
        (saved_settings, PEFT_CONFIG, "[]", f"/{PEFT_CONFIG} has peft_type=None, wanted 'LORA'; CoreRL trains no oth"),
        (PeftFiles, PEFT_WEIGHTS, None, f" has no {PEFT_WEIGHTS}; {SAVED}$"),
        (PeftFiles, PEFT_WEIGHTS, "\x10\x00\x00", f"/{PEFT_WEIGHTS} "),
    ],
)
def test_files_that_are_missing_or_damaged_are_told(
    read: Callable[[Path], object], name: str, content: str | None, told: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ModelError, match=f"^{tmp_path}{told}"):
        read(tmp_path)
    with pytest.raises(ModelError, match="'/nowhere' is not a directory, expected a directory of PEFT"):
        PeftFiles("/nowhere")
