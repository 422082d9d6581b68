"""Several engines sampled from as one, with processes that answer as a test says; real ones are in tests/end_to_end."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from corerl.engines.base import CacheUse, GenerateRequest, Generation, PromptScores
from corerl.engines.service import EngineService
from corerl.errors import EngineFailed, VersionGone, WeightUpdateError, WorkerDied
from corerl.event_loop import EventLoop
from tests.engines.fleets import REQUEST, Group, Scripted, Sized, assigned, fleet_of, respond, sample
from tests.engines.services import serve


def test_caches_are_asked_of_the_engines_that_serve(loop: EventLoop) -> None:
    use = CacheUse(capacity=100, tokens=30, retracted=1)
    fleet = fleet_of(Group({0: use, 1: None, 2: "not asked"}), loop, 3, restarts=1)
    fleet.leave_out({"engine-2": WeightUpdateError("no answer")})
    fleet.updated(["engine-0", "engine-1"])
    assert loop.run(fleet.cache_use()) == {"engine-0": use}  # the engine of the other one cannot say
    with fleet.replacing():
        assert loop.run(fleet.cache_use()) == {}


@pytest.mark.parametrize("dies", [False, True])
def test_rows_that_have_ended_are_counted_over_all_replicas(dies: bool, loop: EventLoop) -> None:
    script = [lambda request: WorkerDied("its process died")] * dies  # another one takes its rows over
    fleet = fleet_of(Scripted(*script), loop, 2, restarts=1)
    counts: list[tuple[int, int]] = []
    loop.run(fleet.generate(REQUEST, on_progress=lambda done, of: counts.append((done, of))))
    # One row of each, and then all. Two threads may count the first ones at once.
    assert counts[-1] == max(counts) == (5, 5) and min(counts) < (5, 5)
    assert dies or len(counts) == 4


def test_the_process_of_an_engine_counts_each_request_by_itself(tmp_path: Path) -> None:
    service = EngineService(assigned(1)[0])
    seen: list[dict[int, tuple[int, int]]] = []

    class Draws:
        def generate(self, request: GenerateRequest, on_finished: Any) -> Generation:
            on_finished(2)
            if len(request) == 5:
                other = threading.Thread(target=service.generate, args=(request.row_range(0, 3),))
                other.start()
                other.join()
            on_finished(1)
            seen.append(dict(service.counts()))
            return Generation.nothing(request)

    service.engine = Draws()  # type: ignore[assignment]  # as much of an engine as is asked
    service.generate(REQUEST)
    own = threading.get_ident()
    inner, outer = seen
    assert sorted(inner.values()) == [(2, 5), (3, 3)] and inner[own] == (2, 5)
    assert outer == {own: (3, 5)}
    assert service.counts() == {}


def test_rows_return_to_the_engine_that_has_read_them_until_an_update(loop: EventLoop) -> None:
    scripted = Scripted()
    fleet = fleet_of(scripted, loop, 2)

    def readers(rows: list[int]) -> dict[int, int]:
        scripted.asked.clear()
        sample(fleet, REQUEST.take_rows(np.array(rows)))
        return {key: replica for replica, keys, _ in scripted.asked for key in keys}

    first = readers([0, 1, 2, 3, 4])
    assert readers([4, 3, 2, 1, 0]) == first
    fleet.updated(fleet.names)
    assert readers([4, 3, 2, 1, 0]) != first


def test_an_idle_engine_takes_over_a_request_that_waits_for_another(loop: EventLoop) -> None:
    sized = Sized(2)
    sized.gates = {0: threading.Event(), 1: threading.Event()}
    fleet = fleet_of(sized, loop, 2)
    first = loop.begin(fleet.generate(REQUEST))
    assert all(sized.sampling.acquire(timeout=60.0) for _ in range(2))
    waits = loop.begin(fleet.generate(REQUEST.row_range(0, 1)))  # for the last one, which has fewer to draw
    sized.gates[0].set()
    assert waits.result(60.0).tokens.tolist() == [7]
    sized.gates[1].set()
    assert first.result(60.0).tokens.tolist() == [7, 8, 9, 10, 11]
    assert [replica for replica, keys, _ in sized.asked if keys == [7]] == [0]


def test_unfinished_rows_without_a_pause_are_a_failure(loop: EventLoop) -> None:
    scripted = Scripted(functools.partial(respond, rows=2))
    fleet = fleet_of(scripted, loop, 1)
    with pytest.raises(EngineFailed, match="^3 of 5 responses came back unfinished, but the engines were not paused"):
        sample(fleet, REQUEST)


def test_a_version_is_sampled_where_it_is_held_or_nowhere(loop: EventLoop) -> None:
    sampling = threading.Event()

    def of_version(request: GenerateRequest) -> Generation:
        answer = respond(request)
        return evolve(answer, versions=answer.versions + (6 if request.version is None else request.version))

    def interrupted(request: GenerateRequest) -> Generation:
        sampling.set()
        assert scripted.paused.wait(60.0)
        answer = respond(request, rows=2)
        return evolve(answer, versions=answer.versions + 5)

    scripted = Scripted(of_version, of_version, of_version, interrupted, of_version, of_version)
    fleet = fleet_of(scripted, loop, 2)
    fleet.updated(fleet.names, {"engine-0": (6,), "engine-1": (5, 6)})  # the first one is new
    assert fleet.held == (6,)
    assert set(sample(fleet, evolve(REQUEST, version=5)).versions) == {5}
    assert [replica for replica, _, _ in scripted.asked] == [1]
    assert set(sample(fleet, evolve(REQUEST, version=6)).versions) == {6}  # over both
    goes_on = loop.begin(fleet.generate(evolve(REQUEST, version=5)))
    assert sampling.wait(60.0)
    waits = loop.begin(fleet.generate(evolve(REQUEST, version=5)))
    loop.run(fleet.pause())
    fleet.updated(fleet.names, {"engine-0": (6, 7), "engine-1": (6, 7)})
    assert fleet.held == (6, 7)
    loop.run(fleet.resume())
    for work in (goes_on, waits, loop.begin(fleet.generate(evolve(REQUEST, version=5)))):
        with pytest.raises(VersionGone, match="no engine holds weights version 5 any more, but 6, 7"):
            work.result(60.0)
    assert "kill" not in scripted.log
    fleet.updated(fleet.names, {"engine-0": (6, 7), "engine-1": (6, 7)})
    assert set(sample(fleet, evolve(REQUEST, version=7)).versions) == {7}


def test_scored_prompts_are_read_whole_after_a_pause(loop: EventLoop) -> None:
    sampling, scored = threading.Event(), evolve(REQUEST, params=evolve(REQUEST.params, scored=3, scored_top=2))

    def scores(request: GenerateRequest) -> PromptScores:
        unknown = PromptScores.unknown(len(request.tokens), request.params)
        return evolve(unknown, logprobs=-request.tokens.astype(np.float32))

    def interrupted(request: GenerateRequest) -> Generation:
        sampling.set()
        assert scripted.paused.wait(60.0)
        return evolve(respond(request, rows=2), scores=PromptScores.unknown(len(request.tokens), request.params))

    def whole(request: GenerateRequest) -> Generation:
        return evolve(respond(request), scores=scores(request))

    scripted = Scripted(interrupted, whole)
    fleet = fleet_of(scripted, loop, 1)
    work = loop.begin(fleet.generate(scored))
    assert sampling.wait(60.0)
    loop.run(fleet.pause())
    loop.run(fleet.resume())
    found = work.result(60.0)
    assert found.tokens.tolist() == [7, 8, 9, 10, 11]
    assert found.scores is not None and found.scores.logprobs.tolist() == [-token for token in range(10)]
    with pytest.raises(EngineFailed, match="engine-0 was asked for log-probs of prompts, and its engine reports none"):
        sample(fleet, scored)


def test_an_engine_that_samples_other_weights_is_an_error(loop: EventLoop) -> None:
    fleet = fleet_of(Scripted(), loop, 1)  # tokens of version 0
    fleet.updated(fleet.names, {"engine-0": (0, 1)})
    with pytest.raises(EngineFailed, match=r"engine-0 sampled from weights version \{0\}, but was asked for version 1"):
        sample(fleet, evolve(REQUEST, version=1))


def test_if_all_engines_die_new_ones_sample_the_same(loop: EventLoop) -> None:
    def dies(request: GenerateRequest) -> WorkerDied:
        return WorkerDied("its process died")

    def slowly(request: GenerateRequest) -> Generation:
        time.sleep(0.1)  # meanwhile nobody is to bring engines back again
        return respond(request)

    scripted = Scripted(dies, dies, slowly, slowly)
    fleet = fleet_of(scripted, loop, 2, restarts=1)
    served: list[bool] = []

    def ensure() -> None:
        assert list(fleet.deaths) == ["engine-0", "engine-1"]
        fleet.replace(fleet.deaths)
        served.append(fleet.all_serve)
        fleet.updated(fleet.names)

    assert serve(fleet, fleet.generate(REQUEST), ensure).tokens.tolist() == [7, 8, 9, 10, 11]
    assert served == [False] and scripted.log == ["replace 0", "replace 1"]
    keys = [key for _, asked, _ in scripted.asked[2:] for key in asked]
    assert sorted(keys) == REQUEST.noise_keys.tolist()

    def interrupts() -> None:
        raise KeyboardInterrupt

    fleet.updated([])
    with pytest.raises(KeyboardInterrupt):
        serve(fleet, fleet.generate(REQUEST), interrupts)


def test_rows_on_their_way_to_a_dead_engine_go_elsewhere(loop: EventLoop) -> None:
    fleet, died = fleet_of(Scripted(), loop, 2, restarts=1), {"engine-1": WorkerDied("its process died")}

    async def pauses_in_between() -> asyncio.Task[Generation]:
        work = asyncio.ensure_future(fleet.generate(REQUEST))
        await asyncio.sleep(0)  # it has been divided, and nothing waits for an engine yet
        fleet.leave_out(died)
        await fleet.pause()
        return work

    async def ended(work: asyncio.Task[Generation]) -> Generation:
        return await asyncio.wait_for(work, 10.0)

    work = loop.run(pauses_in_between())
    fleet.replace(died)
    fleet.updated(fleet.names)
    loop.run(fleet.resume())
    assert loop.run(ended(work)).tokens.tolist() == [7, 8, 9, 10, 11]


def test_what_nobody_waits_for_any_more_is_interrupted(loop: EventLoop) -> None:
    sized = Sized(1, lambda request: respond(request, rows=0))
    sized.gates[0] = threading.Event()
    fleet = fleet_of(sized, loop, 1)
    given_up = loop.begin(fleet.generate(REQUEST))
    assert sized.sampling.acquire(timeout=60.0)
    given_up.cancel()
    resetting = loop.begin(fleet.reset())
    assert sized.paused.wait(60.0)
    with pytest.raises(TimeoutError):  # until nothing is sampled
        resetting.result(0.1)
    sized.gates.pop(0).set()
    resetting.result(60.0)
    assert sized.log == ["pause", "resume"] and len(sized.asked) == 1
    assert loop.run(fleet.generate(REQUEST)).tokens.tolist() == [7, 8, 9, 10, 11]
    loop.run(fleet.pause())
    loop.run(fleet.reset())  # whoever paused is gone
    assert loop.run(fleet.generate(REQUEST)).tokens.tolist() == [7, 8, 9, 10, 11]
