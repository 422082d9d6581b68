"""A trainer that computes something else than the engines is found before it has trained."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from attrs import evolve

from corerl.config.schema import AlgorithmConfig, TrainConfig, WeightsConfig
from corerl.data.prompts import Prompt
from corerl.driver import logprob_check as module
from corerl.driver.logprob_check import LogprobCheck, bound_of, spread_over
from corerl.engines.base import GenerateRequest, Generation, SamplingParams
from corerl.errors import LogprobMismatch
from corerl.models.tokenizer import character_tokenizer
from corerl.pictures import FoundPicture
from corerl.rollout.recorded import ROLLOUTS, file_of, read_rollout
from corerl.types import SampleBatch
from corerl.weights.manifest import Bucket
from corerl_transformers.engine import TransformersEngine
from tests.driver.fakes import Ears, progress, told
from tests.driver.forgetful import forgetting, model_with
from tests.end_to_end.command import content, steps_done
from tests.in_process import execute_here, small
from tests.marked import marked
from tests.rollout.samplers import prompt_sampler
from tests.tiny_pictures import TinyOptions, TinyReader


def samples(lengths: Sequence[int], versions: Sequence[int], *, prompt: int = 1) -> SampleBatch:
    """Samples of these lengths, each after one token of prompt, and drawn by one version each."""
    batch = marked(*("." + "x" * (length - 1) for length in lengths))
    mask = batch.columns["loss_mask"]
    return evolve(batch, tokens=batch.tokens + 100).with_columns(
        rollout_logprobs=np.where(mask, np.float32(-1.0), np.float32(0.0)),
        versions=np.where(mask, np.repeat(versions, lengths), 0),
    )


# ---- what is compared ------------------------------------------------------------------------------------------------


def test_the_difference_names_the_loss_token_that_differs_most() -> None:
    trainer = np.array([9.0, -1.5, -1.0, 9.0, -1.0, -4.0, -1.25], np.float32)  # prompts: tokens 0 and 3
    for value, mean, largest in (
        (-1.0, "0.75", "3, of token 2 in sample 1 (id 105; trainer -4, engine -1)"),
        (math.nan, "nan", "nan, of token 2 in sample 0 (id 102; trainer nan, engine -1)"),
    ):
        trainer[2] = value
        with pytest.raises(LogprobMismatch, match=re.escape(f"the largest difference is {largest}")) as caught:
            make_check().judge(samples([3, 4], [0, 0]), trainer)
        assert f"by {mean} on average over 5 sampled tokens" in caught.value.message


def test_each_engines_own_difference_is_named() -> None:
    trainer = np.array([9.0, -1.5, -1.0, 9.0, -1.0, -4.0, -1.25], np.float32)
    batch = samples([3, 4], [0, 0])
    for engines, bound, named, look in (
        ([0, 2], 0.1, " (engine-0 by 0.25, engine-2 by 1.08)", "find the layer where they part: corerl doctor"),
        ([0, 2], 0.5, " (engine-0 by 0.25, engine-2 by 1.08)", "; engine-2 alone: look at the weights held there"),
        ([2, 2], 0.1, "", "find the layer where they part: corerl doctor"),
    ):
        with pytest.raises(LogprobMismatch, match=re.escape(f"over 5 sampled tokens{named}, wanted")) as caught:
            make_check(bound=bound).judge(batch.with_columns(engines=np.repeat(engines, [3, 4])), trainer)
        assert look in caught.value.message


def test_prompts_with_pictures_are_always_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "READ", 20)
    tokenizer = character_tokenizer("123")
    reader = TinyReader(TinyOptions(), None, tokenizer)  # whose placeholder is 2
    prompts = [Prompt(index=index, text="1" * (9 - index), answer="") for index in range(8)]
    shows = FoundPicture(reader=reader, reference="1x1:9")
    prompts.append(Prompt(index=8, text="2", answer="", pictures=(shows,)))

    async def generate(request: GenerateRequest, **_: Any) -> Generation:
        return Generation.nothing(request)

    sampler = prompt_sampler(tokenizer=tokenizer, generate=generate, seed=0, pictures=reader)
    monkeypatch.setattr(module, "PromptStream", lambda source, seed, check: SimpleNamespace(take=lambda count: prompts))
    source = Mock(checked={}, train=range(100))
    check = make_check(
        sampler=sampler, rollout=Mock(params=SamplingParams(max_tokens=1000, temperature=0.7), prompts=source)
    )
    batch = asyncio.run(check.sample())
    assert (len(batch), [picture.size for picture in batch.pictures]) == (9, [(1, 1)])
    prompts[8] = evolve(prompts[8], text="1", pictures=())
    assert len(asyncio.run(check.sample())) == 8


@pytest.mark.parametrize(
    ("algorithm", "precision", "weights", "bound"),
    [
        ({}, "float32", {}, 0.01),
        ({}, "bfloat16", {}, 0.1),
        ({}, "float32", {"dtype": "bfloat16"}, 0.1),  # a trainer in float32, an engine that is sent half of it
        ({}, "bfloat16", {"dtype": "float32"}, 0.1),
        ({}, "bfloat16", {"quantize": "fp8"}, 0.3),
        ({"mismatch_bound": 0.002}, "bfloat16", {}, 0.002),
    ],
)
def test_the_bound_is_the_coarser_sides_unless_set(algorithm: Any, precision: Any, weights: Any, bound: float) -> None:
    train = TrainConfig(precision=precision)
    assert bound_of(AlgorithmConfig(**algorithm), train=train, weights=WeightsConfig(**weights)) == bound


# ---- when ------------------------------------------------------------------------------------------------------------


def make_check(ears: Ears | None = None, **parts: Any) -> LogprobCheck:
    given = {"sampler": None, "rollout": None, "bound": 0.1, "stops": True, "every": 3, "run_dir": Path("runs/a b")}
    return LogprobCheck(**{**given, "progress": progress(ears), **parts})


AGREES = np.array([0.0, -1.0, -1.0], np.float32)
DIFFERS = np.array([0.0, -1.0, -1.5], np.float32)


def test_samples_without_loss_tokens_decide_nothing() -> None:
    check = make_check()
    check.judge(samples([1], [0]), np.zeros(1, np.float32))
    assert check.due
    assert len(spread_over(samples([3], [4]), since=5)) == 0
    assert spread_over(samples([3, 4, 1, 2], [5, 4, 5, 6]), since=5).lengths.tolist() == [2, 3]


def test_above_the_bound_it_stops_or_warns() -> None:
    said = (
        "trainer and engines compute different log-probs from the same weights: by 0.25 on average over 2 sampled "
        "tokens, wanted at most 0.1; the largest difference is 0.5, of token 2 in sample 0 (id 102; trainer -1.5, "
        "engine -1); find the layer where they part: corerl doctor --config 'runs/a b/config.toml' --layers; if so "
        "much is expected, as of an engine that quantizes, raise algorithm.mismatch_bound"
    )
    ears = Ears()
    with pytest.raises(LogprobMismatch) as caught:
        make_check(ears).judge(samples([3], [0]), DIFFERS)
    assert (caught.value.message, told(ears)) == (f"{said}, or set algorithm.on_mismatch='warn'", [])
    make_check(ears, stops=False).judge(samples([3], [0]), DIFFERS)
    assert told(ears) == [said]
    make_check(ears, bound=0.25).judge(samples([3], [0]), DIFFERS)
    with pytest.raises(LogprobMismatch, match="by nan on average"):
        make_check(ears).judge(samples([3], [0]), AGREES * np.nan)
    assert len(told(ears)) == 1


# ---- whole runs, against transformers' own engine --------------------------------------------------------------------


def saved(directory: Path) -> Path:
    model_with("softcap").save_pretrained(directory / "model")
    return directory / "model"


def test_a_wrong_trainer_is_stopped_before_its_first_step(tmp_path: Path) -> None:
    """The doctor's tests have all that `forgetful` can leave out."""
    model = saved(tmp_path)
    with pytest.raises(LogprobMismatch, match="over [1-9][0-9]+ sampled tokens, wanted at most 0.01") as caught:
        execute_here(small(tmp_path, *forgetting("softcap", model), "run.steps=2"))
    mean, largest = (float(each) for each in re.findall(r"(?:by|difference is) ([\d.]+)", caught.value.message))
    assert 0.1 < mean < largest
    assert steps_done(tmp_path / "run") == 0
    # With nothing left out, the same model agrees with itself, before training and after it.
    whole = [*forgetting("", model), f"run.dir={tmp_path}/whole", "run.steps=2", "algorithm.mismatch_bound=1e-4"]
    assert execute_here(small(tmp_path, *whole)).steps_done == 2


