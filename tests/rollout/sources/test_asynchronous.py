"""Batches of what is finished first, single responses and episodes: by engines whose pace the test sets, and in a whole
run in this process."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from corerl.algorithms.advantages import spread
from corerl.config.schema import EpisodesConfig
from corerl.data.prompts import Prompt, PromptStream, SortDigits
from corerl.engines.base import GenerateRequest, Generation, SamplingParams
from corerl.errors import EngineFailed, RewardError
from corerl.event_loop import EventLoop
from corerl.models.tokenizer import load_tokenizer
from corerl.ops.noise import hash_keys
from corerl.rollout.agents.chat_server import ChatServer
from corerl.rollout.agents.episodes import Episode, EpisodeFunction, EpisodeScorer
from corerl.rollout.agents.play import EpisodeSampler
from corerl.rollout.rewards.base import Reward, Scorer, Scores
from corerl.rollout.rewards.lookup import resolve_reward
from corerl.rollout.sampler import Rollout, Sampler
from corerl.rollout.sources.asynchronous import Asynchronous, PromptGroup, Tally
from corerl.rollout.sources.base import BatchSampler, DynamicSampling, Source
from corerl.rollout.sources.recorded import RecordingSource
from corerl.types import FloatArray, IntArray
from tests.end_to_end.command import metrics
from tests.in_process import execute_here, small

TOKENIZER = load_tokenizer(tokenizer="characters:0123456789>s", path="")
REWARD = resolve_reward("position-match", {})
PARAMS = SamplingParams(max_tokens=6, stop_tokens=(2,))
PROMPTS, SAMPLES = 3, 2
LIMIT = 60.0  # seconds, against hangs


class Engines:
    """Replicas that answer at once. Before version `until` they are slow with two calls at any time: these get a token
    for each row, and the rest under the next weights; or, half of them, another token under each version and the rest
    once they are too old. Tokens are a function of the row's noise and of their place, log-probs of token and version.
    """

    def __init__(self, replicas: int = 1, *, until: int = 0, max_staleness: int = 0) -> None:
        self.replicas = replicas
        self.version = 0
        self.keys: list[int] = []  # of all rows that were begun
        self.asked: list[tuple[int, int, int]] = []  # replica, noise of a row, tokens of its response so far
        self.dead: set[int] = set()
        self.deaths = 0  # of those that are called next
        self.mended = 0
        self.failure: Exception | None = None
        self._until = until
        self._max_staleness = max_staleness
        self._slow: dict[int, int] = {}  # noise of a call's first row -> version of its first token
        self._changing = threading.Condition()
        self._paused = False

    def __len__(self) -> int:
        return self.replicas

    def serves(self, replica: int) -> bool:
        return replica not in self.dead

    def pause(self) -> None:
        with self._changing:
            self._paused = True
            self._changing.notify_all()

    def resume(self) -> None:
        with self._changing:
            self._paused = False

    def ensure_serving(self) -> None:
        self.mended += 1
        self.dead.clear()

    def draw(self, replica: int, request: GenerateRequest) -> Generation | None:
        if self.failure is not None:
            raise self.failure
        with self._changing:
            if self.deaths:
                self.deaths -= 1
                self.dead.add(replica)
                return None
            self.keys += request.noise_keys[request.begun == 0].tolist()
            rows = zip(request.noise_keys.tolist(), request.begun.tolist(), strict=True)
            self.asked += [(replica, key, begun) for key, begun in rows]
            key = int(request.noise_keys[0])
            asked_for = [each for each in self._slow.values() if self.version - each <= self._max_staleness]
            enough = self.version - self._slow.get(key, self.version) > (self._max_staleness if key % 2 else 0)
            if self.version >= self._until or enough or (key not in self._slow and len(asked_for) >= 2):
                return self._drawn(request, request.params.max_tokens)
            self._slow.setdefault(key, self.version)
            drawn = self._drawn(request, 1)
            if drawn.unfinished.any():
                assert self._changing.wait_for(lambda: self._paused, LIMIT)
            else:
                del self._slow[key]
            return drawn

    def _drawn(self, request: GenerateRequest, most: int) -> Generation:
        tokens: list[int] = []
        sizes, stopped = [], []
        for key, begun, left in zip(request.noise_keys, request.begun, request.left, strict=True):
            row: list[int] = []
            while len(row) < min(most, left) and row[-1:] != [2]:
                drawn = int(hash_keys(key, begun + len(row))[0] % 16)
                row.append(drawn if drawn not in (0, 1, 3) else 9)
            tokens += row
            sizes.append(len(row))
            stopped.append(row[-1:] == [2])
        whole = (np.array(sizes) == request.left) & ~np.array(stopped)
        return Generation(
            tokens=np.array(tokens),
            offsets=np.cumsum([0, *sizes]),
            logprobs=logprobs(np.array(tokens), np.full(len(tokens), self.version)),
            versions=np.full(len(tokens), self.version),
            truncated=whole,
            unfinished=~whole & ~np.array(stopped),
        )


def logprobs(tokens: IntArray, versions: IntArray) -> FloatArray:
    return -(tokens + versions / 64).astype(np.float32)


def two_turns(episode: Episode) -> float | None:
    """Two tokens at most, then those that the tool's leave: worth what the first answer is, if it is a number."""
    messages = episode.messages
    call = episode.chat(messages, max_tokens=2)["message"]
    messages += [call, {"role": "tool", "content": "9>"}]
    episode.chat(messages)
    return float(call["content"]) if call["content"].isdigit() else None


