"""Use several engine processes as one: requests are split over them, weights go to all of them, and dead ones are
replaced."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import define, evolve, field

from corerl.calls import Future
from corerl.engines.base import UNLIMITED, CacheUse, GenerateRequest, Generation, Received
from corerl.engines.batching import Batcher, OnRowsEnded
from corerl.engines.continuation import append, continued
from corerl.engines.prefix_router import PrefixRouter, in_order
from corerl.engines.service import EngineAssignment
from corerl.errors import CorerlError, EngineFailed, ResizeFailed, VersionGone, WorkerDied
from corerl.event_loop import EventLoop, in_thread
from corerl.types import IntArray, OnProgress
from corerl.weights.manifest import Manifest
from corerl.weights.transport import Address

if TYPE_CHECKING:
    from corerl.cluster.group import RayGroup

STARTING_SECONDS = 1.0  # between two polls of replicas that are starting
END_SECONDS = 5.0  # for calls to notice that their processes have been killed
CLOSE_SECONDS = 60.0  # for a replica to shut down by itself


class State(Enum):
    """What a replica can do now. Requests go only to those that serve; all but the dead ones get other calls.

    EMPTY   -> SERVING  it has taken an update
    SERVING -> EMPTY    it has missed an update, or sleeps
    any     -> DEAD     its process has died or hangs, or `replace` or `resize` ends it

    A replica stays dead: `replace` puts another one in its place, which is empty once its process has started."""

    EMPTY = "no weights"
    SERVING = "serving"
    DEAD = "dead"


@define(kw_only=True, eq=False)
class Replica:
    """One engine process, from its start to its end. Its successor under the same name is another replica, so that
    what was asked of the old process, or comes back from it, is not taken for the new one's."""

    assignment: EngineAssignment
    restarts: int = 0  # of this name, since the last completed step
    state: State = State.EMPTY
    held: tuple[int, ...] = ()  # versions of the weights that it can sample from, if it serves; the newest last
    died_of: CorerlError | None = None  # if it is dead
    batcher: Batcher = field(init=False)

    @property
    def name(self) -> str:
        return self.assignment.context.name

    def mark_dead(self, error: CorerlError) -> None:
        self.state, self.died_of = State.DEAD, error


