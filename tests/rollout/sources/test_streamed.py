"""Steps whose prompts are handed out one by one."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from corerl.checkpoint.reader import CheckpointSource
from corerl.data.prompts import Prompt
from corerl.engines.base import GenerateRequest, Generation
from corerl.errors import RewardError
from corerl.rollout.rewards.base import Reward, Scoring
from corerl.rollout.sources.base import Arrived, Scored
from corerl.rollout.sources.streamed import Streamed
from corerl.rollout.sources.synchronous import Synchronous
from corerl_testing.compare import weights_apart
from corerl_testing.tolerances import GRAD_NORM, LOSS, WEIGHTS_L2
from tests.end_to_end.command import numbers
from tests.in_process import execute_here, small
from tests.rollout.engines import LIMIT, Engines, aside
from tests.rollout.sources.conftest import Use
from tests.rollout.sources.drawing import PROMPTS, REWARD, SAMPLES, drawing

STEPS = 3


def source(engines: Engines, *, reward: Reward = REWARD, told: object = None, seed: int = 7) -> Streamed:
    draws = drawing(engines, reward=aside(reward), seed=seed)
    return Streamed(draws, engines.fleet.loop, steps=STEPS, told=told)  # type: ignore[arg-type]


def arrived(engines: Engines, source: Streamed) -> Sequence[Arrived]:
    return engines.run(source.arrived())


def masters(run_dir: Path, step: int) -> dict[str, np.ndarray]:
    source = CheckpointSource(run_dir / f"checkpoints/step-{step:08d}/actor", "master")
    return {name: source.read(name, (0,) * len(shape), shape).numpy() for name, shape in source.shapes.items()}


def assert_same(found: Scored, wanted: Scored) -> None:
    assert (found.step, found.rollout.texts, found.rollout.prompts) == (
        wanted.step,
        wanted.rollout.texts,
        wanted.rollout.prompts,
    )
    np.testing.assert_array_equal(found.rewards, wanted.rewards)
    np.testing.assert_array_equal(found.rollout.batch.tokens, wanted.rollout.batch.tokens)
    np.testing.assert_array_equal(found.rollout.batch.rows["group"], wanted.rollout.batch.rows["group"])
    assert found.exact_match == wanted.exact_match
    assert found.failures == wanted.failures


class OneByOne(Engines):
    """A prompt's samples are drawn once the test lets them."""

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


def test_its_steps_are_those_of_a_synchronous_source_whether_anyone_asks_for_single_prompts(
    engines: Engines, use: Use[Engines]
) -> None:
    other = use(Engines())
    wanted = other.rest(Synchronous(drawing(other, reward=Scoring(REWARD, other.fleet.loop.in_caller)), steps=STEPS))
    begun = source(engines)
    for number, step in enumerate(wanted):
        parts: list[Arrived] = []
        while number != 1 and (fresh := arrived(engines, begun)):
            parts += fresh
        assert sorted(part.number for part in parts) == ([] if number == 1 else list(range(PROMPTS)))
        for part in parts:
            rows = step.rollout.batch.rows["group"] == part.number
            np.testing.assert_array_equal(part.scored.rewards, step.rewards[rows])
            assert part.scored.rollout.prompts == (step.rollout.prompts[part.number],)
            assert part.of == PROMPTS
        assert_same(engines.next(begun), step)
    assert arrived(engines, begun) == [] and engines.rest(begun) == []


def test_a_prompt_is_handed_out_while_others_are_sampled(use: Use[OneByOne]) -> None:
    engines = use(OneByOne())
    told: list[tuple[int, int]] = []
    begun = source(engines, told=lambda *counts: told.append(counts))
    waiting = threading.Thread(target=lambda: parts.extend(arrived(engines, begun)))
    parts: list[Arrived] = []
    waiting.start()
    keys = engines.wait_for(PROMPTS * SAMPLES)[::SAMPLES]
    assert parts == []
    engines.allow(keys[1:2])
    waiting.join(LIMIT)
    (first,) = parts
    engines.allow(keys)
    while fresh := arrived(engines, begun):
        parts += fresh
    assert parts[0] is first and sorted(part.number for part in parts) == list(range(PROMPTS))
    assert engines.next(begun).rollout.batch.rows["group"].tolist() == np.repeat(range(PROMPTS), SAMPLES).tolist()
    assert told[0] == (0, PROMPTS * SAMPLES)
    begun.close()


def test_a_resumed_source_draws_what_the_uninterrupted_one_does(engines: Engines) -> None:
    whole = source(engines)
    steps = [engines.next(whole)]
    position = whole.position
    steps += engines.rest(whole)
    resumed = source(engines)
    resumed.restore(position)
    for found, wanted in zip(engines.rest(resumed), steps[1:], strict=True):
        assert_same(found, wanted)


