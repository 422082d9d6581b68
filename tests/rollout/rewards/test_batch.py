"""Processes that are played, on a clock of the test's own; the real ones are tested in test_pool."""

import heapq
import itertools
import math
import random
from collections.abc import Sequence

import pytest
from attrs import define

from corerl.config.schema import RewardConfig
from corerl.data.prompts import Prompt
from corerl.errors import ConfigError, RewardError
from corerl.rollout.rewards.base import Failure, Judged, Reward, Sample
from corerl.rollout.rewards.batch import Batch, Blocked, Event, Free, Judge, Lost, Scored, State

LIMIT = 9.0  # of which a third is 3 seconds


async def later(prompt: Prompt, response: str) -> float:
    return 0.0


SYNC, ASYNC = Reward(name="f", function=lambda prompt, response: 0.0), Reward(name="f", function=later)


def batch(count: int, *states: State, reward: Reward = SYNC, processes: int = 1) -> Batch:
    samples: list[Sample] = [(Prompt(index=7, text="p", answer="a"), f"row {row}", ()) for row in range(count)]
    config = RewardConfig(processes=processes, timeout=LIMIT)
    judges = [Judge(until=120.0, state=state, start=0.5) for state in states or [State.IDLE] * processes]
    return Batch(reward, samples, config, judges, held=3.0)


def given(count: int, reward: Reward = SYNC) -> tuple[Batch, Judge]:
    """A process that has begun to score a chunk of all `count` rows at 100 seconds."""
    found = batch(4 * count, reward=reward)
    (judge,) = found.judges
    found.give(judge, 100.0)
    found.waiting.clear()
    return found, judge


def waiting(found: Batch) -> list[list[int]]:
    return [list(chunk) for chunk in found.waiting]


def told(found: Batch) -> dict[int, float | str]:
    return {row: each.reward if isinstance(each, Judged) else each.kind for row, each in found.outcomes.items()}


def test_rows_are_given_in_chunks_of_which_each_process_has_four() -> None:
    assert waiting(batch(10)) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    assert waiting(batch(10, processes=2)) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert {len(chunk) for chunk in waiting(batch(3200))} == {32}


@pytest.mark.parametrize(
    ("reward", "event", "state", "rows", "again", "outcomes"),
    [
        (SYNC, Scored([(0, 2.5, 101.0)]), State.SCORES, [1, 2], [], {0: 2.5}),
        (SYNC, Scored([(1, 2.5, 101.0), (2, 3.5, 102.0)]), State.SCORES, [0], [], {1: 2.5, 2: 3.5}),
        (SYNC, Free(0.5), State.IDLE, [], [[0], [1], [2]], {}),
        (SYNC, Lost(), State.SCORES, [0], [[1], [2]], {}),  # the time of its turn
        (SYNC, Lost(-11), State.LOST, [], [[1], [2]], {0: "died"}),
        (ASYNC, Blocked(1), State.SCORES, [1], [[0], [2]], {}),
        (ASYNC, Lost(), State.LOST, [], [[0], [1], [2]], {}),
        (ASYNC, Lost(3), State.LOST, [], [[0], [1], [2]], {}),
    ],
)
def test_what_a_process_tells_decides_on_each_of_its_rows(
    reward: Reward, event: Event, state: State, rows: list[int], again: list[list[int]], outcomes: dict[int, object]
) -> None:
    found, judge = given(3, reward)
    found.hear(judge, event)
    assert (judge.state, list(judge.rows), waiting(found), told(found)) == (state, rows, again, outcomes)


@pytest.mark.parametrize("reward", [SYNC, ASYNC])
@pytest.mark.parametrize(
    ("event", "kind", "what"),
    [
        (Lost(), "timeout", "took longer than reward.timeout=9 seconds"),
        (Lost(3), "died", "ended its process (exit status 3)"),
        (Lost(-11), "died", "ended its process (SIGSEGV)"),
    ],
)
def test_a_process_that_is_lost_at_one_row_fails_it(reward: Reward, event: Lost, kind: str, what: str) -> None:
    found, judge = given(1, reward)
    found.hear(judge, event)
    message = f"reward 'f' {what} on prompt 7 ('p') with the response 'row 0'"
    assert (judge.state, waiting(found)) == (State.LOST, [])
    assert found.outcomes == {0: Failure(kind=kind, message=message)}


