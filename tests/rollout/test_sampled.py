"""Rollout steps in order: sampled on demand, prompt by prompt, or one step ahead."""

from __future__ import annotations

import signal
import threading
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from corerl.algorithms.advantages import spread
from corerl.data.prompts import Prompt, PromptStream, SortDigits
from corerl.engines.base import GenerateRequest, Generation
from corerl.errors import CheckpointError, DataError, EngineFailed, RewardError, WorkerDied
from corerl.rollout.rewards import Reward, position_match
from corerl.rollout.sampled import DynamicSampling, OrderedRollouts
from corerl.rollout.sampler import Rollout
from corerl.rollout.scored import ScoredRollout
from corerl.rollout.scoring import AsyncScorer, RewardScorer, Scorer, Scores
from corerl.rollout.source import Arrived, Policies
from tests.engines.services import serve
from tests.rollout.conftest import Use
from tests.rollout.engines import LIMIT, Engines, at_once
from tests.rollout.sampling import (
    PARAMS,
    PROMPTS,
    REWARD,
    SAMPLES,
    assert_same,
    indices,
    source,
    stream,
    upcoming,
    versions,
)

KINDS: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "streamed": {"singly": True},
    "one-step-off": {"ahead": True},
}


def texts(steps: Sequence[ScoredRollout]) -> list[list[str]]:
    return [each.rollout.texts for each in steps]


def in_caller(engines: Engines, reward: Reward = REWARD) -> AsyncScorer:
    """Scores in the thread that waits, as a synchronous run does."""
    return AsyncScorer(RewardScorer(reward), engines.fleet.loop.in_caller)


# ---- all of them -----------------------------------------------------------------------------------------------------


