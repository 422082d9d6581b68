"""Rollout steps of what is finished first: single responses and episodes, by engines whose pace the test sets."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from corerl.algorithms.advantages import spread
from corerl.data.prompts import Prompt
from corerl.engines.base import GenerateRequest, Generation
from corerl.errors import EngineFailed, RewardError
from corerl.rollout.asynchronous import AsynchronousRollouts
from corerl.rollout.recorded import write_rollout
from corerl.rollout.rewards import Reward
from corerl.rollout.sampled import DynamicSampling
from corerl.rollout.sampler import Rollout, Sampler
from corerl.rollout.scoring import Scores
from corerl_agents.chat_server import ChatServer
from corerl_agents.config import EpisodesConfig
from corerl_agents.episodes import Episode, EpisodeFunction
from corerl_agents.sampler import EpisodeSampler
from tests.engines.services import request_of, serve
from tests.rollout import sampling
from tests.rollout.conftest import Use
from tests.rollout.engines import LIMIT, Engines, logprobs, row_of
from tests.rollout.samplers import context
from tests.rollout.sampling import PARAMS, PROMPTS, REWARD, SAMPLES, TOKENIZER, indices, upcoming, versions


class Slow(Engines):
    """A replica that is slow with two rows or groups at any time, before version `until`: these get a token in each
    call, and the rest under the next weights; or, every second one of them, once they are too old."""

    def __init__(self, *, until: int, max_staleness: int) -> None:
        super().__init__(width=1)
        self._until = until
        self._max_staleness = max_staleness
        self._slow: dict[int, tuple[int, int]] = {}  # noise of a first row -> when its first token came, and its rest

    def draw(self, replica: int, request: GenerateRequest) -> Generation:
        with self.changing:
            key, busy = int(request.noise_keys[0]), [first for first, _ in self._slow.values()]
            places = 2 - sum(self.version - first <= self._max_staleness for first in busy)
            if key not in self._slow and places > 0 and self.version < self._until:
                patience = self._max_staleness if len(busy) % 2 else 0
                self._slow[key] = self.version, self.version + 1 + patience
            if key not in self._slow or self.version >= min(self._until, self._slow[key][1]):
                return self.drawn(request)
            drawn = self.drawn(request, 1)
            if drawn.unfinished.any():
                self.wait_for_pause()
            return drawn


class OneBatchAtFirst(Engines):
    """Draws one batch, and no more before that is handed out."""

    def __init__(self) -> None:
        super().__init__(calls=1, width=PROMPTS * SAMPLES)
        self.handed_out = threading.Event()

    def draw(self, replica: int, request: GenerateRequest) -> Generation:
        assert len(self.keys) == PROMPTS * SAMPLES or self.handed_out.wait(LIMIT)
        return super().draw(replica, request)


def two_turns(episode: Episode) -> float | None:
    """Two tokens at most, then those that the tool's leave: worth what the first answer is, if it is a number."""
    messages = episode.messages
    call = episode.chat(messages, max_tokens=2)["message"]
    messages += [call, {"role": "tool", "content": "9>"}]
    episode.chat(messages)
    return float(call["content"]) if call["content"].isdigit() else None


Sampling = Callable[..., Sampler]


@pytest.fixture
def episodes(use: Use[Engines]) -> Iterator[Sampling]:
    """Makes samplers of the episodes that a function plays; at the end none goes on."""
    fronts: list[ChatServer] = []

    def make(engines: Engines, function: Callable[..., Any], **config: Any) -> Sampler:
        fronts.append(ChatServer(engines.fleet.loop, temperature=1.0, top_p=1.0))
        return EpisodeSampler(
            EpisodesConfig(**config),
            context(tokenizer=TOKENIZER, generate=engines.fleet.generate, seed=7, calls=12),
            function=EpisodeFunction(name="mine:play", function=function),
            server=fronts[-1],
        )

    yield make
    join_episodes()
    for front in fronts:
        front.close()


def join_episodes() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("function of "):
            thread.join(LIMIT)
            assert not thread.is_alive()


