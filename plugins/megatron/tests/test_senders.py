"""A pipeline's stages each send their own weights."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from attrs import evolve
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

from corerl.config import WeightsConfig
from corerl.engines import Receiving
from corerl.types import UpdateResult
from corerl.weights import Address, Bucket, Manifest, bit_sums
from corerl_testing import Runs, Setup, State, running, state_of, train, whole
from corerl_testing.scenarios import updates

STEPS = 2  # of the optimizer, and as many updates


def manifest_of(setup: Setup) -> Manifest:
    with running(setup) as worker:
        return worker.manifest()


def send(setup: Setup, address: Address) -> tuple[list[UpdateResult], list[str], State]:
    """Of each update; what passed between ranks meanwhile, beside broadcasts; and the state after the last."""
    results, passed = [], set()
    with running(setup) as worker:
        for number in range(STEPS):
            train(worker, setup, number)
            with profile(activities=[ProfilerActivity.CPU]) as seen:
                results.append(worker.update_weights(address, number + 1, True))
            passed |= {event.key for event in seen.key_averages() if "c10d" in event.key or "gloo" in event.key}
        return results, sorted(key for key in passed if "broadcast" not in key), state_of(worker)


def test_each_stage_sends_its_own_tensors(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    setup = evolve(
        runs.setup("megatron", "qwen3"),
        options={"pipeline_parallel": 2},
        weights=WeightsConfig(bucket_bytes=2**14),
    )
    pool = runs.rank_sets[2]
    manifest, other = pool.run(manifest_of, setup)
    assert manifest == other and manifest.stage_ranks == (0, 1)
    head = next(bucket for bucket in manifest.buckets if "lm_head.weight" in [each.name for each in bucket.entries])
    embedding = next(each for each in manifest.buckets if "embed_tokens" in each.entries[0].name)
    assert (embedding.stage_rank, head.stage_rank) == (0, 1)

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    address = Address(transport="collective", engines=("engine-0",), host="127.0.0.1", port=port, timeout=60.0)
    loaded: dict[str, torch.Tensor] = {}

    def load(bucket: Bucket, flat: torch.Tensor) -> None:
        loaded.update({name: view.clone() for name, view in bucket.views(flat).items()})

    with ThreadPoolExecutor(1) as engine:
        receiving = Receiving(0)
        updates = [engine.submit(receiving.transfer, manifest, n + 1, address, load=load) for n in range(STEPS)]
        ranks = pool.run(send, setup, address)
        received = [update.result() for update in updates]
        receiving.close()

    trained = whole([state for _, _, state in ranks])["param"]
    assert {name: tensor.numpy().tobytes() for name, tensor in loaded.items()} == {
        name: tensor.tobytes() for name, tensor in trained.items()
    }
    total = sum(tensor.nbytes for tensor in loaded.values())
    assert received == [total] * STEPS
    (first, passed_first, _), (second, passed_second, _) = ranks
    assert passed_first == passed_second == []
    assert [result.engines for result in first + second] == [{}] * STEPS * 2
    assert min(first[-1].bytes, second[-1].bytes) > 0 and first[-1].bytes + second[-1].bytes == total
    assert {**first[-1].sums, **second[-1].sums} == bit_sums(loaded)


@pytest.mark.parametrize("every_rank", [False, True])
def test_a_routers_bias_of_a_later_stage_is_sent_unrounded(runs: Runs, every_rank: bool) -> None:
    setup = evolve(
        runs.setup("megatron", "glm4-moe"),
        options={"pipeline_parallel": 2},
        weights=WeightsConfig(bucket_bytes=2**14, dtype="bfloat16"),
    )
    manifest, other = runs.rank_sets[2].run(manifest_of, setup)
    assert manifest == other
    model = AutoModelForCausalLM.from_pretrained(setup.model, dtype=torch.float32)
    ((name, bias),) = ((name, buffer) for name, buffer in model.named_buffers() if name.endswith("correction_bias"))
    assert not torch.equal(bias, bias.bfloat16().float())
    for pushed in runs.rank_sets[2].run(updates.push_weights, setup, every_rank)[: None if every_rank else 1]:
        assert pushed.tensors[name].tolist() == bias.tolist()