def test_steps_have_fresh_prompts_noise_and_their_rewards(engines: Engines) -> None:
    begun = source(engines, reward=in_caller(engines))
    steps = engines.rest(begun)
    assert [scored.step for scored in steps] == [0, 1, 2, 3]
    assert engines.rest(begun) == []  # as often as it is asked
    assert [index for scored in steps for index in indices(scored)] == [each.index for each in stream().take(12)]
    assert len(set(engines.keys)) == len(engines.keys) == 24
    for scored in steps:
        expected = [
            position_match(scored.rollout.prompts[row // 2], text) for row, text in enumerate(scored.rollout.texts)
        ]
        assert scored.rewards.tolist() == pytest.approx(expected)
        assert scored.exact_match == 0.0
        assert scored.seconds.keys() == {"rollout", "reward"}
        assert [shown.response for shown in scored.shown(2)] == [scored.rollout.texts[0], scored.rollout.texts[2]]
        every = scored.samples()
        assert [each.response for each in every] == scored.rollout.texts
        assert [each.prompt for each in every[::2]] == [prompt.text for prompt in scored.rollout.prompts]
        assert [each.reward for each in every] == scored.rewards.tolist()


@pytest.mark.parametrize("kind", ["streamed", "one-step-off"])
def test_samples_are_those_of_a_synchronous_source(kind: str, use: Use[Engines]) -> None:
    engines, other = use(Engines()), use(Engines())
    begun = source(engines, **KINDS[kind])
    steps = engines.rest(begun)
    assert engines.run(begun.next()) is None
    for found, wanted in zip(steps, other.rest(source(other, reward=in_caller(other))), strict=True):
        assert_same(found, wanted)
        assert found.seconds.keys() == {"rollout"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_source_continues_with_the_same_samples(kind: str, engines: Engines, tmp_path: Path) -> None:
    whole = source(engines, **KINDS[kind])
    for _ in range(2):
        engines.next(whole)
    position = whole.position
    whole.save(tmp_path)
    rest = engines.rest(whole)
    resumed = source(engines, **KINDS[kind])
    resumed.restore(position, tmp_path)
    assert resumed.position == position  # as it is saved again where a run has nothing left to train
    for found, wanted in zip(engines.rest(resumed), rest, strict=True):
        assert_same(found, wanted)
    with pytest.raises(CheckpointError, match="seed=7"):
        source(engines, seed=8, **KINDS[kind]).restore(position)


@pytest.mark.parametrize("kind", ["synchronous", "streamed"])
def test_dying_replicas_change_no_sample(kind: str, use: Use[Engines]) -> None:
    undisturbed = use(Engines(2))
    wanted = undisturbed.rest(source(undisturbed))
    for deaths, log in ((1, []), (2, ["receive", "replace 0", "replace 1"])):
        engines = use(Engines(2))
        begun = source(engines, **KINDS[kind])
        steps = [engines.next(begun)]
        engines.deaths = deaths
        steps += engines.rest(begun)
        assert sorted(engines.log) == log
        for found, expected in zip(steps, wanted, strict=True):
            assert_same(found, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_failed_rewards_end_a_step_only_if_all_failed(kind: str, use: Use[Engines]) -> None:
    def odd(prompt: Prompt, response: str) -> float:
        if prompt.index % 2:
            raise ValueError("odd")
        return 0.5

    engines = use(Engines())
    for step in engines.rest(
        source(engines, reward=Reward(name="odd", function=odd, failed_value=-1.0), **KINDS[kind])
    ):
        rows = [prompt.index % 2 for prompt in step.rollout.prompts for _ in range(SAMPLES)]
        assert step.rewards.tolist() == [-1.0 if row else 0.5 for row in rows]
        assert step.failures == ({"raised": sum(rows)} if any(rows) else {})
        prompt = next((prompt for prompt in step.rollout.prompts if prompt.index % 2), None)
        assert prompt is None or "raised ValueError: odd" in step.first_failure

    def never(prompt: Prompt, response: str) -> float:
        raise ValueError("out of luck")

    failing = source(engines, reward=Reward(name="never", function=never), **KINDS[kind])
    with pytest.raises(RewardError, match=r"^reward 'never' raised ValueError: out of luck .*; all 6 samples failed$"):
        engines.next(failing)
    assert failing.position["rollout_step"] == 0


def test_an_engines_error_is_raised_once_and_unchanged(use: Use[Engines]) -> None:
    engines = use(Engines(2))
    engines.failure = EngineFailed("engine-1 is broken")
    for _ in range(2):  # not that the engines have ended, which follows from it
        with pytest.raises(EngineFailed, match="^engine-1 is broken$"):
            engines.next(source(engines))

    class Cutting(Engines):
        def draw(self, replica: int, request: GenerateRequest) -> Generation:
            return self.drawn(request, 1)

    cutting = use(Cutting())
    with pytest.raises(EngineFailed, match="^5 of 6 responses came back unfinished, but the engines were not paused"):
        cutting.next(source(cutting))

    dying = use(Engines(restarts=1))
    dying.deaths = 9
    with pytest.raises(WorkerDied, match="^engine-0: its process died during generate") as raised:
        dying.next(source(dying))
    assert raised.value.__notes__ == ["the engine had already been restarted 1 time (rollout.restarts)"]
    assert dying.log == ["replace 0", "receive"]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A shell starts what runs in the background with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interruption_ends_the_wait(use: Use[Engines]) -> None:
    class Interrupting(Engines):
        def draw(self, replica: int, request: GenerateRequest) -> Generation:
            if len(self.keys) > 6:  # the second attempt: who waits has scored the first one
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                with self.changing:
                    assert self.changing.wait_for(lambda: bool(self._ends), LIMIT)  # until all are killed
            return self.drawn(request)

    engines = use(Interrupting())
    equal = in_caller(engines, Reward(name="equal", function=lambda prompt, response: 1.0))
    begun = source(engines, reward=equal, refill=DynamicSampling(useful=spread, attempts=9))
    with pytest.raises(KeyboardInterrupt):
        engines.next(begun)
    assert begun.position["rollout_step"] == 0
    begun.close()

    def interrupted(prompt: Prompt, response: str) -> float:
        signal.raise_signal(signal.SIGINT)
        return 1.0

    again = use(Engines())
    with pytest.raises(KeyboardInterrupt):
        again.next(source(again, reward=in_caller(again, Reward(name="interrupted", function=interrupted))))


# ---- prompt by prompt ------------------------------------------------------------------------------------------------


class OneByOne(Engines):
    """A prompt's samples are generated once the test allows them."""

    def __init__(self) -> None:
        super().__init__(width=SAMPLES)
        self.allowed: set[int] = set()  # noise of first rows

    def draw(self, replica: int, request: GenerateRequest) -> Generation:
        with self.changing:
            key = int(request.noise_keys[0])
            self.changing.notify_all()  # it is asked for
            assert self.changing.wait_for(lambda: key in self.allowed or bool(self._ends), LIMIT)
        return super().draw(replica, request)

    def allow(self, keys: Sequence[int]) -> None:
        with self.changing:
            self.allowed |= set(keys)
            self.changing.notify_all()

    def wait_for(self, rows: int) -> list[int]:
        """Noise of as many rows, once they are asked for."""
        with self.changing:
            assert self.changing.wait_for(lambda: len(self.keys) >= rows, LIMIT)
            return self.keys[:rows]


def arrivals(engines: Engines, begun: OrderedRollouts) -> list[Arrived]:
    return list(iter(lambda: engines.run(begun.arrived()), None))


def test_arrived_prompts_are_the_parts_of_their_step(engines: Engines, use: Use[Engines]) -> None:
    other = use(Engines())
    begun = source(engines, singly=True)
    for number, step in enumerate(other.rest(source(other))):
        parts = arrivals(engines, begun) if number != 1 else []  # a step is the same if nobody asks for them
        assert sorted(place for part in parts for place in part.prompts) == ([] if number == 1 else [0, 1, 2])
        for part in parts:
            rows = step.rollout.prompt_rows(part.prompts)
            np.testing.assert_array_equal(part.rewards, step.rewards[rows])
            np.testing.assert_array_equal(part.batch.tokens, step.rollout.batch.take_rows(rows).tokens)
            assert part.of == PROMPTS
        assert_same(engines.next(begun), step)
    assert arrivals(engines, begun) == [] and engines.rest(begun) == []


def test_a_prompt_is_handed_out_while_others_are_sampled(use: Use[OneByOne]) -> None:
    engines = use(OneByOne())
    progress: list[tuple[int, int]] = []
    begun = source(engines, singly=True, on_progress=lambda *counts: progress.append(counts))
    parts: list[Arrived | None] = []
    waiting = threading.Thread(target=lambda: parts.append(engines.run(begun.arrived())))
    waiting.start()
    keys = engines.wait_for(PROMPTS * SAMPLES)[::SAMPLES]
    assert parts == []
    engines.allow(keys[1:2])
    waiting.join(LIMIT)
    (first,) = parts
    assert first is not None and len(first.prompts) == 1
    engines.allow(keys)
    places = [place for part in [first, *arrivals(engines, begun)] for place in part.prompts]
    assert sorted(places) == list(range(PROMPTS))
    assert (
        engines.next(begun).rollout.batch.row_columns["group"].tolist() == np.repeat(range(PROMPTS), SAMPLES).tolist()
    )
    assert progress[0] == (0, PROMPTS * SAMPLES)
    begun.close()


# ---- one step ahead --------------------------------------------------------------------------------------------------


class Held(Engines):
    """Replicas that generate what comes after the first step once they may."""

    def __init__(self, replicas: int = 1) -> None:
        super().__init__(replicas)
        self.sampling, self.may_sample = threading.Event(), threading.Event()
        self.sampled = 0  # rows

    def draw(self, replica: int, request: GenerateRequest) -> Generation:
        if len(self.keys) > PROMPTS * SAMPLES:
            self.sampling.set()
            assert self.may_sample.wait(LIMIT)
        drawn = super().draw(replica, request)
        self.sampled += len(drawn)
        return drawn


def ahead(engines: Engines, **fields: Any) -> OrderedRollouts:
    return source(engines, ahead=True, **fields)


def test_an_update_waits_for_samples_but_not_for_rewards(use: Use[Engines], monkeypatch: pytest.MonkeyPatch) -> None:
    engines = use(Held())
    scoring, may_score = threading.Event(), threading.Event()

    def reward(prompt: Prompt, response: str) -> float:
        if engines.sampling.is_set():
            scoring.set()
            assert may_score.wait(LIMIT)
        return len(response)

    begun = ahead(engines, reward=Reward(name="slow", function=reward))
    assert versions(engines.next(begun)) == {0}
    assert engines.sampling.wait(LIMIT)
    until = engines.fleet.until

    async def let_go(ended: Coroutine[Any, Any, Any]) -> bool:  # once the update waits
        engines.may_sample.set()
        return await until(ended)

    monkeypatch.setattr(engines.fleet, "until", let_go)
    with begun.updating(Policies(version=1)):
        assert engines.sampled == 12
        engines.take_weights(1)
    assert scoring.wait(LIMIT)  # its first reward is still being computed
    may_score.set()
    second = engines.next(begun)
    assert (versions(second), second.step) == ({0}, 1)
    assert versions(engines.next(begun)) == {1}
    begun.close()


def test_each_step_is_one_version_behind(engines: Engines) -> None:
    refill = DynamicSampling(useful=spread, attempts=2)
    for fields in ({}, {"refill": refill, "reward": at_once(ByIndex())}):
        engines.take_weights(0)
        steps = list(engines.trained_on(ahead(engines, **fields)))
        assert [versions(each) for each in steps] == [{0}, {0}, {1}, {2}]
    assert engines.log.count("pause") == 0  # nobody is interrupted


def test_a_failure_ahead_is_raised_before_weights_change(use: Use[Engines]) -> None:
    engines = use(Held(2))
    begun = ahead(engines)
    assert engines.next(begun).step == 0
    engines.failure = EngineFailed("engine-0 is broken")
    engines.may_sample.set()
    with pytest.raises(EngineFailed, match="^engine-0 is broken$"):
        with begun.updating(Policies(version=1)):
            raise AssertionError("it must not come to this")
    assert begun.position.keys() == {"rollout_step", "prompts"}
    with pytest.raises(EngineFailed, match="^engine-0 is broken$"):
        engines.next(begun)
    begun.close()


def test_a_step_is_handed_out_before_an_unreadable_prompt_ahead(engines: Engines) -> None:
    def check(prompt: Prompt) -> str:
        if prompt.index == wanted[PROMPTS + 1]:
            raise DataError("it has no tokens")
        return ""

    wanted = upcoming(2 * PROMPTS)
    begun = ahead(engines, stream=PromptStream(SortDigits(held_out=10, seed=7), seed=7, check=check))
    assert indices(engines.next(begun)) == wanted[:PROMPTS]
    begins = stream()
    begins.restore(begun.position["prompts"])
    assert [prompt.index for prompt in begins.take(PROMPTS)] == wanted[PROMPTS:]
    with pytest.raises(DataError, match="it has no tokens"):
        engines.next(begun)
    begun.close()


@pytest.mark.parametrize("at", ["updating", "next", "save"])
def test_without_any_engine_the_step_ahead_is_sampled_again(at: str, use: Use[Engines], tmp_path: Path) -> None:
    undisturbed, engines = use(Engines(2)), use(Held(2))
    wanted = undisturbed.rest(ahead(undisturbed))
    begun = ahead(engines)

    def ensure() -> None:
        engines.update(begun, engines.version + 1)  # as a run brings weights to new engines

    steps = [engines.next(begun)]
    assert engines.sampling.wait(LIMIT)
    engines.die()
    engines.may_sample.set()
    if at == "updating":
        ensure()
    if at == "save":
        position = begun.position
        begun.save(tmp_path)
        assert position.keys() == {"rollout_step", "prompts"} and not list(tmp_path.iterdir())
        begun.close()
        engines.fleet.replace(engines.fleet.died)
        engines.take_weights(1)
        begun = ahead(engines)
        begun.restore(position, tmp_path)
    for _ in range(3):
        scored = serve(engines.fleet, begun.next(), ensure)
        assert scored is not None
        steps.append(scored)
    assert (texts(steps), [*map(indices, steps)]) == (texts(wanted), [*map(indices, wanted)])
    assert sorted(line for line in engines.log if line.startswith("re")) == ["receive", "replace 0", "replace 1"]
    assert [versions(each) for each in steps] == [{0}, {1}, {1}, {1}]


def test_a_checkpoint_contains_the_step_ahead(engines: Engines, tmp_path: Path) -> None:
    begun = ahead(engines)
    engines.next(begun)
    position = begun.position
    begun.save(tmp_path / "checkpoint")
    rest = texts(engines.rest(begun))
    engines.policy = 1  # which would sample another one
    resumed, again, on_demand = ahead(engines), ahead(engines), source(engines)
    for each in (resumed, again, on_demand):
        each.restore(position, tmp_path / "checkpoint")
    again.renumber(3)  # after updates that are void its samples are as many versions behind as they were
    assert engines.next(resumed).rollout.texts == rest[0]
    assert versions(engines.next(again)) == {3}
    assert engines.next(on_demand).rollout.texts != rest[0]  # any other source samples the same prompts
    with pytest.raises(DataError, match="cannot read the rollout batch .*step-00000001.npz"):
        ahead(engines).restore(position, tmp_path / "elsewhere")
    others = ahead(engines)  # of data that replace the checkpoint's: its samples are not trained on
    others.stream._source.replaces = position["prompts"]["data"]
    others.restore(position, tmp_path / "checkpoint")
    assert not {*indices(engines.next(others))} & {each.index for each in stream().take(6)}
    for each in (resumed, again, others):
        each.close()


# ---- dynamic sampling ------------------------------------------------------------------------------------------------


class ByIndex:
    """Half of all prompts have groups whose rewards differ."""

    def score(self, rollout: Rollout, *, part: bool = False) -> Scores:
        groups, samples = rollout.batch.row_columns["group"], rollout.batch.row_columns["sample"]
        odd = np.array([rollout.prompts[group].index % 2 for group in groups])
        return Scores(rewards=(odd * samples).astype(np.float32), failures={"raised": 1}, first="the first")


class Equal:
    def score(self, rollout: Rollout, *, part: bool = False) -> Scores:
        ones = np.ones(len(rollout.batch), np.float32)
        return Scores(rewards=ones, parts={"one": (float(len(ones)), len(ones))}, values={"one": ones})


def refilled(engines: Engines, attempts: int, reward: Scorer | Reward, **fields: Any) -> OrderedRollouts:
    refill = DynamicSampling(useful=spread, attempts=attempts)
    return source(engines, reward=at_once(reward), **{"prompts": 4, "refill": refill, **fields})


@pytest.mark.parametrize("kind", ["synchronous", "one-step-off"])
def test_groups_without_spread_are_replaced_by_later_prompts(kind: str, engines: Engines) -> None:
    begun, upcoming = refilled(engines, 20, ByIndex(), **KINDS[kind]), stream()
    for scored in engines.rest(begun):
        drawn = [prompt for _ in range(scored.counts["attempts"]) for prompt in upcoming.take(4)]
        odd = [prompt for prompt in drawn if prompt.index % 2]
        assert list(scored.rollout.prompts) == odd[:4]
        assert scored.counts == {
            "attempts": len(drawn) // 4,
            "groups_set_aside": len(drawn) - len(odd),
            "groups_unused": len(odd) - 4,
            "groups_missing": 0,
        }
        assert scored.rewards.tolist() == [0.0, 1.0] * 4
        assert scored.rollout.batch.row_columns["group"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
        assert len(scored.rollout.texts) == len(scored.rollout.batch) == 8
        assert (scored.failures, scored.first_failure) == ({"raised": scored.counts["attempts"]}, "the first")


def test_missing_groups_are_filled_with_dropped_ones(engines: Engines) -> None:
    scored = engines.next(refilled(engines, 2, Equal()))
    assert scored.counts == {"attempts": 3, "groups_set_aside": 12, "groups_unused": 0, "groups_missing": 4}
    assert [prompt.index for prompt in scored.rollout.prompts] == [each.index for each in stream().take(4)]
    assert len(scored.rollout.batch) == 8
    assert scored.parts == {"one": (24.0, 24)}  # over all samples of the step


def by_parts(prompt: Prompt, response: str) -> dict[str, float]:
    """A length that differs, and an outcome that differs for prompts of odd numbers alone."""
    return {"right": float(prompt.index % 2 * (len(response) > 3)), "length": 0.1 * len(response)}


def test_a_part_of_the_reward_may_decide(engines: Engines) -> None:
    reward = Reward(name="parts", function=by_parts, weights={"right": 0.0, "length": 1.0})
    refill = DynamicSampling(useful=spread, attempts=40, part="right")
    scored = engines.next(refilled(engines, 0, reward, samples=6, refill=refill))
    assert scored.rewards.tolist() == pytest.approx([0.1 * len(text) for text in scored.rollout.texts])
    assert all(prompt.index % 2 for prompt in scored.rollout.prompts) and scored.counts["groups_missing"] == 0
    by_sum = engines.next(refilled(engines, 0, reward, samples=6, refill=evolve(refill, part="")))
    assert by_sum.counts["groups_set_aside"] < scored.counts["groups_set_aside"]

    wrong = DynamicSampling(useful=spread, attempts=1, part="rigth")
    with pytest.raises(RewardError, match=r"dynamic_sampling_on: 'rigth' .* 'right', 'length'; did you mean 'right'"):
        engines.next(refilled(engines, 0, reward, refill=wrong))


# ---- what a step has -------------------------------------------------------------------------------------------------


def test_groups_are_taken_in_the_given_order(engines: Engines) -> None:
    whole = evolve(engines.next(source(engines)), rewards=np.arange(6, dtype=np.float32))
    taken = whole.take_prompts(np.array([2, 0]))
    assert taken.rewards.tolist() == [4.0, 5.0, 0.0, 1.0]
    assert taken.rollout.texts == [whole.rollout.texts[row] for row in (4, 5, 0, 1)]
    assert taken.rollout.prompts == (whole.rollout.prompts[2], whole.rollout.prompts[0])
    assert taken.rollout.batch.row_columns["group"].tolist() == [0, 0, 1, 1]


def test_a_repeated_prompt_gets_other_noise(engines: Engines) -> None:
    prompt = [Prompt(index=5, text="00005>", answer="00005")]
    sampler = source(engines).sampler
    requests = [
        sampler.request(prompt * 2, rollout_step=0, samples=2, params=PARAMS, attempt=attempt)
        for attempt in (0, 0, 1, 2)
    ]
    assert requests[0].noise_keys.tolist() == requests[1].noise_keys.tolist()
    assert len({key for each in requests for key in each.noise_keys.tolist()}) == 3 * 2 * 2