def asynchronous(
    engines: Engines, *, max_staleness: int = 1, steps: int = 6, episodes: Sampler | None = None, **fields: Any
) -> AsynchronousRollouts:
    """Of single responses, or of `episodes`."""
    fields = {"max_staleness": max_staleness, "steps": steps, **fields}
    if episodes is not None:
        fields |= {"sampler": episodes, "params": evolve(PARAMS, max_tokens=10)}
        fields["reward"] = evolve(fields.get("reward", REWARD), failed_value=-1.0)
    return AsynchronousRollouts(**sampling.given(engines, **fields))


@pytest.mark.parametrize(
    ("max_staleness", "function"), [(1, None), (2, None), (3, None), (1, two_turns), (3, two_turns)]
)
def test_no_token_is_staler_than_allowed(
    max_staleness: int, function: Callable[..., Any] | None, use: Use[Engines], episodes: Sampling, tmp_path: Path
) -> None:
    engines = use(Slow(until=10, max_staleness=max_staleness))
    played = episodes(engines, function) if function else None
    source = asynchronous(engines, max_staleness=max_staleness, steps=14, episodes=played)
    counts = []
    for scored in engines.trained_on(source):
        write_rollout(tmp_path, scored)
        counts.append(scored.counts)

    # Counted again from what was written down: the batch of step n was trained on under version n.
    oldest, continued, trained = [], 0, []
    for step, path in enumerate(sorted(tmp_path.iterdir())):
        with np.load(path) as file:
            versions, mask, offsets = file["columns/versions"], file["columns/loss_mask"], file["offsets"]
            told = np.where(mask, logprobs(file["tokens"], versions), 0)
            np.testing.assert_array_equal(file["columns/rollout_logprobs"], told)  # each of the weights that drew it
            for sample in range(PROMPTS * SAMPLES):
                drawn = versions[offsets[sample] : offsets[sample + 1]][mask[offsets[sample] : offsets[sample + 1]]]
                assert (np.diff(drawn) >= 0).all() and 1 <= len(drawn) <= (8 if function else 6)
                oldest.append(step - drawn.min())
                continued += len(set(drawn)) > 1
    assert max(oldest) == max_staleness and min(oldest) >= 0
    dropped = sum(count["stale_samples"] for count in counts)
    # Where episodes may be three updates old, their threads' turns decide whether one is interrupted, or grows too old.
    chance = max_staleness == 3 and function is not None
    assert dropped > 0 or chance
    assert sum(count["stale_tokens"] for count in counts) >= dropped
    assert continued > 0 or max_staleness == 1 or chance

    # What was dropped is drawn again, and no prompt is lost or trained on twice.
    for path in tmp_path.iterdir():
        with np.load(path) as file:
            starts = file["offsets"][:-1][::SAMPLES]
            trained += [tuple(file["tokens"][start + 1 : start + 6]) for start in starts]
    assert len(set(trained)) == len(trained) == 14 * PROMPTS
    assert len(set(engines.keys)) == len(engines.keys)  # with noise of its own


@pytest.mark.parametrize("function", [None, two_turns])
def test_a_resumed_source_restarts_exactly_what_was_in_flight(
    function: Callable[..., Any] | None, use: Use[Engines], episodes: Sampling
) -> None:
    def begin(engines: Engines) -> AsynchronousRollouts:
        return asynchronous(engines, max_staleness=2, episodes=episodes(engines, function) if function else None)

    engines = use(Slow(until=9, max_staleness=2))
    source = begin(engines)
    first = []
    for scored in engines.trained_on(source):
        first += [prompt.index for prompt in scored.rollout.prompts]
        position = source.position
        if scored.step == 2:
            break
    source.close()
    engines.die()
    resumed_engines = use(Engines())
    resumed = begin(resumed_engines)
    resumed.restore(position)
    resumed_engines.update(resumed, 3)
    rest = [prompt.index for scored in resumed_engines.rest(resumed) for prompt in scored.rollout.prompts]
    resumed.close()
    assert sorted(first + rest) == sorted(upcoming(18))
    assert not set(resumed_engines.keys) & set(engines.keys)
    assert (resumed.position["rollout_step"], resumed.position["prompts"]["sources"][0]["offset"]) == (6, 18)
    assert "returned" in position["prompts"] and "returned" not in resumed.position["prompts"]