@pytest.fixture
def front() -> Iterator[ChatServer]:
    loop = EventLoop("rollouts")
    made = ChatServer(loop, temperature=1.0, top_p=1.0)
    yield made
    assert_soon(lambda: all(thread.name != "rollout episode" for thread in threading.enumerate()))  # which may ask
    made.close()
    loop.close()


def asynchronous(
    engines: Engines,
    *,
    max_staleness: int = 1,
    steps: int = 6,
    calls: int = 12,
    reward: Scorer = REWARD,
    refill: DynamicSampling | None = None,
    function: Callable[..., Any] | None = None,
    front: ChatServer | None = None,
    told: Callable[[int, int], None] | None = None,
    **config: Any,
) -> Asynchronous:
    """Of single responses, or of episodes that `function` plays."""
    sampler = Sampler(tokenizer=TOKENIZER, generate=Generation.nothing, seed=7)
    params = PARAMS
    if function is not None and front is not None:
        sampler = EpisodeSampler(
            tokenizer=TOKENIZER,
            generate=Generation.nothing,
            seed=7,
            function=EpisodeFunction(name="mine:play", function=function),
            front=front,
            config=EpisodesConfig(**config),
        )
        params, reward = evolve(PARAMS, max_tokens=10), EpisodeScorer(reward, failed_value=-1.0)
    draws = BatchSampler(
        stream=PromptStream(SortDigits(held_out=10, seed=7), seed=7),
        sampler=sampler,
        reward=reward,
        params=params,
        prompts=PROMPTS,
        samples=SAMPLES,
        refill=refill,
    )
    return Asynchronous(draws, engines, steps=steps, max_staleness=max_staleness, calls=calls, told=told)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(LIMIT)
        assert not thread.is_alive()


def trained_on(source: Source, engines: Engines) -> Iterator[Any]:
    """The batches of a loop whose every step makes one version."""
    with source.updating(0):
        pass
    for scored in source:
        yield scored
        with source.updating(scored.step + 1):
            engines.version = scored.step + 1
    source.close()


def upcoming(count: int) -> list[int]:
    return [prompt.index for prompt in PromptStream(SortDigits(held_out=10, seed=7), seed=7).take(count)]


