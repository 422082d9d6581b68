"""examples/engine: what is drawn is what CoreRL's own engine draws from the same weights."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from corerl.config.schema import ModelConfig
from corerl.engines.base import Engine, GenerateRequest, SamplingParams
from corerl.errors import EngineFailed
from corerl.ops.noise import hash_keys
from corerl.plugin.registry import Kind, load, load_implementation
from corerl_transformers.engine import TransformersEngine
from corerl_transformers.spec import TransformersConfig
from tests.engines.models import TIED, UNTIED, context, hf_tensors, random_model, update

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "engine"
SAMPLING = {
    "plain": SamplingParams(max_tokens=6, stop_tokens=(2, 9)),
    "top-p": SamplingParams(temperature=0.7, top_p=0.6, max_tokens=5),
    "top-k": SamplingParams(temperature=0.7, top_p=0.95, top_k=3, max_tokens=5),
    "greedy": SamplingParams(greedy=True, max_tokens=4, stop_tokens=(3,)),
}


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example's engine as a run finds it: by the name of its spec, beside the run."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    importlib.invalidate_caches()
    loaded = load(Kind.ENGINES, "my_engine:SPEC")
    engine = load_implementation(Kind.ENGINES, loaded)
    return lambda fields, **options: engine(ModelConfig(config=fields), loaded.spec.config(**options), context())


def request(params: SamplingParams) -> GenerateRequest:
    lengths = np.array([1, 4, 2, 7])
    return GenerateRequest(
        tokens=np.random.default_rng(0).integers(4, 16, size=lengths.sum()),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        noise_keys=hash_keys(0, 0, np.arange(4), np.zeros(4, dtype=np.int64)),
        params=params,
    )


def deliver(engine: Engine, fields: Any, path: Path, *, version: int = 0, seed: int = 1) -> str:
    path.mkdir(exist_ok=True)
    tensors = hf_tensors(random_model(fields, seed=seed), path / f"hf-{version}")
    (received,) = update([engine], tensors, version=version, path=path / f"weights-{version}")
    return received.error


@pytest.mark.parametrize("cache", [True, False], ids=["cache", "no cache"])
@pytest.mark.parametrize("params", SAMPLING.values(), ids=SAMPLING)
@pytest.mark.parametrize("fields", [TIED, UNTIED], ids=["tied", "untied"])
def test_it_draws_the_tokens_that_the_engine_of_corerl_draws(
    make: Any, fields: Any, params: SamplingParams, cache: bool, tmp_path: Path
) -> None:
    own = make(fields, cache=cache)
    known = TransformersEngine(ModelConfig(config=fields), TransformersConfig(), context())
    for name, engine in {"own": own, "known": known}.items():
        assert deliver(engine, fields, tmp_path / name) == ""
    whole = request(params)
    asked = evolve(whole, limits=np.array([params.max_tokens, 1, params.max_tokens, 2]))
    drawn, expected = own.generate(asked), known.generate(asked)
    assert np.diff(expected.offsets)[[1, 3]].max() <= 2
    for column in ("tokens", "offsets", "versions", "truncated"):
        assert getattr(drawn, column).tolist() == getattr(expected, column).tolist(), column
    np.testing.assert_allclose(drawn.logprobs, expected.logprobs, atol=1e-5, rtol=0)


def test_it_serves_nothing_without_weights(make: Any, tmp_path: Path) -> None:
    engine = make(TIED)
    asked = request(SAMPLING["plain"])
    with pytest.raises(EngineFailed, match="no weights have arrived yet"):
        engine.generate(asked)
    assert deliver(engine, TIED, tmp_path) == ""
    before = engine.generate(asked)
    freed = engine.sleep()
    assert freed == 4 * sum(parameter.numel() for parameter in random_model(TIED, seed=1).parameters())
    assert deliver(engine, TIED, tmp_path, version=1) == "the engine's weights are asleep; wake it up first"
    assert engine.wake_up() == freed and engine.wake_up() == 0
    with pytest.raises(EngineFailed):
        engine.generate(asked)
    assert deliver(engine, TIED, tmp_path, version=2) == ""
    after = engine.generate(asked)
    assert after.tokens.tolist() == before.tokens.tolist()
    assert set(after.versions.tolist()) == {2}