def test_groups_without_spread_are_replaced_as_often_as_allowed(engines: Engines) -> None:
    times: Counter[int] = Counter()

    def by_index(prompt: Prompt, response: str) -> float:
        """Half of all prompts have groups whose rewards differ."""
        times[prompt.index] += 1
        return prompt.index % 2 * times[prompt.index]

    odd = Reward(name="odd", function=by_index)
    source = asynchronous(engines, reward=odd, dynamic_sampling=DynamicSampling(useful=spread, max_replacements=9))
    steps = list(engines.trained_on(source))
    assert all(prompt.index % 2 for scored in steps for prompt in scored.rollout.prompts)
    assert all(scored.counts["groups_missing"] == 0 for scored in steps)
    assert sum(scored.counts["groups_set_aside"] for scored in steps) > 0
    one = Reward(name="one", function=lambda prompt, response: 1.0)
    never = asynchronous(engines, reward=one, dynamic_sampling=DynamicSampling(useful=spread, max_replacements=1))
    for scored in engines.trained_on(never):
        assert scored.counts["groups_missing"] == PROMPTS == len(scored.rollout.prompts)
        assert scored.counts["groups_set_aside"] == (1 + 1) * PROMPTS


def test_groups_may_become_stale_while_they_are_scored(use: Use[Engines]) -> None:
    engines, scoring, go = use(OneBatchAtFirst()), threading.Event(), threading.Event()

    class Late:
        def score(self, rollout: Rollout, *, partial: bool = False) -> Scores:
            rewards = np.arange(len(rollout.batch), dtype=np.float32)
            if engines.handed_out.is_set() and not go.is_set():
                scoring.set()
                assert go.wait(LIMIT)
                rewards[:] = 1.0
            return Scores(rewards=rewards, failures={}, first="")

    source = asynchronous(
        engines, steps=2, reward=Late(), dynamic_sampling=DynamicSampling(useful=spread, max_replacements=9)
    )
    assert {prompt.index for prompt in engines.next(source).rollout.prompts} == set(upcoming(PROMPTS))
    engines.handed_out.set()
    assert scoring.wait(LIMIT)  # of the second batch, drawn by version 0
    for version in (1, 2):
        engines.update(source, version)
    go.set()
    second = engines.next(source)
    source.close()
    assert sorted(prompt.index for prompt in second.rollout.prompts) == sorted(upcoming(2 * PROMPTS)[PROMPTS:])
    assert versions(second) == {2}
    assert second.counts["stale_samples"] == PROMPTS * SAMPLES
    assert (second.counts["groups_set_aside"], second.counts["groups_missing"]) == (0, 0)


def test_stale_groups_do_not_fill_a_step(use: Use[Engines]) -> None:
    engines = use(OneBatchAtFirst())

    class Equal:
        def score(self, rollout: Rollout, *, partial: bool = False) -> Scores:
            rewards = np.arange(len(rollout.batch)) * (not engines.handed_out.is_set())
            return Scores(rewards=rewards.astype(np.float32), failures={}, first="")

    source = asynchronous(
        engines, steps=2, reward=Equal(), dynamic_sampling=DynamicSampling(useful=spread, max_replacements=1)
    )
    engines.next(source)
    engines.handed_out.set()
    engines.settle()
    assert len(source._set_aside) == PROMPTS  # drawn by version 0
    for version in (1, 2):
        engines.update(source, version)
    second = engines.next(source)
    source.close()
    assert versions(second) == {2}
    assert second.counts["groups_missing"] == PROMPTS


# ---- episodes --------------------------------------------------------------------------------------------------------