def test_a_resumed_run_is_checked_and_loses_nothing(tmp_path: Path) -> None:
    model = saved(tmp_path)
    execute_here(small(tmp_path, *forgetting("", model), "run.steps=1"))
    before = content(tmp_path / "run/checkpoints")
    resumed = [*forgetting("softcap", model), "run.steps=2", "checkpoint.resume=auto"]
    with pytest.raises(LogprobMismatch):
        execute_here(small(tmp_path, *resumed))
    assert (content(tmp_path / "run/checkpoints"), steps_done(tmp_path / "run")) == (before, 1)
    assert execute_here(small(tmp_path, *resumed, "algorithm.on_mismatch=warn")).steps_done == 2
    assert execute_here(small(tmp_path, *resumed, "run.steps=3", "algorithm.on_mismatch=off")).steps_done == 3


def test_where_rows_are_sampled_does_not_depend_on_a_check(tmp_path: Path) -> None:
    given = ["run.steps=4", "weights.every=2", "checkpoint.every=2", "checkpoint.keep=0", "rollout.replicas=2"]
    given += ["rollout.prompts=4", "rollout.samples=3", "rollout.save=true"]
    execute_here(small(tmp_path, *given))
    resume = f"checkpoint.resume={tmp_path}/run/checkpoints/step-00000002"
    execute_here(small(tmp_path, *given, f"run.dir={tmp_path}/resumed", resume))
    for step in (2, 3):
        whole, resumed = (
            read_rollout(file_of(tmp_path / run / ROLLOUTS, step)).rollout.batch.columns["engines"]
            for run in ("run", "resumed")
        )
        assert set(whole.tolist()) == {0, 1}
        np.testing.assert_array_equal(resumed, whole)


@pytest.mark.parametrize("own", [[], ["cluster.offload=always"], ["rollout.source=one-step-off"]], ids=str)
def test_engines_that_keep_their_first_weights_are_found(
    own: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, loaded = TransformersEngine._load, set[str]()

    def load_once(engine: TransformersEngine, bucket: Bucket, flat: torch.Tensor) -> None:
        first, *_ = bucket.views(flat)
        if first not in loaded:
            load(engine, bucket, flat)
        loaded.add(first)

    monkeypatch.setattr(TransformersEngine, "_load", load_once)
    monkeypatch.setattr(TransformersEngine, "sleep", lambda self: 0)  # which would drop them
    given = ["run.steps=4", "train.optimizer.lr=0.05", "train.schedule.warmup_steps=0", "weights.verify_every=0"]
    with pytest.raises(LogprobMismatch):
        execute_here(small(tmp_path, *given, *own))
    assert steps_done(tmp_path / "run") == 1
