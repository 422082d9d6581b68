"""What is known, and can be wrong, before any server starts."""

from __future__ import annotations

import json
import pickle
import secrets
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from corerl.config import ClusterInfo, LoraConfig, TrainConfig, WeightsConfig
from corerl.engines import EngineContext
from corerl.errors import ConfigError
from corerl.messages import install_hint
from corerl.plugin import Finding, Level
from corerl_sglang import SPEC
from corerl_sglang.arguments import ELSEWHERE, Key, plain_allocator, server_arguments
from corerl_sglang.config import SglangConfig
from corerl_sglang.fp8 import BLOCK as FP8_BLOCK
from corerl_sglang.fp8 import KERNELS, for_device, quantization
from corerl_sglang.probe import END, OLDEST
from corerl_testing import BLOCK, make_plan
from plugins.sglang.tests.stand_in import KNOWN
from tests.driver.saved import make_config

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
LATER = {"grpc_port", "smg_grpc_mode", "weight_cache_mode"}  # arguments that 0.5.17 has and 0.5.15 does not
DENSE = {"num_attention_heads": 12, "num_key_value_heads": 4}
EXPERTS = {"num_attention_heads": 8, "num_key_value_heads": 2, "num_experts": 6}


def problems(model: dict[str, Any] | None = None, **options: Any) -> dict[str, str]:
    cluster = ClusterInfo(device="cuda", ranks=1, model=model or {})
    return {problem.path: problem.text for problem in SPEC.check(SglangConfig(**options), cluster)}


@pytest.mark.parametrize(
    ("model_type", "way"), [("mistral3", "adapter"), ("mistral3", "merged"), ("gemma3", "adapter")]
)
def test_adapters_of_a_class_without_them_are_refused(model_type: str, way: Any) -> None:
    model = {"model_type": model_type, "text_config": DENSE}
    lora, weights = LoraConfig(rank=4, alpha=8.0).settled({}), WeightsConfig(lora=way)
    cluster = ClusterInfo(device="cuda", ranks=1, model=model, lora=lora, weights=weights)
    found = [(problem.path, problem.text.partition("SGLang")[0]) for problem in SPEC.check(SglangConfig(), cluster)]
    refused = [(".weights.lora", "'adapter', with which ")]
    assert found == (refused if (model_type, way) == ("mistral3", "adapter") else [])


def test_arguments_are_those_that_both_versions_of_sglang_have() -> None:
    parallel = {"tensor_parallel": 4, "data_parallel": 2, "expert_parallel": 2}
    everything = SglangConfig(**parallel, memory=0.5, attention_backend="fa3", deterministic=True)
    context = EngineContext(name="engine-0", index=0, device="cuda", precision="bfloat16", bundles=4, context_length=32)
    arguments = server_arguments(everything, context, model=Path("m"))
    assert arguments.keys() <= KNOWN
    assert (arguments["tp_size"], arguments["dp_size"], arguments["ep_size"]) == (4, 2, 2)
    assert arguments["enable_dp_attention"] and arguments["enable_memory_saver"]
    assert ELSEWHERE.keys() - LATER <= KNOWN
    # What is made of options cannot be given as an argument too, so that neither wins in silence.
    assert arguments.keys() - {"uvicorn_access_log_exclude_prefixes"} <= ELSEWHERE.keys()  # that is the user's too
    assert SPEC.bundles(everything, ClusterInfo(device="cuda", ranks=1)) == 4


def test_a_servers_key_is_shown_nowhere_and_works() -> None:
    key = Key("s3cret")
    assert repr({"api_key": key}) == "{'api_key': '***'}"
    there = pickle.loads(pickle.dumps(key))  # as it reaches the ranks
    assert type(there) is Key and secrets.compare_digest("s3cret", there) and f"Bearer {there}" == "Bearer s3cret"
    assert json.dumps(there) == '"s3cret"'


def test_user_arguments_pass_through_unless_they_have_settings() -> None:
    context = EngineContext(name="engine-0", index=0, device="cpu", precision="float32")
    arguments = server_arguments(SglangConfig(server={"chunked_prefill_size": 512}), context, model=Path("m"))
    assert arguments["chunked_prefill_size"] == 512 and not arguments["enable_memory_saver"]
    assert arguments["schedule_conservativeness"] == 0.3
    own = server_arguments(SglangConfig(server={"schedule_conservativeness": 1.0}), context, model=Path("m"))
    assert own["schedule_conservativeness"] == 1.0
    assert problems(server={"chunked_prefill_size": 512}) == {}
    assert list(problems(server={"allow_auto_truncate": True})) == ["server.allow_auto_truncate"]
    assert problems(server={"tp_size": 2, "--max-running-requests": 3, "mem-fraction-static": 0.5}) == {
        "server.tp_size": "cannot be set here: set tensor_parallel; remove it here",
        "server.--max-running-requests": "is not an argument name; write 'max_running_requests'",
        "server.mem-fraction-static": "cannot be set here: set memory; remove it here",
    }