def test_an_episode_spans_updates_and_keeps_its_tokens(engines: Engines, episodes: Sampling) -> None:
    asked, updated = threading.Semaphore(0), threading.Event()
    first = upcoming(1)[0]

    def waits(episode: Episode) -> float | None:
        if episode.prompt.index != first:
            return two_turns(episode)
        messages = episode.messages
        messages += [episode.chat(messages, max_tokens=1)["message"], {"role": "tool", "content": "9>"}]
        asked.release()
        assert updated.wait(LIMIT)
        episode.chat(messages)
        return 0.0

    source = asynchronous(engines, episodes=episodes(engines, waits), steps=3, max_staleness=2)
    for scored in engines.trained_on(source):
        if scored.step == 0:
            assert all(asked.acquire(timeout=LIMIT) for _ in range(SAMPLES))
        if scored.step == 1:
            updated.set()
        of = [prompt.index for prompt in scored.rollout.prompts]
        if first in of:
            break
    source.close()
    assert scored.step == 2  # not before: it waited while steps 0 and 1 were trained on
    batch, rows = scored.rollout.batch, np.flatnonzero(scored.rollout.batch.row_columns["group"] == of.index(first))
    for row in rows:
        span = slice(*batch.offsets[row : row + 2])
        sampled = batch.columns["loss_mask"][span]
        versions = batch.columns["versions"][span][sampled]
        assert versions[0] == 0 and set(versions[1:].tolist()) <= {1, 2} and len(versions) > 1
        np.testing.assert_array_equal(
            batch.columns["rollout_logprobs"][span][sampled], logprobs(batch.tokens[span][sampled], versions)
        )


# ---- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", ["next", "updating"])
def test_an_engines_error_is_raised_at_the_next_call(at: str, use: Use[Engines]) -> None:
    engines = use(Engines(2, calls=2, width=1))
    source = asynchronous(engines)
    engines.next(source)
    engines.settle()
    engines.failure = EngineFailed("engine-1 is broken")
    with pytest.raises(EngineFailed, match="^engine-1 is broken$"):
        engines.rest(source)
    engines.settle()  # though it is not closed
    if at == "updating":
        with pytest.raises(EngineFailed, match="^engine-1 is broken$"):
            engines.update(source, 1)
    else:
        with pytest.raises(EngineFailed, match="^engine-1 is broken$"):
            engines.next(source)


def test_an_update_leaves_a_failure_of_scoring_to_next(use: Use[Engines]) -> None:
    engines = use(OneBatchAtFirst())

    def score(rollout: Rollout, *, partial: bool = False) -> Scores:
        if engines.handed_out.is_set():
            raise RewardError("it is broken")
        return Scores(rewards=np.zeros(len(rollout.batch), np.float32))

    source = asynchronous(engines, reward=SimpleNamespace(score=score))
    engines.next(source)
    engines.handed_out.set()
    engines.settle()
    engines.update(source, 1)
    assert source.position["prompts"].keys() >= {"returned"}
    with pytest.raises(RewardError, match="^it is broken$"):
        engines.next(source)
    source.close()


def test_no_sample_is_lost_when_all_engines_die(use: Use[Engines]) -> None:
    class Held(Engines):
        """Replicas that draw when they may."""

        def __init__(self) -> None:
            super().__init__(2, width=1)
            self.may_draw = threading.Event()
            self.may_draw.set()

        def draw(self, replica: int, request: GenerateRequest) -> Generation:
            assert self.may_draw.wait(LIMIT)
            return super().draw(replica, request)

    engines = use(Held())
    source = asynchronous(engines, steps=6)
    steps = []
    for scored in engines.trained_on(source):
        steps.append(scored)
        begun = source.position["begun"]
        if scored.step == 1:  # an evaluation, which finds out, and waits for those in their place
            engines.die()
            request = evolve(request_of([[1]], first_key=5), params=PARAMS)
            urgent = engines.fleet.generate(request, urgent=True)
            answer = serve(engines.fleet, urgent, lambda: engines.update(source, engines.version))
            assert answer.tokens.tolist() == row_of(5, 0, 6)
        if scored.step == 3:  # nobody knows before the update
            engines.die()
        assert source.position["begun"] == begun
    assert sorted(index for each in steps for index in indices(each)) == sorted(upcoming(18))
    assert sorted(line for line in engines.log if line.startswith("replace")) == ["replace 0"] * 2 + ["replace 1"] * 2