def test_rewards_that_fail_are_told_with_the_step_and_end_it_only_if_all_do(engines: Engines) -> None:
    def odd(prompt: Prompt, response: str) -> float:
        if prompt.index % 2:
            raise ValueError("odd")
        return 1.0

    begun = source(engines, reward=Reward(name="odd", function=odd))
    for step in engines.rest(begun):
        wanted = SAMPLES * sum(prompt.index % 2 for prompt in step.rollout.prompts)
        assert sum(step.failures.values()) == wanted and bool(step.first_failure) == bool(wanted)

    def never(prompt: Prompt, response: str) -> float:
        raise ValueError("out of luck")

    with pytest.raises(RewardError, match=rf"out of luck.*; all {PROMPTS * SAMPLES} samples failed"):
        engines.next(source(engines, reward=Reward(name="never", function=never)))


def test_engines_that_die_in_a_step_leave_it_as_it_would_have_been(engines: Engines, use: Use[Engines]) -> None:
    wanted, mortal = engines.rest(source(engines)), use(Engines(2))
    mortal.deaths = 2
    for found, step in zip(mortal.rest(source(mortal)), wanted, strict=True):
        assert_same(found, step)
    assert mortal.deaths == 0


# ---- whole runs ------------------------------------------------------------------------------------------------------

SETTINGS = [
    *("cluster.offload=never", "run.steps=5", "rollout.prompts=8", "rollout.samples=4", "algorithm.kl_coef=0.1"),
    *("algorithm.overlong=penalty", "algorithm.overlong_buffer=1", "train.tokens_per_micro_batch=64"),
]


@pytest.mark.parametrize(
    "own",
    [
        ["algorithm.aggregation=token-mean"],
        ["algorithm.aggregation=sequence-mean", "train.mini_batches=4"],
        ["algorithm.aggregation=constant-length", "train.epochs=2", "algorithm.old_logprobs=recompute"],
        ["algorithm.name=rloo", "algorithm.kl_in=reward", "algorithm.kl_target=0.01"],
    ],
    ids=["token-mean", "mini-batches", "epochs", "rloo"],
)
def test_a_streamed_run_is_the_synchronous_one_up_to_rounding(tmp_path: Path, own: list[str]) -> None:
    rows = {}
    for name in ("synchronous", "streamed"):
        execute_here(small(tmp_path, *SETTINGS, *own, f"rollout.source={name}", f"run.dir={tmp_path / name}"))
        rows[name] = numbers(tmp_path / name)
    assert len(rows["streamed"]) == len(rows["synchronous"]) == 5
    for found, wanted in zip(rows["streamed"], rows["synchronous"], strict=True):
        assert found.keys() == wanted.keys()
        for key in ("rollout/reward", "rollout/tokens", "train/lr", "train/skipped_steps", "rollout/staleness_max"):
            assert found[key] == wanted[key], key
        assert found["train/loss"] == pytest.approx(wanted["train/loss"], rel=LOSS.relative, abs=LOSS.absolute)
        assert found["train/grad_norm"] == pytest.approx(wanted["train/grad_norm"], rel=GRAD_NORM.relative)
    ends = [masters(tmp_path / name, 5) for name in rows]
    assert weights_apart(*ends) < WEIGHTS_L2


@pytest.mark.parametrize("aggregation", ["token-mean", "constant-length"])
def test_steps_without_loss_tokens_leave_no_gradients_behind(tmp_path: Path, aggregation: str) -> None:
    """Samples of a constant length count without them too."""
    settings = [f"algorithm.aggregation={aggregation}", "algorithm.overlong=mask", "algorithm.on_mismatch=off"]
    own = [*settings, "cluster.offload=never", "run.steps=8", "rollout.prompts=4", "rollout.samples=2"]
    own += ["rollout.max_tokens=2", "train.mini_batches=2", "train.epochs=2"]
    rows = {}
    for name in ("synchronous", "streamed"):
        execute_here(small(tmp_path, *own, f"rollout.source={name}", f"run.dir={tmp_path / name}"))
        rows[name] = numbers(tmp_path / name)
    skipped = ["train/loss" not in row for row in rows["streamed"]]
    assert any(skipped) and not all(skipped)
    for found, wanted in zip(rows["streamed"], rows["synchronous"], strict=True):
        assert found.keys() == wanted.keys()
        if "train/loss" in found:
            assert found["train/grad_norm"] == pytest.approx(
                wanted["train/grad_norm"], rel=GRAD_NORM.relative, abs=1e-9
            )
    assert weights_apart(*[masters(tmp_path / name, 8) for name in rows]) < WEIGHTS_L2