def test_the_server_has_no_expandable_segments() -> None:
    environment = {
        "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True",
        "PYTORCH_ALLOC_CONF": "expandable_segments: true",
        "ANOTHER": "1",
    }
    assert plain_allocator(environment) == {
        "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:False",
        "PYTORCH_ALLOC_CONF": "expandable_segments: False",
    }


@pytest.mark.parametrize(
    ("model", "options", "told"),
    [
        ({}, {"tensor_parallel": 4, "data_parallel": 3}, "data_parallel: 3 does not divide tensor_parallel=4; use a"),
        ({}, {"tensor_parallel": 4, "expert_parallel": 3}, "expert_parallel: 3 does not divide tensor_parallel=4; use"),
        (DENSE, {"tensor_parallel": 8}, "tensor_parallel: 8 does not divide the model's 12 attention heads; use a "),
        (DENSE, {"tensor_parallel": 8, "data_parallel": 2}, ""),
        (DENSE, {"tensor_parallel": 6}, "tensor_parallel: "),  # 4 heads of keys and values over 6
        (DENSE, {"tensor_parallel": 12}, ""),
        (DENSE, {"tensor_parallel": 2, "expert_parallel": 2}, "expert_parallel: 2, but the model has no experts; set"),
        (EXPERTS, {"tensor_parallel": 4, "expert_parallel": 4}, "expert_parallel: 4 does not divide the model's 6 ex"),
        (DENSE, {"routed_experts": True}, "routed_experts: "),
        ({}, {"deterministic": True, "attention_backend": "flashmla"}, "attention_backend: "),
        (EXPERTS, {"tensor_parallel": 2, "expert_parallel": 2, "routed_experts": True}, ""),
    ],
)
def test_what_does_not_divide_is_told(model: dict[str, Any], options: dict[str, Any], told: str) -> None:
    found = [f"{path}: {text}" for path, text in problems(model, **options).items()]
    assert len(found) == bool(told) and all(each.startswith(told) for each in found)


