from pathlib import Path

import numpy as np
import pytest
import torch
from attrs import evolve

from corerl.config.schema import ModelConfig
from corerl.engines.base import GenerateRequest
from corerl.errors import EngineFailed
from corerl_testing.fake_engine import FakeEngine
from corerl_testing.fake_spec import FakeConfig
from tests.engines.models import context, spread, update
from tests.engines.services import request_of

WEIGHTS = {"a": torch.ones(3), "b": torch.zeros(2, 2)}


def fake(index: int = 0) -> FakeEngine:
    return FakeEngine(ModelConfig(), FakeConfig(vocab_size=8), context(index))


def request(rows: int) -> GenerateRequest:
    return request_of((np.arange(2 * rows).reshape(-1, 2) % 8).tolist(), max_tokens=5, stop_tokens=(3,))


def test_answers_are_a_function_of_prompt_noise_and_version(tmp_path: Path) -> None:
    engines = [fake(0), fake(1)]
    with pytest.raises(EngineFailed, match="engine-0 cannot generate: no weights have arrived yet"):
        engines[0].generate(request(1))
    (first, _) = update(engines, WEIGHTS, version=1, path=tmp_path)
    assert (first.bytes, first.error) == (28, "")
    asked = request(40)
    whole = engines[0].generate(asked)
    pooled = spread(engines, asked)
    for column in ("tokens", "offsets", "logprobs", "versions", "truncated"):
        assert getattr(pooled, column).tolist() == getattr(whole, column).tolist()
    last = whole.tokens[whole.offsets[1:] - 1]
    assert ((last == 3) != whole.truncated).all()
    assert (np.diff(whole.offsets)[whole.truncated] == 5).all()
    assert 0 < whole.truncated.sum() < 40
    assert whole.logprobs.dtype == np.float32 and (whole.logprobs <= 0).all()

    assert engines[0].generate(evolve(asked, noise_keys=asked.noise_keys + 1)).tokens.tolist() != whole.tokens.tolist()
    greedy = evolve(asked, params=evolve(asked.params, greedy=True))
    other_noise = evolve(greedy, noise_keys=asked.noise_keys + 1)
    assert engines[0].generate(greedy).tokens.tolist() == engines[0].generate(other_noise).tokens.tolist()
    update(engines, WEIGHTS, version=2, path=tmp_path)
    later = engines[0].generate(asked)
    assert later.tokens.tolist() != whole.tokens.tolist() and set(later.versions.tolist()) == {2}
