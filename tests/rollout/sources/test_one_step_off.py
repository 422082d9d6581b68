"""Runs whose batches are each sampled while the one before is trained on, in this process."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve, frozen

from corerl.checkpoint.commit import read_state
from corerl.checkpoint.reader import CheckpointSource
from corerl.config.schema import ModelConfig
from corerl.data.prompts import Prompt, PromptStream, SortDigits
from corerl.driver.run import Summary
from corerl.engines.base import GenerateRequest, Generation, SamplingParams
from corerl.engines.fake import FakeEngine
from corerl.engines.fleet import NoneLeft
from corerl.engines.specs import FakeConfig
from corerl.errors import CheckpointError, DataError, EngineFailed, RewardError
from corerl.models.tokenizer import load_tokenizer
from corerl.ops.noise import gumbel, hash_keys
from corerl.rollout.rewards.base import Reward
from corerl.rollout.rewards.lookup import resolve_reward
from corerl.rollout.sampler import Sampler
from corerl.rollout.sources.base import BatchSampler, Scored, Synchronous
from corerl.rollout.sources.one_step_off import OneStepOff
from corerl.rollout.sources.recorded import SavedRollouts
from corerl.testing.compare import weights_apart
from corerl.testing.tolerances import LOSS, WEIGHTS_L2
from tests import reference
from tests.end_to_end.command import numbers
from tests.engines.models import context, plain_logprobs, random_model, update
from tests.in_process import execute_here, small

STEPS, PROMPTS, SAMPLES, TEMPERATURE, LR, SEED = 5, 4, 4, 0.8, 1e-3, 3
CHARACTERS = "0123456789>s"
FIELDS = {
    "model_type": "qwen3",
    "vocab_size": 16,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "tie_word_embeddings": True,
    "initializer_range": 0.1,
}


def overrides(model: Path) -> list[str]:
    """Of the settings that `tests.reference` has."""
    return [
        *(f"model.path={model}", "model.config={}", f"run.steps={STEPS}", f"run.seed={SEED}"),
        *("rollout.source=one-step-off", "rollout.save=true", f"rollout.temperature={TEMPERATURE}"),
        *(f"rollout.prompts={PROMPTS}", f"rollout.samples={SAMPLES}", "rollout.replicas=2"),
        *(f"algorithm.entropy_coef={reference.ENTROPY}", f"algorithm.kl_coef={reference.KL}"),
        *(f"algorithms.grpo.clip_low={reference.CLIP_LOW}", f"algorithms.grpo.clip_high={reference.CLIP_HIGH}"),
        *(f"train.optimizer.lr={LR}", f"train.optimizer.betas={list(reference.BETAS)}"),
        *(f"train.optimizer.eps={reference.EPS}", f"train.optimizer.weight_decay={reference.DECAY}"),
        *(f"train.optimizer.clip_norm={reference.CLIP_NORM}", "train.schedule={}"),
        *("checkpoint.every=2", "checkpoint.keep=0"),
    ]


@frozen
class Ran:
    model: Path  # what it began with
    directory: Path
    summary: Summary


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    directory = tmp_path_factory.mktemp("one-step-off")
    model = directory / "model"
    random_model(FIELDS, seed=1).save_pretrained(model)
    return Ran(model, directory / "run", execute_here(small(directory, *overrides(model))))


# ---- against a loop written out --------------------------------------------------------------------------------------


def by_hand(model: Any, prompts: list[Prompt], step: int) -> list[tuple[list[int], list[int], list[float], float]]:
    """(prompt, response, log-probs, reward) of each sample, token by token and without a cache."""
    found = []
    for prompt, sample in itertools.product(prompts, range(SAMPLES)):
        key = torch.tensor(hash_keys(SEED, step, np.array([prompt.index]), np.array([sample])))
        start = [1, *(4 + CHARACTERS.index(character) for character in prompt.text)]
        response: list[int] = []
        logprobs: list[float] = []
        while len(response) < 7 and response[-1:] != [2]:
            # Of the last entry, that of one more token, whichever it is.
            logprob = plain_logprobs(model, [*start, *response, 0], TEMPERATURE)[-1]
            response.append(int((logprob + gumbel(key, len(response), 16)[0]).argmax()))
            logprobs.append(float(logprob[response[-1]]))
        text = "".join(CHARACTERS[token - 4] for token in response if token >= 4)
        right = sum(got == wanted for got, wanted in zip(text, sorted(prompt.text[:5]), strict=False))
        found.append((start, response, logprobs, right / max(len(text), 5)))
    return found


def test_it_is_the_loop_in_which_each_batch_is_drawn_by_the_weights_from_before_the_last_step(ran: Ran) -> None:
    stream = PromptStream(SortDigits(held_out=16, seed=SEED), seed=SEED)
    start = random_model(FIELDS, seed=1)
    batches: list[list[reference.Sample]] = []
    rollouts = list(SavedRollouts(ran.directory, steps=STEPS, vocab_size=16))
    for step, kept in enumerate(rollouts):
        model = random_model(FIELDS, seed=1)
        before = batches[: max(step - 1, 0)]
        weights = reference.train(ran.model, before, [LR] * len(before), [TEMPERATURE] * len(before)).weights
        model.load_state_dict({name: torch.tensor(value) for name, value in weights.items()}, strict=False)
        drawn = by_hand(model, stream.take(PROMPTS), step)
        rewards = np.array([reward for *_, reward in drawn]).reshape(PROMPTS, SAMPLES)
        apart = rewards.std(axis=1, ddof=1, keepdims=True)
        advantages = ((rewards - rewards.mean(axis=1, keepdims=True)) / (apart + 1e-6)).ravel()
        batches.append(
            [
                reference.Sample(
                    tokens=torch.tensor(prompt + response),
                    chosen=torch.tensor([False] * len(prompt) + [True] * len(response)),
                    advantages=torch.full((len(prompt + response),), float(advantage)),
                    old=torch.tensor([0.0] * len(prompt) + logprobs),
                    reference=torch.cat(
                        [
                            torch.zeros(1),
                            plain_logprobs(start, prompt + response, TEMPERATURE)[
                                torch.arange(len(prompt + response) - 1), torch.tensor((prompt + response)[1:])
                            ],
                        ]
                    ),
                )
                for (prompt, response, logprobs, _), advantage in zip(drawn, advantages, strict=True)
            ]
        )
        batch = kept.rollout.batch
        assert batch.tokens.tolist() == [token for prompt, response, *_ in drawn for token in prompt + response]
        assert set(batch.columns["versions"][batch.columns["loss_mask"]]) == {max(step - 1, 0)}
        np.testing.assert_allclose(kept.rewards, rewards.ravel(), rtol=1e-6)
    bare = reference.train(ran.model, batches, [LR] * STEPS, [TEMPERATURE] * STEPS)
    lines = numbers(ran.directory)
    assert [line["train/loss"] for line in lines] == pytest.approx(bare.losses, rel=LOSS.relative, abs=LOSS.absolute)
    assert [line["rollout/staleness_max"] for line in lines] == [0.0, 1.0, 1.0, 1.0, 1.0]
    source = CheckpointSource(ran.directory / f"checkpoints/step-{STEPS:08d}/actor", "master")
    found = {name: source.read(name, (0,) * len(shape), shape).numpy() for name, shape in source.shapes.items()}
    assert weights_apart(found, bare.weights) < WEIGHTS_L2


# ---- resume ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [2, 4])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(ran: Ran, tmp_path: Path, step: int) -> None:
    checkpoint = ran.directory / f"checkpoints/step-{step:08d}"
    assert read_state(checkpoint)["source"].keys() == {"rollout_step", "prompts", "sampled"}
    execute_here(small(tmp_path, *overrides(ran.model), f"checkpoint.resume={checkpoint}"))
    assert numbers(tmp_path / "run") == numbers(ran.directory)[step:]
    for number in range(step, STEPS):
        name = f"rollouts/step-{number:08d}.npz"
        with np.load(tmp_path / "run" / name) as found, np.load(ran.directory / name) as wanted:
            assert [each for each in wanted.files if not np.array_equal(found[each], wanted[each])] == []
    last = f"checkpoints/step-{STEPS:08d}/actor/rank-00000.safetensors"
    assert (tmp_path / "run" / last).read_bytes() == (ran.directory / last).read_bytes()


# ---- the source alone ------------------------------------------------------------------------------------------------

TOKENIZER = load_tokenizer(tokenizer=f"characters:{CHARACTERS}", path="")
REWARD = resolve_reward("position-match", {})


@pytest.fixture
def engine(tmp_path: Path) -> FakeEngine:
    engine = FakeEngine(ModelConfig(), FakeConfig(), context())
    push(engine, 0, tmp_path)
    return engine


def push(engine: FakeEngine, version: int, directory: Path) -> None:
    update([engine], {"w": torch.ones(2)}, version=version, path=directory)


def draws(generate: Callable[[GenerateRequest], Generation], reward: Reward = REWARD) -> BatchSampler:
    return BatchSampler(
        stream=PromptStream(SortDigits(held_out=10, seed=7), seed=7),
        sampler=Sampler(tokenizer=TOKENIZER, generate=generate, seed=7),
        reward=reward,
        params=SamplingParams(max_tokens=6, stop_tokens=(2,)),
        prompts=3,
        samples=2,
    )


def one_step_off(
    engine: FakeEngine, *, aside: Callable[[GenerateRequest], Generation] | None = None, reward: Reward = REWARD
) -> OneStepOff:
    here = draws(engine.generate, reward)
    there = evolve(here, sampler=Sampler(tokenizer=TOKENIZER, generate=aside or engine.generate, seed=7))
    return OneStepOff(here, there, steps=4)


def versions(scored: Scored) -> set[int]:
    batch = scored.rollout.batch
    return set(batch.columns["versions"][batch.columns["loss_mask"]].tolist())


def test_an_update_waits_for_the_batch_in_flight_and_not_for_its_rewards(engine: FakeEngine, tmp_path: Path) -> None:
    sampling, scoring, may_sample, may_score = (threading.Event() for _ in range(4))

    def aside(request: GenerateRequest) -> Generation:
        sampling.set()
        assert may_sample.wait(60)
        return engine.generate(request)

    def reward(prompt: Prompt, response: str) -> float:
        if threading.current_thread() is not threading.main_thread():
            scoring.set()
            assert may_score.wait(60)
        return len(response)

    source = one_step_off(engine, aside=aside, reward=Reward(name="slow", function=reward))
    assert versions(next(source)) == {0}
    assert sampling.wait(60)
    updated = threading.Event()

    def pushing() -> None:
        with source.updating(1):
            push(engine, 1, tmp_path)
        updated.set()

    thread = threading.Thread(target=pushing)
    thread.start()
    assert scoring.is_set() is False and not updated.wait(0.2)
    may_sample.set()
    assert updated.wait(60) and scoring.wait(60)  # while its first reward is still being made
    may_score.set()
    thread.join()
    second = next(source)
    assert (versions(second), second.step) == ({0}, 1)
    assert versions(next(source)) == {1}


def test_prompts_and_noise_are_those_of_a_synchronous_run(engine: FakeEngine) -> None:
    ahead, synchronous = list(one_step_off(engine)), list(Synchronous(draws(engine.generate), steps=4))
    assert [each.rollout.texts for each in ahead] == [each.rollout.texts for each in synchronous]
    assert [each.step for each in ahead] == [0, 1, 2, 3]


def test_a_failure_in_flight_is_raised_before_weights_change_and_its_thread_has_ended(engine: FakeEngine) -> None:
    def fails(request: GenerateRequest) -> Generation:
        raise EngineFailed("engine-0 is broken")

    def broken(prompt: Prompt, response: str) -> float:
        raise ValueError("broken")

    source = one_step_off(engine, aside=fails)
    assert next(source).step == 0
    assert source.position.keys() == {"rollout_step", "prompts"}
    with pytest.raises(EngineFailed, match="^engine-0 is broken$"):
        with source.updating(1):
            raise AssertionError("it must not come to this")
    with pytest.raises(EngineFailed, match="^engine-0 is broken$"):
        next(source)
    assert not [thread for thread in threading.enumerate() if thread.name == "rollout"]
    with pytest.raises(RewardError, match="all 6 samples failed"):
        next(one_step_off(engine, reward=Reward(name="broken", function=broken)))


def test_where_no_engine_is_left_the_batch_is_drawn_anew_by_those_in_their_place(
    engine: FakeEngine, tmp_path: Path
) -> None:
    def dead(request: GenerateRequest) -> Generation:
        raise NoneLeft("engine-0: its process died")

    undisturbed, disturbed = one_step_off(engine), one_step_off(engine, aside=dead)
    for step in range(4):
        wanted, found = next(undisturbed), next(disturbed)
        with disturbed.updating(step):
            pass  # the update goes on, and brings weights to new engines
        assert [prompt.index for prompt in found.rollout.prompts] == [prompt.index for prompt in wanted.rollout.prompts]
        assert found.rollout.texts == wanted.rollout.texts  # the same version here


def test_the_batch_in_flight_is_a_part_of_a_checkpoint(engine: FakeEngine, tmp_path: Path) -> None:
    source = one_step_off(engine)
    next(source)
    position = source.position
    source.save(tmp_path / "checkpoint")
    rest = [each.rollout.texts for each in source]
    with source.updating(1):
        push(engine, 1, tmp_path)  # which would draw another one
    resumed = one_step_off(engine)
    resumed.restore(position, tmp_path / "checkpoint")
    assert resumed.position == position  # as it is saved again where a run has nothing left to train
    assert next(resumed).rollout.texts == rest[0]
    synchronous = Synchronous(draws(engine.generate), steps=4)
    synchronous.restore(position, tmp_path / "checkpoint")
    indices = [prompt.index for prompt in next(synchronous).rollout.prompts]
    again = one_step_off(engine)
    again.restore(position, tmp_path / "checkpoint")
    assert [prompt.index for prompt in next(again).rollout.prompts] == indices  # by any source that it goes on with
    with pytest.raises(DataError, match="cannot read the rollout batch .*step-00000001.npz"):
        one_step_off(engine).restore(position, tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="seed=7"):
        one_step_off(engine).restore({**position, "prompts": {**position["prompts"], "seed": 8}}, tmp_path)
