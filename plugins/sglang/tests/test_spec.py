"""What is known, and can be wrong, before any server starts."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from corerl.config.schema import ClusterInfo
from corerl.doctor.plugins import look_named
from corerl.plugin.spec import Finding, Level
from corerl.rollout.engine import EngineContext
from corerl_sglang import SPEC
from corerl_sglang.arguments import ELSEWHERE, plain_allocator, server_arguments
from corerl_sglang.config import SglangConfig
from corerl_sglang.probe import END, OLDEST
from plugins.sglang.tests.stand_in import KNOWN

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
LATER = {"grpc_port", "smg_grpc_mode", "weight_cache_mode"}  # arguments that 0.5.17 has and 0.5.15 does not
DENSE = {"num_attention_heads": 12, "num_key_value_heads": 4}
EXPERTS = {"num_attention_heads": 8, "num_key_value_heads": 2, "num_experts": 6}


def problems(model: dict[str, Any] | None = None, **options: Any) -> dict[str, str]:
    cluster = ClusterInfo(device="cuda", ranks=1, model=model or {})
    return {problem.path: problem.text for problem in SPEC.check(SglangConfig(**options), cluster)}


def test_arguments_are_those_that_both_versions_of_sglang_have() -> None:
    everything = SglangConfig(
        tensor_parallel=4, data_parallel=2, expert_parallel=2, memory=0.5, attention_backend="fa3", deterministic=True
    )
    context = EngineContext(name="engine-0", index=0, device="cuda", precision="bfloat16", bundles=4)
    arguments = server_arguments(everything, context, model=Path("m"))
    assert arguments.keys() <= KNOWN
    assert (arguments["tp_size"], arguments["dp_size"], arguments["ep_size"]) == (4, 2, 2)
    assert arguments["enable_dp_attention"] and arguments["enable_memory_saver"]
    assert ELSEWHERE.keys() - LATER <= KNOWN
    # What is made of options cannot be given as an argument too, so that neither wins in silence.
    assert arguments.keys() <= ELSEWHERE.keys()
    assert SPEC.bundles(everything, ClusterInfo(device="cuda", ranks=1)) == 4


def test_an_argument_of_the_user_passes_through_unless_it_has_another_place() -> None:
    context = EngineContext(name="engine-0", index=0, device="cpu", precision="float32")
    arguments = server_arguments(SglangConfig(server={"chunked_prefill_size": 512}), context, model=Path("m"))
    assert arguments["chunked_prefill_size"] == 512 and not arguments["enable_memory_saver"]
    assert problems(server={"chunked_prefill_size": 512}) == {}
    assert problems(server={"tp_size": 2, "--max-running-requests": 3, "mem-fraction-static": 0.5}) == {
        "server.tp_size": "has another place: set tensor_parallel; remove it here",
        "server.--max-running-requests": "is no name of an argument; write 'max_running_requests'",
        "server.mem-fraction-static": "has another place: set memory; remove it here",
    }


def test_the_server_has_no_expandable_segments_which_the_ranks_may_have() -> None:
    environment = {
        "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True",
        "PYTORCH_ALLOC_CONF": "expandable_segments: true",
        "ANOTHER": "1",
    }
    assert plain_allocator(environment) == {
        "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:False",
        "PYTORCH_ALLOC_CONF": "expandable_segments: False",
    }


def test_what_does_not_divide_is_told() -> None:
    assert problems(tensor_parallel=4, data_parallel=3, expert_parallel=3) == {
        "data_parallel": "3 does not divide tensor_parallel=4; take a divisor of 4",
        "expert_parallel": "3 does not divide tensor_parallel=4; take a divisor of 4",
    }
    assert problems(DENSE, tensor_parallel=8) == {
        "tensor_parallel": "8 does not divide the model's 12 attention heads; take a divisor"
    }
    assert problems(DENSE, tensor_parallel=8, data_parallel=2) == {}
    assert list(problems(DENSE, tensor_parallel=6)) == ["tensor_parallel"]  # 4 heads of keys and values over 6
    assert problems(DENSE, tensor_parallel=12) == {}
    assert problems(DENSE, tensor_parallel=2, expert_parallel=2) == {
        "expert_parallel": "2, and the model has no experts; set it to 1"
    }
    assert problems(EXPERTS, tensor_parallel=4, expert_parallel=4) == {
        "expert_parallel": "4 does not divide the model's 6 experts; take a divisor"
    }
    assert list(problems(DENSE, routed_experts=True)) == ["routed_experts"]
    assert list(problems(deterministic=True, attention_backend="flashmla")) == ["attention_backend"]
    assert problems(EXPERTS, tensor_parallel=2, expert_parallel=2, routed_experts=True) == {}


def test_the_spec_is_light() -> None:
    code = "import sys, corerl_sglang; print([m for m in ('torch', 'sglang', 'ray', 'numpy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def amiss() -> list[Finding]:
    return [finding for finding in SPEC.probe() if finding.level is not Level.OK]


def test_the_probe_says_what_is_missing_and_what_is_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.11.0+cu130", "transformers": "5.17.0"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        metadata, "requires", lambda name: ["torch==2.11.0", "transformers==5.12.1", "numpy", "av==1; x"]
    )

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)
    (finding,) = amiss()
    assert (finding.what, finding.mend) == ("SGLang is not installed", "python -m pip install 'corerl[sglang]'")
    versions["sglang"] = "0.5.17.post1"
    (finding,) = amiss()
    assert finding.level is Level.WARNING
    assert finding.what == "SGLang 0.5.17.post1 was made for transformers 5.12.1, and 5.17.0 is here"
    versions |= {"sglang": "0.6.0rc1", "transformers": "5.12.1"}
    (finding,) = amiss()
    assert finding.what.startswith("SGLang 0.6.0rc1 is not one of those")


def test_the_doctor_asks_the_engines_probe() -> None:
    told = [each.what for each in look_named("sglang") if isinstance(each, Finding)]
    assert any("corerl_sglang.engine:SglangEngine can be imported" in what for what in told)
    assert [finding.what for finding in SPEC.probe()] == told[-len(list(SPEC.probe())) :]


def test_the_versions_are_those_that_the_package_asks_for() -> None:
    project = tomllib.loads(PROJECT.read_text())["project"]
    oldest, end = (".".join(map(str, version)) for version in (OLDEST, END))
    assert project["optional-dependencies"]["server"] == [f"sglang>={oldest},<{end}"]
    assert not any("sglang" in each for each in project["dependencies"])