@pytest.mark.parametrize(
    ("max_staleness", "function"), [(1, None), (2, None), (3, None), (1, two_turns), (3, two_turns)]
)
def test_no_token_that_is_trained_on_is_staler_than_allowed_however_slow_engines_are(
    max_staleness: int, function: Callable[..., Any] | None, front: ChatServer, tmp_path: Path
) -> None:
    engines = Engines(until=10, max_staleness=max_staleness)
    source = asynchronous(engines, max_staleness=max_staleness, steps=14, function=function, front=front)
    counts = [scored.counts for scored in trained_on(RecordingSource(source, tmp_path), engines)]

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
    # Where episodes may be three updates old, their threads' turns decide whether one grows too old.
    assert dropped > 0 or (max_staleness == 3 and function is not None)
    assert sum(count["stale_tokens"] for count in counts) >= dropped
    assert continued > 0 or max_staleness == 1

    # What was dropped is drawn again, and no prompt is lost or trained on twice.
    for path in tmp_path.iterdir():
        with np.load(path) as file:
            starts = file["offsets"][:-1][::SAMPLES]
            trained += [tuple(file["tokens"][start + 1 : start + 6]) for start in starts]
    assert len(set(trained)) == len(trained) == 14 * PROMPTS
    assert len(set(engines.keys)) == len(engines.keys)  # with noise of its own