BFLOAT16 = TrainConfig(precision="bfloat16")
QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
QWEN3_MOE = {**QWEN3, "model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 768, "intermediate_size": 7}


def problems_in_fp8(
    model: dict[str, Any],
    *,
    device: str = "cuda",
    train: TrainConfig = BFLOAT16,
    left_out: tuple[str, ...] = (),
    **own: Any,
) -> dict[str, str]:
    weights = WeightsConfig(quantize="fp8", unquantized=left_out)
    cluster = ClusterInfo(device=device, ranks=1, model=model, train=train, weights=weights)
    return {problem.path: problem.text for problem in SPEC.check(SglangConfig(**own), cluster)}


def test_unsupported_fp8_models_are_refused_before_the_start() -> None:
    assert problems_in_fp8(QWEN3) == problems_in_fp8(QWEN3, tensor_parallel=8) == {}
    assert problems_in_fp8(QWEN3, server={"fp8_gemm_runner_backend": "triton"}) == {}
    assert problems_in_fp8(QWEN3_MOE) == problems_in_fp8(QWEN3_MOE, tensor_parallel=2) == {}
    assert list(problems_in_fp8(QWEN3, device="cpu")) == [".weights.quantize"]
    assert list(problems_in_fp8(QWEN3, train=TrainConfig(precision="float32"))) == [".train.precision"]
    assert problems_in_fp8({**QWEN3, "model_type": "llama"}) == {
        ".weights.quantize": "'fp8' supports models of type qwen2, qwen3, qwen3_moe, got 'llama', whose scales SGLang "
        "may not read; set it to 'none'"
    }
    told = problems_in_fp8(QWEN3, server={"fp8_gemm_runner_backend": "cutlass", "moe_a2a_backend": "deepep"})
    assert list(told) == ["server.fp8_gemm_runner_backend", "server.moe_a2a_backend"]


def test_fp8_problems_name_their_settings(tmp_path: Path) -> None:
    run = make_config(run={"dir": str(tmp_path)}, rollout={"engine": "sglang"}, weights={"quantize": "fp8"})
    with pytest.raises(ConfigError) as caught:
        make_plan(run)
    assert [line.partition(": ")[0] for line in caught.value.message.splitlines()] == [
        "weights.quantize",
        "train.precision",
        "model.config.hidden_size",
        "model.config.num_attention_heads",
        "model.config.num_key_value_heads",
        "model.config.intermediate_size",
    ]


def test_blocks_are_not_cut() -> None:
    assert problems_in_fp8({**QWEN3, "hidden_size": 1000}) == {
        ".model.hidden_size": "matrices with 1000 rows or columns per device, from hidden_size, do not divide into "
        "FP8 blocks of 128; set weights.quantize='none', or leave these layers out"
    }
    narrow = {**QWEN3, "head_dim": 64}
    assert problems_in_fp8(narrow, tensor_parallel=4) == {}
    assert problems_in_fp8(narrow, tensor_parallel=8) == {
        "tensor_parallel": "matrices with 64 rows or columns per device, from num_key_value_heads, do not divide into "
        "FP8 blocks of 128; split the model over fewer devices"
    }
    assert problems_in_fp8(narrow, tensor_parallel=8, data_parallel=2) == {}  # for attention over 4
    # 4 heads of keys over 8 devices: each has one, of 128.
    assert problems_in_fp8({**QWEN3, "num_key_value_heads": 4}, tensor_parallel=8) == {}
    assert list(problems_in_fp8({**QWEN3, "intermediate_size": 3072 - 128}, tensor_parallel=2)) == ["tensor_parallel"]
    # Experts are divided, or their matrices are; 768 / 4 is one block and a half.
    assert list(problems_in_fp8(QWEN3_MOE, tensor_parallel=4)) == ["tensor_parallel"]
    assert problems_in_fp8(QWEN3_MOE, tensor_parallel=4, expert_parallel=4) == {}
    assert problems_in_fp8(QWEN3_MOE, tensor_parallel=4, left_out=("experts",)) == {}
    assert list(problems_in_fp8({**QWEN3_MOE, "mlp_only_layers": [1]})) == [".model.intermediate_size"]


def test_what_sglang_fuses_is_left_out_as_a_whole() -> None:
    assert problems_in_fp8(QWEN3, left_out=("o_proj", "down_proj", "layers.1.")) == {}
    assert problems_in_fp8(QWEN3, left_out=("q_proj",)) == {
        ".weights.unquantized": "leaves out 'model.layers.0.self_attn.q_proj.weight' but not "
        "'model.layers.0.self_attn.k_proj.weight', which SGLang stores in the same parameter; leave out both or neither"
    }
    (told,) = problems_in_fp8(QWEN3_MOE, left_out=("experts.3.",)).values()
    experts = "model.layers.0.mlp.experts"
    assert told.startswith(f"leaves out '{experts}.3.gate_proj.weight' but not '{experts}.0.gate_proj.weight', which")


def test_an_fp8_server_starts_and_keeps_parameters_as_sent() -> None:
    weights = WeightsConfig(quantize="fp8")
    context = EngineContext(name="e", index=0, device="cuda", precision="bfloat16", weights=weights)
    arguments = server_arguments(SglangConfig(), context, model=Path("m"))
    assert arguments["quantization"] == "fp8" and arguments.keys() <= KNOWN
    assert for_device(arguments, (9, 0)) == for_device(arguments, (8, 9)) == arguments
    plain = {"fp8_gemm_runner_backend": "triton", "moe_runner_backend": "triton"}
    assert for_device(arguments, (10, 0)) == {**arguments, **plain}
    assert for_device({"dtype": "bfloat16"}, (8, 0)) == {"dtype": "bfloat16"}
    with pytest.raises(ConfigError, match="8.9 or higher, but this one has 8.0; set it to 'none'"):
        for_device(arguments, (8, 0))
    with pytest.raises(ConfigError, match="fp8_gemm_runner_backend: 'deep_gemm' repacks .*; remove it to use 'triton'"):
        for_device({**arguments, "fp8_gemm_runner_backend": "deep_gemm"}, (10, 3))
    assert KERNELS.keys() <= KNOWN
    assert (FP8_BLOCK, quantization([])["weight_block_size"]) == (BLOCK, [BLOCK, BLOCK])


def amiss() -> list[Finding]:
    return [finding for finding in SPEC.probe() if finding.level is not Level.OK]


def test_the_probe_reports_missing_and_other_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.11.0+cu130", "transformers": "5.17.0"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    required = ["torch==2.11.0", "transformers==5.12.1", "numpy", "av==1; x"]
    monkeypatch.setattr(metadata, "requires", lambda name: required)

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)
    (finding,) = amiss()
    assert (finding.what, finding.fix) == ("SGLang is not installed", f"python -m {install_hint('sglang')}")
    versions["sglang"] = "0.5.17.post1"
    (finding,) = amiss()
    assert finding.level is Level.WARNING
    assert finding.what == "SGLang 0.5.17.post1 requires transformers 5.12.1, but 5.17.0 is installed"
    versions |= {"sglang": "0.6.0rc1", "transformers": "5.12.1"}
    (finding,) = amiss()
    assert finding.what.startswith("SGLang 0.6.0rc1 is not supported by this engine")


def test_the_versions_are_those_that_the_package_asks_for() -> None:
    project = tomllib.loads(PROJECT.read_text())["project"]
    oldest, end = (".".join(map(str, version)) for version in (OLDEST, END))
    assert project["optional-dependencies"]["server"] == [f"sglang>={oldest},<{end}"]
    assert not any("sglang" in each for each in project["dependencies"])
