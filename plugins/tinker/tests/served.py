"""A tiny model that is served: its ranks and its engine as objects of the test's process."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import frozen
from tinker import types
from tinker.proto.response_conv import deserialize_sample_response

from corerl import Engines
from corerl.config import config_of
from corerl.types import FloatArray
from corerl_tinker import wire
from corerl_tinker.options import ServeOptions
from corerl_tinker.requests import Datum, InTurn, Pass, Sampler
from corerl_tinker.training import ServedPolicy
from tests.in_process import without_ray

VOCABULARY = 32
MODEL = "tiny"
PROMPT = [1, 7, 8, 9, 4]
ADAM = types.AdamParams(learning_rate=0.01)
CONFIG: Mapping[str, Any] = {
    "backend": {"name": "plain"},
    "cluster": {"device": "cpu"},
    "model": {
        "config": {
            "model_type": "qwen3",
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "intermediate_size": 96,
            "max_position_embeddings": 64,
            "eos_token_id": 2,
        },
        "tokenizer": "characters:abcdefghijklmnopqrstuvwxyz ",
    },
    "rollout": {"engine": "transformers", "max_tokens": 6},
    "train": {
        "tokens_per_micro_batch": 24,
        "optimizer": {"betas": [0.9, 0.95], "eps": 1e-12, "weight_decay": 0.0, "clip_norm": 0.0},
    },
    "weights": {"transport": "disk"},
}
LORA = {"lora": {"rank": 4}}


@frozen
class Served:
    policy: ServedPolicy
    engines: Engines

    @property
    def network(self) -> torch.nn.Module:
        """Of the one rank there is."""
        model: torch.nn.Module = self.engines.group.processes._objects[0].backend.model  # type: ignore[attr-defined]
        return model

    def logprobs(self, sampler: Sampler, prompt: Sequence[int]) -> FloatArray:
        """As `compute_logprobs` asks for them."""
        found = self.draw(sampler, prompt, max_tokens=1, prompt_logprobs=True).prompt_logprobs_np
        assert found is not None
        return found

    def draw(self, sampler: Sampler, prompt: Sequence[int] = PROMPT, **settings: Any) -> types.SampleResponse:
        """As clients read it."""
        return asyncio.run(self.drawing(sampler, prompt, **settings))

    async def drawing(
        self, sampler: Sampler, prompt: Sequence[int] = PROMPT, *, in_turn: InTurn | None = None, **settings: Any
    ) -> types.SampleResponse:
        wanted = asked(prompt, **settings)
        found = await self.policy.draw(sampler, wanted, in_turn or at_once)
        return deserialize_sample_response(bytes(wire.sample_answer(wanted, found).body))

    def new_model(self, model_id: str, *, rank: int | None = None) -> None:
        self.policy.release()
        create(self.policy, model_wanted(rank), model_id)


def create(policy: ServedPolicy, wanted: types.CreateModelRequest, model_id: str) -> types.TrainingRun:
    run = policy.planned(wanted, model_id=model_id)
    policy.create(run)
    return run


def model_wanted(rank: int | None = None, *, base_model: str = MODEL, **adapters: Any) -> types.CreateModelRequest:
    """A model with adapters of this rank, and more of their settings; None asks for nothing."""
    lora = None if rank is None else types.LoraConfig(rank=rank, **adapters)
    return types.CreateModelRequest(session_id="a", model_seq_id=0, base_model=base_model, lora_config=lora)


async def at_once(work: Callable[[Sequence[Any]], Sequence[Any]], what: Any, key: Hashable) -> Any:
    """The turn of whoever asks, where nobody else does anything."""
    return work([what])[0]


@contextlib.contextmanager
def serving(directory: Path, tables: Mapping[str, Any] | None = None, **options: Any) -> Iterator[Served]:
    config = config_of({**CONFIG, **(tables or {})})
    with without_ray(), Engines.start(config) as engines:
        policy = ServedPolicy(engines, ServeOptions(name=MODEL, directory=str(directory), **options), config)
        yield Served(policy, engines)


def run(policy: ServedPolicy, wanted: Pass) -> tuple[list[FloatArray], float]:
    """The log-probs of each datum, and the loss."""
    rows = policy.rows(wanted)
    return rows.done(policy.run([rows])[0])


def datum(tokens: Sequence[int], **inputs: Sequence[float]) -> Datum:
    """A row of these tokens, the last of which is only a target, with inputs for each target."""
    row = np.array(tokens)
    columns = {name: np.array(values, np.float32) for name, values in inputs.items()}
    return Datum(tokens=row[:-1], inputs={"target_tokens": row[1:], **columns})


def supervised(*rows: Sequence[int]) -> Pass:
    """Every token but the first of each row is to become likelier."""
    return Pass(loss="cross_entropy", datums=[datum(row, weights=[1.0] * (len(row) - 1)) for row in rows])


ROWS = ([1, 7, 8, 9, 4], [1, 4, 5], [1, 6, 6, 6, 6, 9, 20, 21])


def train(policy: ServedPolicy, steps: int) -> list[float]:
    """The loss before each step."""
    losses = []
    for _ in range(steps):
        losses.append(run(policy, supervised(*ROWS))[1])
        policy.step(ADAM)
    return losses


def weights_of(served: Served) -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param in served.network.named_parameters()}


def save(policy: ServedPolicy, name: str, **more: Any) -> types.Checkpoint:
    return policy.save(types.SaveWeightsRequest(model_id="", path=name, **more))


def publish(served: Served, name: str | None = None) -> Sampler:
    return served.policy.save_for_sampler(types.SaveWeightsForSamplerRequest(model_id="", path=name))


def asked(prompt: Sequence[int] = PROMPT, **settings: Any) -> types.SampleRequest:
    """Samples of six tokens, with further fields of the SDK's request or its sampling parameters."""
    own = {name: settings.pop(name) for name in settings.keys() & types.SampleRequest.model_fields.keys()}
    return types.SampleRequest(
        prompt=types.ModelInput.from_ints(list(prompt)),
        sampling_params=types.SamplingParams(**{"max_tokens": 6, "stop": [], **settings}),
        **{"seq_id": 0, **own},
    )


def same(drawn: types.SampleResponse, expected: types.SampleResponse) -> bool:
    """To the last bit."""
    found, wanted = ([(each.tokens, each.logprobs) for each in of.sequences] for of in (drawn, expected))
    return found == wanted


@contextlib.asynccontextmanager
async def in_flight(
    served: Served, sampler: Sampler, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[asyncio.Task[types.SampleResponse]]:
    """A context in which samples with seed 5 are in flight; they come at its end, as they would have come before it."""
    expected, begin = await served.drawing(sampler, seed=5), served.engines.begin
    samples, requests = concurrent.futures.Future[Any](), list[Any]()
    with monkeypatch.context() as patch:
        patch.setattr(type(served.engines), "begin", lambda _, request: requests.append(request) or samples)
        first = asyncio.create_task(served.drawing(sampler, seed=5))
        await asyncio.sleep(0)
        yield first
    assert not first.done()
    samples.set_result(await asyncio.wrap_future(begin(requests[0])))
    assert same(await first, expected)