def test_prompts_come_once_each_in_batches_of_whole_groups_that_are_scored(tmp_path: Path) -> None:
    engines = Engines(2)
    source = asynchronous(engines, calls=1)
    steps = list(trained_on(source, engines))
    assert [scored.step for scored in steps] == list(range(6))
    for scored in steps:
        assert scored.rollout.batch.rows["group"].tolist() == [0, 0, 1, 1, 2, 2]
        assert scored.rollout.batch.rows["sample"].tolist() == [0, 1] * 3
        expected = [REWARD(scored.rollout.prompts[row // 2], text) for row, text in enumerate(scored.rollout.texts)]
        assert scored.rewards.tolist() == pytest.approx(expected)
    assert sorted(prompt.index for scored in steps for prompt in scored.rollout.prompts) == sorted(upcoming(18))


def test_it_tells_how_many_samples_of_the_next_batch_are_ready() -> None:
    told: list[tuple[int, int]] = []
    engines = Engines()
    source = asynchronous(engines, told=lambda done, of: told.append((done, of)))
    next(iter(source))
    source.close()
    assert told and all(of == PROMPTS * SAMPLES and done in (0, 2, 4, 6) for done, of in told)
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_where_engines_keep_up_one_batch_is_begun_beside_the_one_that_is_handed_out() -> None:
    engines = Engines()
    source = asynchronous(engines, max_staleness=4, steps=9)
    ahead = []
    for scored in trained_on(source, engines):
        ahead.append(source.position["begun"] - (scored.step + 1) * PROMPTS)
        assert_soon(lambda: len(source._ready) == ahead[-1])  # they have finished all of it
    # What was begun before anything was finished is used up first.
    assert ahead == [4 * PROMPTS, 3 * PROMPTS, 2 * PROMPTS, *[PROMPTS] * 5, 0]


@pytest.mark.parametrize("function", [None, two_turns])
def test_a_resumed_run_begins_again_what_was_not_handed_out_and_nothing_else(
    function: Callable[..., Any] | None, front: ChatServer
) -> None:
    engines = Engines(until=9, max_staleness=2)
    source = asynchronous(engines, max_staleness=2, function=function, front=front)
    first = []
    for scored in trained_on(source, engines):
        first += [prompt.index for prompt in scored.rollout.prompts]
        position = source.position
        if scored.step == 2:
            break
    source.close()
    engines.pause()
    resumed_engines = Engines()
    resumed_engines.version = 3
    resumed = asynchronous(resumed_engines, max_staleness=2, function=function, front=front)
    resumed.restore(position)
    with resumed.updating(3):
        pass
    rest = [prompt.index for scored in resumed for prompt in scored.rollout.prompts]
    resumed.close()
    assert sorted(first + rest) == sorted(upcoming(18))
    assert not set(resumed_engines.keys) & set(engines.keys)
    assert (resumed.position["rollout_step"], resumed.position["prompts"]["offset"]) == (6, 18)
    assert "returned" in position["prompts"] and "returned" not in resumed.position["prompts"]


def test_groups_that_teach_nothing_are_replaced_as_often_as_is_allowed() -> None:
    times: Counter[int] = Counter()

    def by_index(prompt: Prompt, response: str) -> float:
        """Half of all prompts have groups whose rewards differ."""
        times[prompt.index] += 1
        return prompt.index % 2 * times[prompt.index]

    engines = Engines()
    odd = Reward(name="odd", function=by_index)
    source = asynchronous(engines, reward=odd, refill=DynamicSampling(useful=spread, attempts=9))
    steps = list(trained_on(source, engines))
    assert all(prompt.index % 2 for scored in steps for prompt in scored.rollout.prompts)
    assert all(scored.counts["groups_missing"] == 0 for scored in steps)
    assert sum(scored.counts["groups_set_aside"] for scored in steps) > 0
    one = Reward(name="one", function=lambda prompt, response: 1.0)
    never = asynchronous(engines, reward=one, refill=DynamicSampling(useful=spread, attempts=1))
    for scored in trained_on(never, engines):
        assert scored.counts["groups_missing"] == PROMPTS == len(scored.rollout.prompts)
        assert scored.counts["groups_set_aside"] >= 2 * PROMPTS


def test_the_parts_of_rewards_are_summed_over_the_samples_scored_since_the_last_batch() -> None:
    engines = Engines()
    sizes = Reward(name="sizes", function=lambda prompt, response: {"size": len(response), "one": 1})
    steps = list(trained_on(asynchronous(engines, reward=sizes), engines))
    total, count = map(sum, zip(*(scored.parts["one"] for scored in steps if scored.parts), strict=True))
    assert total == count >= sum(len(scored.rewards) for scored in steps)


class OneCallAtFirst(Engines):
    """BatchSampler one batch, and no more before that is handed out."""

    def __init__(self) -> None:
        super().__init__()
        self.handed_out = threading.Event()

    def draw(self, replica: int, request: GenerateRequest) -> Generation | None:
        assert not self.asked or self.handed_out.wait(LIMIT)
        return super().draw(replica, request)


def test_groups_that_grow_too_old_while_they_are_scored_are_given_up_and_not_replaced_as_dull() -> None:
    engines, scoring, go = OneCallAtFirst(), threading.Event(), threading.Event()

    class Slow:
        def score(self, rollout: Rollout, *, part: bool = False) -> Scores:
            rewards = np.arange(len(rollout.batch), dtype=np.float32)
            if engines.handed_out.is_set() and not go.is_set():
                scoring.set()
                assert go.wait(LIMIT)
                rewards[:] = 1.0
            return Scores(rewards=rewards, failures={}, first="")

    source = asynchronous(engines, calls=1, steps=2, reward=Slow(), refill=DynamicSampling(useful=spread, attempts=9))
    assert {prompt.index for prompt in next(source).rollout.prompts} == set(upcoming(PROMPTS))
    engines.handed_out.set()
    assert scoring.wait(LIMIT)  # of the second batch, drawn by version 0
    for version in (1, 2):
        with source.updating(version):
            engines.version = version
    go.set()
    second = next(source)
    source.close()
    assert sorted(prompt.index for prompt in second.rollout.prompts) == sorted(upcoming(2 * PROMPTS)[PROMPTS:])
    assert set(second.rollout.batch.columns["versions"][second.rollout.batch.columns["loss_mask"]]) == {2}
    assert second.counts["stale_samples"] == PROMPTS * SAMPLES
    assert (second.counts["groups_set_aside"], second.counts["groups_missing"]) == (0, 0)


def test_groups_that_teach_nothing_fill_a_batch_only_while_they_are_young_enough() -> None:
    engines = OneCallAtFirst()

    class Equal:
        def score(self, rollout: Rollout, *, part: bool = False) -> Scores:
            rewards = np.arange(len(rollout.batch)) * (not engines.handed_out.is_set())
            return Scores(rewards=rewards.astype(np.float32), failures={}, first="")

    source = asynchronous(engines, calls=1, steps=2, reward=Equal(), refill=DynamicSampling(useful=spread, attempts=1))
    next(source)
    engines.handed_out.set()
    assert_soon(lambda: len(source._dull) == PROMPTS)  # drawn by version 0
    for version in (1, 2):
        with source.updating(version):
            engines.version = version
    second = next(source)
    source.close()
    assert set(second.rollout.batch.columns["versions"][second.rollout.batch.columns["loss_mask"]]) == {2}
    assert second.counts["groups_missing"] == PROMPTS


# ---- episodes --------------------------------------------------------------------------------------------------------


def test_an_episode_spans_updates_and_what_it_said_before_them_stays(front: ChatServer) -> None:
    asked, updated = threading.Event(), threading.Event()
    first = upcoming(1)[0]

    def waits(episode: Episode) -> float | None:
        if episode.prompt.index != first:
            return two_turns(episode)
        messages = episode.messages
        messages += [episode.chat(messages, max_tokens=1)["message"], {"role": "tool", "content": "9>"}]
        asked.set()
        assert updated.wait(LIMIT)
        episode.chat(messages)
        return 0.0

    engines = Engines()
    source = asynchronous(engines, function=waits, front=front, steps=3, max_staleness=2)
    for scored in trained_on(source, engines):
        if scored.step == 1:
            assert asked.wait(LIMIT)
            updated.set()
        of = [prompt.index for prompt in scored.rollout.prompts]
        if first in of:
            break
    source.close()
    assert scored.step == 2  # not before: it waited while steps 0 and 1 were trained on
    batch, rows = scored.rollout.batch, np.flatnonzero(scored.rollout.batch.rows["group"] == of.index(first))
    for row in rows:
        span = slice(*batch.offsets[row : row + 2])
        sampled = batch.columns["loss_mask"][span]
        versions = batch.columns["versions"][span][sampled]
        assert versions[0] == 0 and set(versions[1:].tolist()) <= {1, 2} and len(versions) > 1
        np.testing.assert_array_equal(
            batch.columns["rollout_logprobs"][span][sampled], logprobs(batch.tokens[span][sampled], versions)
        )


def test_an_episode_that_has_grown_too_old_is_refused_and_its_prompt_drawn_anew(front: ChatServer) -> None:
    stale = threading.Event()
    first, told, begun = upcoming(1)[0], [], []

    def waits(episode: Episode) -> float | None:
        if episode.prompt.index != first or len(begun) == SAMPLES:
            return two_turns(episode)
        begun.append(episode)
        messages = episode.messages
        messages += [episode.chat(messages, max_tokens=1)["message"], {"role": "tool", "content": "9>"}]
        assert stale.wait(LIMIT)
        try:
            episode.chat(messages)
        except RuntimeError as error:
            told.append(str(error))
        return 5.0

    engines = Engines()
    source = asynchronous(engines, function=waits, front=front, steps=6, max_staleness=1)
    trained, stale_samples = [], 0
    for scored in trained_on(source, engines):
        trained += [(prompt.index, scored.step) for prompt in scored.rollout.prompts]
        stale_samples += scored.counts["stale_samples"]
        if stale_samples:  # the engines have had version 2 for a while
            stale.set()
        assert 5.0 not in scored.rewards
    # On a machine with other work another prompt's episodes may grow too old as well; a prompt's do so together.
    assert stale_samples >= SAMPLES and stale_samples % SAMPLES == 0
    assert len({index for index, _ in trained}) == len(trained) == 6 * PROMPTS
    ((step,),) = [[step for index, step in trained if index == first]]
    assert step >= 2
    assert_soon(lambda: len(told) == SAMPLES)
    assert all("no running episode" in line or "the episode is over" in line for line in told)


def test_functions_that_fail_or_never_end_cost_their_own_episodes_alone(front: ChatServer) -> None:
    over = threading.Event()
    raises, hangs, silent = upcoming(3)

    def some(episode: Episode) -> float | None:
        if episode.prompt.index == silent:
            return 1.0
        if episode.prompt.index == raises:
            episode.chat(episode.messages)
            raise KeyError("no such drawer")
        if episode.prompt.index == hangs:
            over.wait(LIMIT)
        return two_turns(episode)

    engines = Engines()
    source = asynchronous(engines, function=some, front=front, steps=3, max_staleness=2, timeout=3.0, concurrency=4)
    scored = list(trained_on(source, engines))
    over.set()
    assert sum((Counter(each.failures) for each in scored), Counter()) == Counter(raised=2, timeout=2, silent=2)
    for each in scored:
        for group, prompt in enumerate(each.rollout.prompts):
            rewards = each.rewards[each.rollout.batch.rows["group"] == group]
            assert (prompt.index in (raises, hangs, silent)) == (rewards == -1.0).all()
    assert sorted(prompt.index for each in scored for prompt in each.rollout.prompts) == sorted(upcoming(9))

    def never(episode: Episode) -> None:
        raise KeyError("no such drawer")

    source = asynchronous(Engines(), function=never, front=front)
    with pytest.raises(RewardError, match=r"^rollout.function 'mine:play' raised KeyError: .*; all 6 samples failed"):
        next(source)
    source.close()


def test_turns_of_a_dying_replica_are_drawn_by_others_and_by_new_ones_where_none_is_left(front: ChatServer) -> None:
    for deaths, mended in ((1, 0), (2, 1)):
        engines = Engines(2)
        engines.deaths = deaths
        source = asynchronous(engines, steps=1, calls=1, function=two_turns, front=front)
        rollout = next(source).rollout
        assert rollout.batch.rows["turns"].tolist() == [2] * PROMPTS * SAMPLES and engines.mended == mended
        assert sorted(prompt.index for prompt in rollout.prompts) == sorted(upcoming(PROMPTS))
        source.close()


def test_a_turn_goes_where_the_episode_was_read_before(front: ChatServer) -> None:
    engines = Engines(3)
    source = asynchronous(engines, calls=12, function=two_turns, front=front)
    next(source)
    source.close()
    replicas: dict[int, set[int]] = {}
    for replica, key, _ in engines.asked:
        replicas.setdefault(key, set()).add(replica)
    assert {len(each) for each in replicas.values()} == {1}
    assert sum(begun > 0 for _, _, begun in engines.asked) >= PROMPTS * SAMPLES


def test_who_has_read_an_episode_is_forgotten_with_the_weights(front: ChatServer) -> None:
    source = asynchronous(Engines(2), steps=1, function=two_turns, front=front)
    next(source)
    assert len(source._homes) == PROMPTS * SAMPLES
    with source.updating(1):
        pass
    source.close()
    assert not source._homes  # or it would grow for as long as the run lasts


def test_functions_that_wait_for_an_answer_are_released_at_the_end(front: ChatServer) -> None:
    engines, told = Engines(), []

    def asks(episode: Episode) -> None:
        try:
            episode.chat(episode.messages)
        except RuntimeError as error:
            told.append(str(error))

    source = asynchronous(engines, function=asks, front=front)
    engines.failure = EngineFailed("engine-0 is broken")
    with pytest.raises(EngineFailed, match="^engine-0 is broken$"):
        next(source)
    assert_soon(lambda: len(told) == 2 * PROMPTS * SAMPLES)
    assert all("no running episode" in line or "the episode is over" in line for line in told)


def assert_soon(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# ---- failures --------------------------------------------------------------------------------------------------------


def test_an_engines_error_is_the_loops_and_ends_all_threads() -> None:
    engines = Engines(2)
    source = asynchronous(engines, calls=2)
    next(source)
    engines.failure = EngineFailed("engine-1 is broken")
    with pytest.raises(EngineFailed, match="^engine-1 is broken$"):
        for _ in source:
            pass


def test_a_batch_without_rewards_is_told_with_its_own_first_failure() -> None:
    failed = np.ones(2, np.bool_)
    request = GenerateRequest(
        tokens=np.zeros(0, np.int64), offsets=np.zeros(3, np.int64), noise_keys=np.arange(2), params=SamplingParams()
    )
    group = PromptGroup(number=0, prompt=Prompt(index=0, text="a", answer="b"), request=request)
    group.failed, group.first_failure = failed, "reward 'mine' raised ValueError: no"
    with pytest.raises(RewardError, match=r"^reward 'mine' raised ValueError: no; all 2 samples failed$"):
        Tally().batch(1, [group], None)  # which has heard of no failure since the last batch


def test_a_reward_that_fails_on_every_sample_of_a_batch_ends_the_run_and_on_some_does_not() -> None:
    def fails(prompt: Prompt, response: str) -> float:
        raise ValueError("no")

    source = asynchronous(Engines(), reward=Reward(name="mine", function=fails))
    with pytest.raises(RewardError, match=r"^reward 'mine' raised ValueError: no .*; all 6 samples failed$"):
        next(source)
    source.close()

    failing = upcoming(1)[0]

    def once(prompt: Prompt, response: str) -> float:
        return fails(prompt, response) if prompt.index == failing else 1.0

    source = asynchronous(Engines(), steps=1, reward=Reward(name="mine", function=once, failed_value=-1.0))
    scored = next(source)  # all samples of one prompt, which may be scored by themselves
    assert scored.failures == {"raised": SAMPLES} and sorted(scored.rewards.tolist()) == [-1.0, -1.0, 1, 1, 1, 1]
    source.close()


def test_what_a_dying_replica_was_asked_is_drawn_by_others_and_by_new_ones_where_none_is_left() -> None:
    engines = Engines(2)
    engines.deaths = 1
    source = asynchronous(engines, steps=2, calls=1)
    assert len(next(source).rollout.prompts) == PROMPTS and (len(engines.dead), engines.mended) == (1, 0)
    source.close()

    engines = Engines(2)
    engines.deaths = 2
    source = asynchronous(engines, steps=2, calls=1)
    assert len(next(source).rollout.prompts) == PROMPTS and engines.mended == 1
    source.close()


# ---- a whole run -----------------------------------------------------------------------------------------------------


def test_the_quickstarts_task_is_learned_asynchronously_within_the_bound(tmp_path: Path) -> None:
    settings = [
        *("rollout.source=asynchronous", "rollout.max_staleness=2", "rollout.save=true", "rollout.replicas=2"),
        *("rollout.prompts=16", "rollout.samples=8", "train.optimizer.lr=4e-3", "algorithm.entropy_coef=0.02"),
        *("checkpoint.every=20", "checkpoint.export=false"),
    ]
    execute_here(small(tmp_path, *settings, "run.steps=40"))
    lines = metrics(tmp_path / "run")
    rewards = [line["rollout/reward"] for line in lines]
    assert np.mean(rewards[-8:]) > 1.3 * np.mean(rewards[:8])  # 1.7 to 2.3 times were seen
    stalest = []
    for step in range(40):
        with np.load(tmp_path / f"run/rollouts/step-{step:08d}.npz") as file:
            behind = step - file["columns/versions"][file["columns/loss_mask"]]
        stalest.append(float(behind.max()))
        assert lines[step]["rollout/staleness"] == pytest.approx(behind.mean())
    assert [line["rollout/staleness_max"] for line in lines] == stalest
    assert 1 <= max(stalest) <= 2

    # Resumed it goes on: the same steps are left, and staleness goes on to be counted from where it stood.
    resume = f"checkpoint.resume={tmp_path}/run/checkpoints/step-00000020"
    execute_here(small(tmp_path, *settings, "run.steps=23", f"run.dir={tmp_path}/again", resume))
    again = metrics(tmp_path / "again")
    assert [line["step"] for line in again] == [20, 21, 22]
    assert all(0 <= line["rollout/staleness_max"] <= 2 for line in again)
