"""Rollout steps that are sampled while the one before is trained on."""

from __future__ import annotations

import threading
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest

from corerl.data.prompts import Prompt, PromptStream, SortDigits
from corerl.engines.base import GenerateRequest, Generation
from corerl.errors import DataError, EngineFailed
from corerl.rollout.ordered import OneStepOffRollouts, OrderedRollouts
from corerl.rollout.rewards import Reward
from corerl.rollout.scored import ScoredRollout
from corerl.rollout.source import Policies
from tests.engines.services import serve
from tests.rollout.conftest import Use
from tests.rollout.engines import LIMIT, Engines
from tests.rollout.sampling import PROMPTS, SAMPLES, indices, source, stream, upcoming, versions


def texts(steps: Sequence[ScoredRollout]) -> list[list[str]]:
    return [each.rollout.texts for each in steps]


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
    return source(engines, kind=OneStepOffRollouts, **fields)


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


def test_an_engines_failure_ahead_is_raised_before_weights_change(use: Use[Engines]) -> None:
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


def test_a_step_is_trained_on_and_saved_before_an_unreadable_prompt_ahead(engines: Engines, tmp_path: Path) -> None:
    def check(prompt: Prompt) -> str:
        if prompt.index == wanted[PROMPTS + 1]:
            raise DataError("it has no tokens")
        return ""

    wanted = upcoming(2 * PROMPTS)
    begun = ahead(engines, stream=PromptStream(SortDigits(held_out=10, seed=7), seed=7, check=check))
    assert indices(engines.next(begun)) == wanted[:PROMPTS]
    engines.update(begun, 1)
    begun.save(tmp_path)
    assert not list(tmp_path.iterdir())
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
        engines.fleet.replace(engines.fleet.deaths)
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
    batch = engines.next(again).rollout.batch
    assert batch.columns["versions"].tolist() == (3 * batch.columns["loss_mask"]).tolist()
    assert engines.next(on_demand).rollout.texts != rest[0]  # any other source samples the same prompts
    with pytest.raises(DataError, match="cannot read the rollout batch .*step-00000001.npz"):
        ahead(engines).restore(position, tmp_path / "elsewhere")
    others = ahead(engines)  # of data that replace the checkpoint's: its samples are not trained on
    others.stream._source.replaces = position["prompts"]["data"]
    others.restore(position, tmp_path / "checkpoint")
    assert not {*indices(engines.next(others))} & {each.index for each in stream().take(6)}
    for each in (resumed, again, others):
        each.close()