@pytest.mark.parametrize("event", [Lost(), Lost(3)])
@pytest.mark.parametrize("reward", [SYNC, ASYNC])
def test_a_process_that_is_lost_after_its_last_outcome_fails_no_row(reward: Reward, event: Lost) -> None:
    found, judge = given(1, reward)
    found.hear(judge, Scored([(0, 1.0, 101.0)]))
    found.hear(judge, event)
    assert (judge.state, told(found), waiting(found)) == (State.LOST, {0: 1.0}, [])


def test_a_row_that_was_left_to_others_and_is_scored_nevertheless_does_not_wait_again() -> None:
    found, judge = given(2)
    found.hear(judge, Lost())  # it seems to be held by row 0, and begins row 1
    other = Judge(until=math.inf, state=State.IDLE)
    found.judges = [judge, other]
    found.give(other, 102.0)
    found.hear(judge, Scored([(0, 1.0, 102.0), (1, 2.0, 103.0)]))
    found.hear(other, Lost(3))
    assert (told(found), waiting(found)) == ({0: 1.0, 1: 2.0}, [])


def test_a_batch_goes_on_while_a_process_is_at_a_row_that_another_one_has_scored() -> None:
    found, judge = given(1)
    found.samples = found.samples[:1]
    found.hear(judge, Scored([(0, 1.0, 101.0)]))
    assert found.goes_on()
    found.hear(judge, Free(0.5))
    assert not found.goes_on()


def test_each_row_has_its_time_from_the_last_outcome_and_several_that_are_awaited_have_one_together() -> None:
    found, judge = given(3)
    times = [judge.until]  # with others to leave: a turn of a second, and the time that a chunk takes to arrive
    for event in (Scored([(0, 1.0, 100.5)]), Lost(), Scored([(1, 1.0, 105.0)]), Free(0.5)):
        found.hear(judge, event)
        times.append(judge.until)
    assert times == [101.5, 102.0, 100.5 + LIMIT + 2, 105.0 + LIMIT + 2, math.inf]
    found, judge = given(3, ASYNC)
    times = [judge.until]
    for event in (Scored([(0, 1.0, 100.5)]), Blocked(1)):
        found.hear(judge, event)
        times.append(judge.until)
    assert times == [100.0 + 1 + LIMIT + 2] * 3


@pytest.mark.parametrize("event", [Lost(), Lost(5), ConfigError("no module")])
def test_a_batch_ends_with_an_error_where_no_process_can_start_and_goes_on_without_a_further_one(event: Event) -> None:
    said = {Lost(): "did not import it within 120 seconds", Lost(5): r"ended \(exit status 5\) before importing it"}
    error = (RewardError, said[event]) if isinstance(event, Lost) else (ConfigError, "no module")
    found = batch(8, State.SCORES, State.STARTS, processes=2)
    found.hung = True  # and this is no further one
    with pytest.raises(error[0], match=error[1]):
        found.hear(found.judges[1], event)
    found = batch(8, State.SCORES, State.STARTS)
    with pytest.raises(error[0], match=error[1]):  # no further ones are started
        found.hear(found.judges[1], event)
    found.hung = True
    assert found.wanted(100) == 3
    found.hear(found.judges[1], event)
    assert (found.judges[1].state, found.wanted(100)) == (State.LOST, 0)


@pytest.mark.parametrize(("reward", "chunks"), [(SYNC, [[6], [7], [8], [9]]), (ASYNC, [[6, 7, 8], [9]])])
def test_a_batch_is_hung_from_when_all_processes_are_held_while_rows_wait(
    reward: Reward, chunks: list[list[int]]
) -> None:
    found = batch(10, State.IDLE, State.IDLE, reward=reward)
    first, second = found.judges
    found.give(first, 100.0)
    assert not found.look(1000.0)  # the other one is free
    found.give(second, 101.0)
    assert found.held_at() == 104.0 and not found.look(103.9)
    found.hear(first, Scored([(0, 1.0, 102.0)]))
    assert found.held_at() == 105.0 and not found.look(104.9)
    assert found.look(105.0) and waiting(found) == chunks
    found.hear(first, Free(0.5))
    assert found.look(105.1)  # until it ends


