"""Runs whose batches are each sampled while the one before is trained on, in this process."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import frozen

from corerl.checkpoint.commit import read_state
from corerl.checkpoint.reader import CheckpointSource
from corerl.data.prompts import Prompt, PromptStream, SortDigits
from corerl.driver.run import Summary
from corerl.engines.base import GenerateRequest, Generation
from corerl.errors import CheckpointError, DataError, EngineFailed, RewardError
from corerl.ops.noise import gumbel, hash_keys
from corerl.rollout.rewards.base import Reward
from corerl.rollout.sources.base import Scored
from corerl.rollout.sources.one_step_off import OneStepOff
from corerl.rollout.sources.recorded import read_rollout, saved_rollouts
from corerl.rollout.sources.synchronous import Synchronous
from corerl_testing.compare import weights_apart
from corerl_testing.tolerances import LOSS, WEIGHTS_L2
from tests import reference
from tests.end_to_end.command import numbers
from tests.engines.models import plain_logprobs, random_model
from tests.engines.services import serve
from tests.in_process import execute_here, small
from tests.rollout.engines import LIMIT, Engines, aside
from tests.rollout.sources import drawing
from tests.rollout.sources.conftest import Use

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
    rollouts = saved_rollouts(ran.directory)
    assert len(rollouts) == STEPS
    for step, kept in enumerate(map(read_rollout, rollouts)):
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


class Held(Engines):
    """Replicas that begin to draw what comes after the first batch, and go on when they may."""

    def __init__(self, replicas: int = 1) -> None:
        super().__init__(replicas)
        self.sampling, self.may_sample = threading.Event(), threading.Event()
        self.sampled = 0  # rows

    def draw(self, replica: int, request: GenerateRequest) -> Generation:
        if len(self.keys) > drawing.PROMPTS * drawing.SAMPLES:
            self.sampling.set()
            assert self.may_sample.wait(LIMIT)
        drawn = super().draw(replica, request)
        self.sampled += len(drawn)
        return drawn


def one_step_off(engines: Engines, *, steps: int = 4, seed: int = 7, **parts: Any) -> OneStepOff:
    return OneStepOff(drawing.drawing(engines, seed=seed, **parts), engines.fleet, steps=steps)


def synchronous(engines: Engines) -> Synchronous:
    return Synchronous(drawing.drawing(engines), steps=4)


def versions(scored: Scored) -> set[int]:
    batch = scored.rollout.batch
    return set(batch.columns["versions"][batch.columns["loss_mask"]].tolist())


def texts(steps: Sequence[Scored]) -> list[list[str]]:
    return [each.rollout.texts for each in steps]


def indices(scored: Scored) -> list[int]:
    return [prompt.index for prompt in scored.rollout.prompts]


def test_an_update_waits_for_the_batch_in_flight_and_not_for_its_rewards(
    use: Use[Engines], monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = use(Held())
    scoring, may_score = threading.Event(), threading.Event()

    def reward(prompt: Prompt, response: str) -> float:
        if engines.sampling.is_set():
            scoring.set()
            assert may_score.wait(LIMIT)
        return len(response)

    source = one_step_off(engines, reward=aside(Reward(name="slow", function=reward)))
    assert versions(engines.next(source)) == {0}
    assert engines.sampling.wait(LIMIT)
    until = engines.fleet.until

    async def let_go(ended: Coroutine[Any, Any, Any]) -> bool:  # once the update waits
        engines.may_sample.set()
        return await until(ended)

    monkeypatch.setattr(engines.fleet, "until", let_go)
    with source.updating(1):
        assert engines.sampled == 12
        engines.take_weights(1)
    assert scoring.wait(LIMIT)  # of it, which goes on: its first reward is still being made
    may_score.set()
    second = engines.next(source)
    assert (versions(second), second.step) == ({0}, 1)
    assert versions(engines.next(source)) == {1}
    source.close()


def test_each_batch_is_of_the_weights_before_those_that_it_is_trained_with(engines: Engines) -> None:
    steps = list(engines.trained_on(one_step_off(engines)))
    assert [versions(each) for each in steps] == [{0}, {0}, {1}, {2}]
    assert engines.log.count("pause") == 0  # nobody is interrupted


def test_prompts_and_noise_are_those_of_a_synchronous_run(engines: Engines) -> None:
    source = one_step_off(engines)
    ahead, on_demand = engines.rest(source), engines.rest(synchronous(engines))
    assert texts(ahead) == texts(on_demand)
    assert [each.step for each in ahead] == [0, 1, 2, 3]
    assert engines.run(source.next()) is None


def test_a_failure_in_flight_is_raised_before_weights_change_and_again_by_whoever_asks(use: Use[Engines]) -> None:
    def broken(prompt: Prompt, response: str) -> float:
        raise ValueError("broken")

    engines = use(Held(2))
    source = one_step_off(engines)
    assert engines.next(source).step == 0
    engines.failure = EngineFailed("engine-0 is broken")
    engines.may_sample.set()
    with pytest.raises(EngineFailed, match="^engine-0 is broken$"):
        with source.updating(1):
            raise AssertionError("it must not come to this")
    assert source.position.keys() == {"rollout_step", "prompts"}
    with pytest.raises(EngineFailed, match="^engine-0 is broken$"):
        engines.next(source)
    source.close()
    well = use(Engines())
    with pytest.raises(RewardError, match="all 6 samples failed"):
        well.next(one_step_off(well, reward=aside(Reward(name="broken", function=broken))))


@pytest.mark.parametrize("at", ["updating", "next"])
def test_where_no_engine_is_left_the_batch_is_drawn_anew_by_those_in_their_place(at: str, use: Use[Engines]) -> None:
    undisturbed, engines = use(Engines(2)), use(Held(2))
    wanted = undisturbed.rest(one_step_off(undisturbed))
    source = one_step_off(engines)

    def ensure() -> None:
        engines.update(source, engines.version + 1)  # as a run brings weights to new engines

    steps = [engines.next(source)]
    assert engines.sampling.wait(LIMIT)
    engines.die()
    engines.may_sample.set()
    if at == "updating":
        ensure()
    for _ in range(3):
        scored = serve(engines.fleet, source.next(), ensure)
        assert scored is not None
        steps.append(scored)
    assert (texts(steps), [*map(indices, steps)]) == (texts(wanted), [*map(indices, wanted)])
    assert sorted(line for line in engines.log if line.startswith("re")) == ["receive", "replace 0", "replace 1"]
    assert [versions(each) for each in steps] == [{0}, {1}, {1}, {1}]


def test_a_checkpoint_that_is_written_without_any_engine_holds_no_batch(use: Use[Engines], tmp_path: Path) -> None:
    undisturbed, engines, resumed_engines = use(Engines()), use(Held()), use(Engines())
    wanted = undisturbed.rest(one_step_off(undisturbed))
    source = one_step_off(engines)
    engines.next(source)
    assert engines.sampling.wait(LIMIT)
    engines.die()
    engines.may_sample.set()
    position = source.position
    source.save(tmp_path)
    source.close()
    assert position.keys() == {"rollout_step", "prompts"} and not list(tmp_path.iterdir())
    resumed = one_step_off(resumed_engines)
    resumed.restore(position, tmp_path)
    assert texts(resumed_engines.rest(resumed)) == texts(wanted[1:])


def test_the_batch_in_flight_is_a_part_of_a_checkpoint(engines: Engines, tmp_path: Path) -> None:
    source = one_step_off(engines)
    engines.next(source)
    position = source.position
    source.save(tmp_path / "checkpoint")
    rest = texts(engines.rest(source))
    engines.policy = 1  # which would draw another one
    resumed = one_step_off(engines)
    resumed.restore(position, tmp_path / "checkpoint")
    assert resumed.position == position  # as it is saved again where a run has nothing left to train
    assert engines.next(resumed).rollout.texts == rest[0]
    on_demand = synchronous(engines)
    on_demand.restore(position, tmp_path / "checkpoint")
    again = one_step_off(engines)
    again.restore(position, tmp_path / "checkpoint")
    assert indices(engines.next(again)) == indices(engines.next(on_demand))  # by any source that it goes on with
    with pytest.raises(DataError, match="cannot read the rollout batch .*step-00000001.npz"):
        one_step_off(engines).restore(position, tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="seed=7"):
        one_step_off(engines).restore({**position, "prompts": {**position["prompts"], "seed": 8}}, tmp_path)
    others = one_step_off(engines)  # of data that replace the checkpoint's: its batch is not trained on
    others._draws.stream._source.replaces = position["prompts"]["data"]
    others.restore(position, tmp_path / "checkpoint")
    assert not {*indices(engines.next(others))} & {*indices(engines.next(again))}
    for each in (resumed, again, others):
        each.close()


def test_after_updates_that_are_void_a_checkpoints_batch_is_as_many_versions_behind_as_it_was(
    engines: Engines, tmp_path: Path
) -> None:
    source = one_step_off(engines)
    engines.next(source)
    position = source.position
    source.save(tmp_path / "checkpoint")
    sampled = engines.next(source)
    anew = one_step_off(engines)
    anew.restore(position, tmp_path / "checkpoint")
    anew.renumber(3)
    found = engines.next(anew)
    mask = sampled.rollout.batch.columns["loss_mask"]
    versions = [each.rollout.batch.columns["versions"][mask] for each in (found, sampled)]
    np.testing.assert_array_equal(versions[0], versions[1] + 3)
    assert found.rollout.texts == sampled.rollout.texts
    for each in (source, anew):
        each.close()