class EngineFleet:
    """Replicas `engine-0`, `engine-1`, ... A sample depends on its noise key, never on the replica that sampled it.

    If a replica's process dies while sampling, the others sample its part with the same noise, so the samples are the
    same as the dead replica's would have been. If none is left, whoever samples waits until `replace` has put new
    processes in their place, and an update has brought weights; `until` reports that. The same holds for replicas that
    `resize` ends.

    `generate`, `pause`, `resume` and `until` are coroutines of `loop`. All else is called in the thread that updates
    weights; private calls of replicas come from any thread.
    """

    def __init__(
        self,
        processes: RayGroup,
        assignments: Sequence[EngineAssignment],
        loop: EventLoop,
        *,
        calls: int = 1,
        width: Callable[[int], int] = lambda replicas: UNLIMITED,
        restarts: int = 0,
        span: Callable[[str], AbstractContextManager[None]] = lambda name: contextlib.nullcontext(),
    ) -> None:
        """`calls`: how many `generate` calls a replica answers at once; requests that wait for one are sent together,
        at most `width(len(self))` rows. `restarts`: how often a replica may be restarted without a completed step in
        between. `span(name)` is a context around each call of the replica of that name."""
        self.processes, self.loop = processes, loop
        self._calls, self._width, self._allowed, self._span = calls, width, restarts, span
        self._router: PrefixRouter[Replica] = PrefixRouter()
        self._numbers = itertools.count()  # of requests
        self._pauses_begun = 0  # by `pause`, so far
        self._pauses_ended = 0  # by `resume`; fewer than have begun while the fleet is paused
        self._replacing = False  # while True, no engine is called
        self._routed: list[Replica] = []  # the replicas that serve, as of the last `_route`
        self._serving = asyncio.Event()  # set while any of them does
        self._lost = asyncio.Event()  # set while none serves
        self._lost.set()
        self._changing = threading.Condition()
        self._calls_in_progress = 0
        self._replicas: list[Replica] = [self._replica(each) for each in assignments]  # in the order of their processes
        self.failure: CorerlError | None = None  # why all processes were killed; later deaths follow from it

    def _replica(self, assignment: EngineAssignment, *, restarts: int = 0) -> Replica:
        replica = Replica(assignment=assignment, restarts=restarts)
        call = functools.partial(self._call, replica)
        # `_route` says how wide.
        replica.batcher = Batcher(call, calls=self._calls, width=UNLIMITED, on_free_slot=self._relieve)
        return replica

    def start(self) -> Future[dict[str, CorerlError]]:
        """Construct all replicas; the result is there when they are ready. It says which have died meanwhile, and why:
        these are to be replaced."""
        processes = self.processes
        constructing = processes.construct([(assignment,) for assignment in self.assignments])

        def ready(timeout: float) -> bool:
            return processes.ready(constructing, timeout)

        def wait() -> dict[str, CorerlError]:
            while not ready(STARTING_SECONDS):
                pass
            failed = self._errors(processes.answers(constructing, timeout=0.0))
            if failed and all(isinstance(error, WorkerDied) for error in failed.values()):
                failed = self._errors(processes.answers(constructing))  # of the others too
            for error in failed.values():
                if not isinstance(error, WorkerDied):
                    processes.kill()
                    raise error
            return failed

        return Future(processes, ready, wait)

    def _errors(self, answers: Mapping[int, Any]) -> dict[str, CorerlError]:
        return {self.names[index]: each for index, each in answers.items() if isinstance(each, CorerlError)}

    def __len__(self) -> int:
        return len(self._replicas)

    @property
    def assignments(self) -> list[EngineAssignment]:
        return [each.assignment for each in self._replicas]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(each.name for each in self._replicas)

    @property
    def receivers(self) -> tuple[str, ...]:
        """The engine name of each weight receiver, by index; an engine with several receivers is repeated."""
        return tuple(each.context.name for each in self.assignments for _ in range(each.context.bundles))

    # ---- sampling ---------------------------------------------------------------------------------------------------

    async def generate(
        self,
        request: GenerateRequest,
        *,
        urgent: bool = False,
        on_progress: OnProgress | None = None,
        on_tokens: Callable[[Generation], None] | None = None,
    ) -> Generation:
        """Complete the rows, in the request's order, spread over the replicas by `PrefixRouter`; those that `pause`
        interrupts go on after it, under the weights of that time. `urgent` requests overtake those that wait.
        `on_progress` gets every few seconds how many rows have ended, and how many there are; `on_tokens` gets all that
        is generated, piece by piece. Raises a replica's own error, or the cause of its death once restarts are used
        up, and VersionGone once no replica holds the request's version."""
        number = -1 if urgent else next(self._numbers)
        return await self._divided(request, number, on_progress, on_tokens)

    async def _divided(
        self,
        request: GenerateRequest,
        number: int,
        on_progress: OnProgress | None,
        on_tokens: Callable[[Generation], None] | None,
    ) -> Generation:
        # What set it may be over when this task's turn comes. Engines that come get later versions, never this one.
        while request.version is None and not self._serving.is_set():
            await self._serving.wait()
        able = [each for each in self._routed if request.version in (None, *each.held)]
        if not able:
            held = ", ".join(map(str, self.held)) or "none"
            raise VersionGone(
                f"no engine holds weights version {request.version} any more, but {held}: raise weights.versions, or "
                "push the weights again, as another version"
            )
        rows = self._router.divide(request, able)
        ended = dict.fromkeys(rows, 0)

        async def generate_on(replica: Replica, own: IntArray, over: Callable[[Replica], None]) -> Generation:
            part = request.take_rows(own) if len(rows) > 1 else request

            def on_ended(done: int) -> None:
                ended[replica] = done
                if on_progress is not None:
                    on_progress(sum(ended.values()), len(request))

            async def others(rest: GenerateRequest, before: int = 0) -> Generation:
                """What any replica makes of the rest of the part, of which `before` rows have ended."""
                progress = on_progress and (lambda done, _: on_ended(before + done))
                return await self._divided(rest, number, progress, on_tokens)

            generated = await replica.batcher.generate(
                part, number=number, on_ended=None if on_progress is None else on_ended
            )
            over(replica)
            if generated is None:  # it died: others sample the same
                return await others(part)
            whole = len(part) - int(generated.unfinished.sum())
            on_ended(whole)
            if len(self) > 1:
                self._router.remember(replica, part, generated)
            if on_tokens is not None:
                on_tokens(generated)
            if not generated.unfinished.any():
                return generated
            if part.params.scored:  # scores are of these prompts, and not of those that go on with a response
                return await others(part)
            return append(part, generated, await others(continued(part, generated), whole))

        # Counted from now on: others that come at this moment are to go elsewhere.
        with self._router.in_progress({replica: len(own) for replica, own in rows.items()}) as over:
            parts = await asyncio.gather(*(generate_on(replica, own, over) for replica, own in rows.items()))
        return in_order(request, list(zip(rows.values(), parts, strict=True)))

    async def _call(
        self, replica: Replica, request: GenerateRequest, on_ended: OnRowsEnded | None
    ) -> Generation | None:
        """One call of a replica; None if it died."""
        ask = functools.partial(self._ask, "generate", {replica: (request,)}, on_ended)
        pauses_ended = self._pauses_ended
        try:
            # Lost while the request waited.
            lost = replica not in self._routed or replica.state is not State.SERVING
            if lost or request.version not in (None, *replica.held):
                return None
            with self._span(replica.name):
                answers = await in_thread(ask, name=f"call of {replica.name}")
        finally:
            self._route()
        generated: Generation | None = answers.get(replica)
        if generated is not None:
            index = replica.assignment.context.index
            generated = evolve(generated, engines=np.full(len(generated.tokens), index, np.int16))
        if generated is not None and request.version is not None and (generated.versions != request.version).any():
            raise EngineFailed(
                f"{replica.name} sampled from weights version {set(generated.versions.tolist())}, but was asked for "
                f"version {request.version}; an engine says in `Received.held` what it can sample from"
            )
        if generated is not None and request.params.scored and generated.scores is None:
            raise EngineFailed(f"{replica.name} was asked for log-probs of prompts, and its engine reports none")
        interrupted = self._pauses_begun > pauses_ended  # by a pause that has not ended before the call
        if generated is None or interrupted or replica not in self._replicas:
            return generated
        if unfinished := int(generated.unfinished.sum()):
            raise EngineFailed(
                f"{unfinished} of {len(generated)} responses came back unfinished, but the engines were not paused; an "
                "engine may return unfinished responses only between pause() and resume()"
            )
        return generated

    async def until(self, ended: Coroutine[Any, Any, Any]) -> bool:
        """Wait until this has ended, or no replica serves; then it is cancelled. Returns whether it has ended."""
        work, lost = asyncio.ensure_future(ended), asyncio.ensure_future(self._lost.wait())
        try:
            await asyncio.wait([work, lost], return_when=asyncio.FIRST_COMPLETED)
            return work.done()
        finally:
            work.cancel()
            lost.cancel()

    def wait(self, work: concurrent.futures.Future[Any]) -> bool:
        """Wait for `work`, which samples, in the thread that updates weights, until it has ended or no replica serves
        any more; returns whether it has ended."""
        return self.loop.run(self.until(_done(work)))

    @contextlib.contextmanager
    def replacing(self) -> Iterator[None]:
        """A context in which dead replicas are replaced and all get weights. None is called before it ends: an update
        may yet fail at another one, and is then repeated."""
        self._replacing = True
        try:
            yield
        finally:
            self._replacing = False
        self._apply_changes()

    async def pause(self) -> None:
        """Stop generating until `resume`; returns when nothing is being generated. Each process needs a thread for this
        besides those that generate."""
        self._pauses_begun += 1
        self._route()
        await in_thread(functools.partial(self._ask_all, "pause"), name="pause")
        for each in self._replicas:
            await each.batcher.idle()

    async def resume(self) -> None:
        await in_thread(functools.partial(self._ask_all, "resume"), name="resume")
        self._pauses_ended = self._pauses_begun
        self._route()

    async def cache_use(self) -> dict[str, CacheUse]:
        """How full the caches are of the replicas that serve, by name, but for engines that cannot say; of none while
        the fleet is paused."""
        asked = {} if self._paused or self._replacing else dict.fromkeys(self._routed, ())
        found = await in_thread(functools.partial(self._ask, "cache_use", asked), name="cache use") if asked else {}
        return {replica.name: use for replica, use in found.items() if use is not None}

    @property
    def _paused(self) -> bool:
        return self._pauses_begun > self._pauses_ended

    async def reset(self) -> None:
        """Interrupt all generation, whose callers are gone, as is whoever has paused the fleet."""
        await self.pause()
        await self.resume()

    def _relieve(self) -> None:
        """A replica could answer another request: route again the one that waits longest for the busiest replica."""
        busiest = max((each.batcher for each in self._replicas), key=lambda batcher: batcher.rows_waiting)
        if not (self._paused or self._replacing):
            busiest.hand_back(1)

    def _route(self, *, forget: bool = False) -> None:
        """Route requests to the replicas that serve now. A request that waits for a replica that serves no more is
        routed again; if more replicas serve than before, every waiting request is. `forget` drops the prefixes that
        replicas have read. In the event loop's thread."""
        if forget:
            self._router.forget()
        before, self._routed = self._routed, [each for each in self._replicas if each.state is State.SERVING]
        more = not set(before).issuperset(self._routed)
        for each in self._replicas:
            each.batcher.width = self._width(len(self))
        for each in dict.fromkeys([*before, *self._replicas]):
            if more or each not in self._routed:
                each.batcher.hand_back()
            # Not where nothing is called: a request may be on its way there, and come back from `_call`.
            each.batcher.hold((self._paused or self._replacing) and each in self._routed)
        if self._routed:
            self._serving.set()
            self._lost.clear()
        else:
            self._serving.clear()
            self._lost.set()

    def _apply_changes(self, *, forget: bool = False) -> None:
        """Run `_route` in the event loop, from the thread that updates weights, and wait for it."""

        async def route() -> None:
            self._route(forget=forget)

        self.loop.run(route())

    # ---- weights and memory -----------------------------------------------------------------------------------------

    def receive(self, manifest: Manifest, version: int, address: Address) -> Any:
        """Start `receive` on the engines; call it together with the group's `update_weights`, and then `received`."""
        return self.processes.start("receive", manifest, version, address)

    def received(self, pending: Any, timeout: float) -> dict[str, Received]:
        """The results of the engines that answered within `timeout` seconds; a death counts as an answer."""
        answers = self.processes.answers(pending, timeout=timeout)
        return {self.names[index]: _received(answer) for index, answer in answers.items()}

    def updated(self, taken: Collection[str], held: Mapping[str, tuple[int, ...]] = MappingProxyType({})) -> None:
        """Let those engines serve that have taken an update, from the versions that each has `held` since. The others
        serve nothing until one reaches them."""
        with self._changing:
            for each in self._replicas:
                if each.state is not State.DEAD:
                    each.state = State.SERVING if each.name in taken else State.EMPTY
                    each.held = held.get(each.name, ())
        self._apply_changes(forget=True)

    def forget_prefixes(self) -> None:
        """Route later requests as if none had come since the last update."""
        self._apply_changes(forget=True)

    @property
    def held(self) -> tuple[int, ...]:
        """The versions of the weights that every replica that serves can sample from, the newest last."""
        serving = [each.held for each in self._replicas if each.state is State.SERVING]
        return tuple(version for version in (serving or [()])[0] if all(version in each for each in serving))

    @property
    def all_serve(self) -> bool:
        """Whether every replica holds all weights, so that an update of adapters alone is enough."""
        return all(each.state is State.SERVING for each in self._replicas)

    def forget(self, version: int) -> None:
        """Let all engines, which are paused, hold an earlier version no longer, in whose place another one comes."""
        self._ask_all("forget", version)
        for each in self._replicas:
            each.held = tuple(own for own in each.held if own != version)

    def weight_sums(self, dtype: str) -> dict[str, Mapping[str, int] | None]:
        """Each live engine's `Engine.weight_sums`, by name."""
        return {replica.name: sums for replica, sums in self._ask_all("weight_sums", dtype).items()}

    def sleep(self) -> int:
        """Free the engines' memory; returns the bytes that this frees on the fullest of their devices. Nothing is
        served until `wake_up` and a weight update."""
        self.updated([])
        freed = self._ask_all("sleep")
        return max((each // replica.assignment.context.bundles for replica, each in freed.items()), default=0)

    def wake_up(self) -> None:
        """Reallocate the weights' memory. Idempotent."""
        self._ask_all("wake_up")

    # ---- deaths -----------------------------------------------------------------------------------------------------

    @property
    def deaths(self) -> dict[str, CorerlError]:
        """The cause of each death, by name, of replicas that are not replaced yet, in their order."""
        with self._changing:
            return {each.name: each.died_of for each in self._replicas if each.died_of is not None}

    def leave_out(self, failed: Mapping[str, CorerlError]) -> None:
        """Send no more calls to these hanging or failing engines until they are replaced."""
        with self._changing:
            for each in self._replicas:
                if each.name in failed:
                    each.mark_dead(failed[each.name])

    def replace(self, failed: Mapping[str, CorerlError]) -> None:
        """Start new processes in place of these engines, dead or alive; `failed` maps each name to the reason. They
        serve once an update has reached them; a failed start is retried. Raises the error of an engine whose restarts
        since the last completed step are used up.
        """
        indices = {self.names.index(name): error for name, error in failed.items()}
        for index, error in indices.items():
            self._require_allowed(self._replicas[index], error)
        for index, error in indices.items():
            failure = self._restart(index, error)
            while failure is not None:
                self._require_allowed(self._replicas[index], failure)
                failure = self._restart(index, failure)
        self._apply_changes()

    def _restart(self, index: int, died_of: CorerlError) -> CorerlError | None:
        """Start a new process in place of a replica's; returns why it did not start, or None."""
        old = self._replicas[index]
        new = self._replica(old.assignment, restarts=old.restarts + 1)
        with self._changing:
            old.mark_dead(died_of)
            new.mark_dead(died_of)  # it gets no calls until it is ready
            self._replicas[index] = new  # before the old process ends, whose death is not the new replica's
        try:
            self.processes.replace(index, (new.assignment,))
        except CorerlError as error:
            return error
        with self._changing:
            new.state, new.died_of = State.EMPTY, None
        return None

    def step_done(self) -> None:
        """Reset the count of restarts."""
        for each in self._replicas:
            each.restarts = 0

    def _require_allowed(self, replica: Replica, error: CorerlError) -> None:
        """Kill all processes and raise `error` if the replica's restarts are used up."""
        if self.failure is not None:
            raise self.failure
        if replica.restarts < self._allowed:
            return
        self.failure = error
        self.processes.kill()
        if restarts := replica.restarts:
            error.add_note(
                f"the engine had already been restarted {restarts} time{'s' * (restarts > 1)} (rollout.restarts)"
            )
        raise error

    def _ask(
        self, method: str, arguments: Mapping[Replica, tuple[Any, ...]], on_ended: OnRowsEnded | None = None
    ) -> dict[Replica, Any]:
        """Return the answers of the live replicas, and mark those that died. On any other failure, or when a dead
        replica's restarts are used up, kill all processes and raise the error. Replicas that were replaced or ended are
        not called; if that happens during their call, its failure is ignored."""
        try:
            with self._changing:
                self._calls_in_progress += 1
                asked = {index: each for index, each in enumerate(self._replicas) if each in arguments}
                pending = self.processes.start_some(method, {index: arguments[each] for index, each in asked.items()})
            found = self.processes.answers(pending, on_ended=on_ended)
        except WorkerDied as gone:  # none can be asked any more
            raise self.failure or gone from None
        finally:
            with self._changing:
                self._calls_in_progress -= 1
                self._changing.notify_all()
        answers = {asked[index]: answer for index, answer in found.items()}
        for replica, error in answers.items():
            if not isinstance(error, CorerlError):
                continue
            with self._changing:
                if replica not in self._replicas:
                    continue
                if isinstance(error, WorkerDied):
                    replica.mark_dead(error)
            if not isinstance(error, WorkerDied):
                self.failure = self.failure or error
                self.processes.kill()
                raise error
            self._require_allowed(replica, error)
        return {replica: answer for replica, answer in answers.items() if not isinstance(answer, CorerlError)}

    def _ask_all(self, method: str, *args: Any) -> dict[Replica, Any]:
        return self._ask(method, {each: args for each in self._replicas if each.state is not State.DEAD})

    # ---- more or fewer ----------------------------------------------------------------------------------------------

    def resize(self, assignments: Sequence[EngineAssignment], slots: Sequence[Any]) -> None:
        """Start or end processes, so that there is one for each assignment, in its slot (as `RayGroup` takes them).
        Replicas that stay keep their assignments, and may be sampling meanwhile.

        New replicas are awake, and serve once an update has reached them. If any does not start, the fleet stays as it
        was, and ResizeFailed is raised. If there are too many replicas, the last ones end, dead or alive; the
        others continue their rows, and the samples are the same."""
        if len(assignments) > len(self):
            self._add(assignments[len(self) :], slots[len(self) :])
        elif len(assignments) < len(self):
            self._end_last(len(self) - len(assignments))

    def reassign(self, assignments: Sequence[EngineAssignment], slots: Sequence[Any]) -> None:
        """Give processes of a lost machine, which `replace` restarts, other slots and assignments; those that live
        keep theirs. If there are fewer assignments than replicas, the last replicas end, as in `resize`."""
        if len(assignments) < len(self):
            self._end_last(len(self) - len(assignments))
        with self._changing:
            for replica, assignment in zip(self._replicas, assignments, strict=True):
                replica.assignment = assignment
            self.processes.reassign(slots)

    def _add(self, assignments: Sequence[EngineAssignment], slots: Sequence[Any]) -> None:
        names = [assignment.context.name for assignment in assignments]
        replicas = len(self) + len(names)
        try:
            self.processes.grow(names, slots, [(assignment,) for assignment in assignments])
        except CorerlError as error:
            if self.failure is not None:  # meanwhile, of all
                raise self.failure from None
            stays = ResizeFailed(
                f"the engines stay {len(self)} and do not become {replicas}, since not all of {', '.join(names)} have "
                f"started: {error.message}"
            )
            stays.details = error.details
            raise stays from error
        with self._changing:
            self._replicas = [*self._replicas, *map(self._replica, assignments)]
        self._apply_changes()

    def _end_last(self, count: int) -> None:
        with self._changing:
            rest, ended = self._replicas[:-count], self._replicas[-count:]
            living = [index for index, each in enumerate(ended, len(rest)) if each.state is not State.DEAD]
            for each in ended:
                each.state = State.DEAD
            self._replicas = rest  # from now on the others get no calls, and their deaths do not count
        self._apply_changes()
        try:
            self._close(lambda method: self.processes.start_some(method, dict.fromkeys(living, ())))
        except WorkerDied as gone:  # all have
            raise self.failure or gone from None
        self.processes.shrink(count)

    # ---- the end ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the replicas, even while they generate or hang."""
        try:
            self._close(self.processes.start)
        finally:
            self.end()

    def _close(self, start: Callable[[str], Any]) -> None:
        """Let the replicas that `start` asks shut down by themselves; what they generate comes back unfinished."""
        for method in ("pause", "close"):  # a replica that dies here has ended too
            self.processes.answers(start(method), timeout=CLOSE_SECONDS)

    def end(self) -> None:
        """End the processes at once, and whoever waits for them: when this returns, nobody asks Ray any more."""
        self.processes.kill()
        with self._changing:
            self._changing.wait_for(lambda: not self._calls_in_progress, END_SECONDS)


async def _done(work: concurrent.futures.Future[Any]) -> None:
    """Wait for `work`, which goes on if this is cancelled."""
    ended, loop = asyncio.Event(), asyncio.get_running_loop()
    work.add_done_callback(lambda _: loop.call_soon_threadsafe(ended.set))
    await ended.wait()


def _received(answer: Received | CorerlError) -> Received:
    if isinstance(answer, CorerlError):
        died = isinstance(answer, WorkerDied)
        return Received(bytes=0, error=answer.message, died=died, details=answer.details)
    return answer