def test_further_processes_are_for_what_waits_and_for_what_comes_within_a_time_limit() -> None:
    found = batch(10, *[State.SCORES] * 2, State.STARTS, processes=2)
    assert len(found.waiting) == 5
    assert [found.wanted(room) for room in (0, 1, 3, 100)] == [0, 0, 2, 4]  # one is coming
    assert batch(100, *[State.SCORES] * 9, processes=2).wanted(100) == 1  # five times as many as two
    assert batch(1000, *[State.SCORES] * 30, processes=30).wanted(1000) == 64
    for judge in found.judges:
        judge.start = LIMIT + 0.1
    assert found.wanted(100) == 0


@define
class Play:
    """Processes on a clock of their own: what a row does is its `kind`, `fine` after 0.1 seconds, `late` at the limit,
    `stuck` for ever, or `dies` after 0.1 seconds. Starts take half a second, and there is room for any number."""

    batch: Batch
    kinds: Sequence[str]
    now: float = 0.0

    def run(self) -> float:
        """Play the batch to its end; returns its seconds."""
        found, events, order = self.batch, list[tuple[float, int, Judge, Event]](), itertools.count()
        judges = found.judges = list(found.judges)

        def start(count: int) -> None:
            for _ in range(count):
                judges.append(Judge(until=self.now + 120))
                heapq.heappush(events, (self.now + 0.5, next(order), judges[-1], Free(0.5)))

        while found.goes_on():
            start(found.config.processes - len(judges))
            if found.look(self.now):
                start(found.wanted(100))
            for judge in judges:
                if judge.state is State.IDLE and found.waiting:
                    found.give(judge, self.now)
                    for at, event in self.told(list(judge.chunk)):
                        heapq.heappush(events, (at, next(order), judge, event))
            ends = [
                *[judge.until for judge in judges],
                found.held_at() if found.waiting and not found.hung else math.inf,
            ]
            self.now = min([*ends, *[event[0] for event in events[:1]]])
            while events and events[0][0] <= self.now:
                _, _, judge, event = heapq.heappop(events)
                if judge in judges:
                    found.hear(judge, event)
            for judge in judges:
                if judge.until <= self.now:
                    found.hear(judge, Lost())
            judges[:] = [judge for judge in judges if judge.state is not State.LOST]
        return self.now

    def told(self, chunk: list[int]) -> list[tuple[float, Event]]:
        at, events = self.now, list[tuple[float, Event]]()
        for place, row in enumerate(chunk):
            kind = self.kinds[row]
            at += {"fine": 0.1, "late": LIMIT, "dies": 0.1, "stuck": math.inf}[kind]
            if kind in ("dies", "stuck"):
                return [*events, (at, Lost(3))][: None if kind == "dies" else -1]
            late = self.batch.reward.late(LIMIT, self.batch.samples[row])
            events.append((at, Scored([(place, float(row) if kind == "fine" else late, at)])))
            if at - self.now > 1.0:
                break
        return [*events, (at, Free(0.5))]


@pytest.mark.parametrize("processes", [1, 2, 5])
@pytest.mark.parametrize("seed", range(20))
def test_whatever_rows_do_each_has_its_own_outcome(seed: int, processes: int) -> None:
    draw = random.Random(seed)
    kinds = draw.choices(["fine", "late", "dies", "stuck"], weights=[8, 1, 1, draw.choice([0, 1, 8])], k=60)
    play = Play(batch(60, processes=processes), kinds)
    play.run()
    of = {"late": "timeout", "stuck": "timeout", "dies": "died"}
    assert told(play.batch) == {row: of.get(kind, float(row)) for row, kind in enumerate(kinds)}


@pytest.mark.parametrize(("kind", "limits"), [("late", LIMIT), ("stuck", LIMIT + 2)])
@pytest.mark.parametrize("count", [16, 64])
def test_samples_that_hang_cost_a_batch_one_time_limit_beside_the_third_after_which_it_is_hung(
    kind: str, limits: float, count: int
) -> None:
    kinds = [kind if row % (count // 8) == 0 else "fine" for row in range(count)]
    seconds = Play(batch(count, processes=2), kinds).run()
    assert limits < seconds < limits + LIMIT / 3 + 3.0  # with the starts, and what is fine
