"""Use several engine processes as one: requests are split over them, weights go to all of them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from attrs import define

from corerl.calls import Future
from corerl.engines.base import UNLIMITED, GenerateRequest, Generation, Received, require_finished
from corerl.engines.batching import Batcher, Count
from corerl.engines.continuation import append, continued
from corerl.engines.prefix_router import PrefixRouter, in_order
from corerl.engines.service import EngineAssignment
from corerl.errors import CorerlError, ResizeFailed, WorkerDied
from corerl.event_loop import EventLoop, in_thread
from corerl.types import IntArray
from corerl.weights.manifest import Manifest
from corerl.weights.transport import Address

STARTING_SECONDS = 1.0  # between two polls of replicas that are starting
END_SECONDS = 5.0  # for calls to notice that their processes have been killed
CLOSE_SECONDS = 60.0  # for a replica to shut down by itself

Counted = Callable[[int, int], None]  # called with how many are done, and how many there are
CallCounts = Callable[[Mapping[int, int | None]], None]  # as `RayGroup.answers` calls it


class Processes(Protocol):
    """The group of processes that a fleet runs on, such as `corerl.cluster.group.RayGroup`."""

    def __len__(self) -> int: ...
    def construct(self, arguments: Sequence[tuple[Any, ...]]) -> Any: ...
    def start(self, method: str, *args: Any) -> Any: ...
    def start_some(self, method: str, arguments: Mapping[int, tuple[Any, ...]]) -> Any: ...
    def wait(self, pending: Any) -> list[Any]: ...
    def ready(self, pending: Any, timeout: float) -> bool: ...
    def answers(self, pending: Any, counted: CallCounts | None = None) -> dict[int, Any]: ...
    def answered(self, pending: Any, timeout: float) -> dict[int, Any]: ...
    def replace(self, member: int, arguments: tuple[Any, ...]) -> None: ...
    def grow(self, names: Sequence[str], slots: Sequence[Any], arguments: Sequence[tuple[Any, ...]]) -> None: ...
    def shrink(self, count: int) -> None: ...
    def reassign(self, slots: Sequence[Any]) -> None: ...
    def kill(self) -> None: ...


@define(kw_only=True, eq=False)
class _Replica:
    """What is known of a replica. One that `resize` has ended is remembered, since what was on its way to it comes back
    from there; the next of its number goes on with this."""

    batcher: Batcher
    serves: bool  # alive, and has weights, as far as is known
    whole: bool = False  # has all weights, so that adapters may come alone
    died_of: CorerlError | None = None  # until it is replaced
    started: int = 1  # processes so far; one more once `resize` has ended the last
    restarts: int = 0  # since the last completed step


class EngineFleet:
    """Replicas `engine-0`, `engine-1`, ... A sample depends on its noise key, never on the replica that sampled it.

    If a replica's process dies while sampling, the others sample its share with the same noise, so the samples are the
    same as the dead replica's would have been. If none is left, whoever samples waits until `replace` has put new
    processes in their place, and an update has brought weights; `until` reports that. The same holds for replicas that
    `resize` ends, of which there are then fewer.

    `generate`, `pause`, `resume` and `until` are coroutines of `loop`. All else is called in the thread that updates
    weights.
    """

    def __init__(
        self,
        processes: Processes,
        assignments: Sequence[EngineAssignment],
        loop: EventLoop,
        *,
        calls: int = 1,
        width: Callable[[int], int] = lambda replicas: UNLIMITED,
        restarts: int = 0,
        noted: Callable[[str], AbstractContextManager[None]] = lambda name: contextlib.nullcontext(),
    ) -> None:
        """`calls`: how many `generate` calls a replica answers at once; requests that wait for one are sent together,
        at most `width(len(self))` rows. `restarts`: how often a replica may be restarted without a completed step in
        between. A call of a replica is in a context of its name, `noted(name)`."""
        self.processes = processes
        self._noted = noted
        self.assignments = list(assignments)
        self.loop = loop
        self._calls, self._width = calls, width
        self._allowed = restarts
        self._changing = threading.Condition()
        self._calls_in_progress = 0
        self._router = PrefixRouter()
        self._numbers = itertools.count()  # of requests
        self._pauses = 0  # so far
        self._paused = False
        self._replacing = False  # while True, no engine is called
        self._serving_replicas = list(range(len(assignments)))  # replicas that serve, as of the last `_changed`
        self._serving = asyncio.Event()  # set while any of them does
        self._lost = asyncio.Event()  # set while none serves
        self._replicas = [_Replica(batcher=self._batcher(replica), serves=True) for replica in range(len(self))]
        self._failure: CorerlError | None = None  # why all processes were killed; later deaths follow from it
        self._serving.set()

    def _batcher(self, replica: int) -> Batcher:
        call = functools.partial(self._call, replica)
        return Batcher(call, calls=self._calls, width=self._width(len(self)), idle=self._relieve)

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
            failed = self._errors(processes.answered(constructing, 0.0))
            if failed and all(isinstance(error, WorkerDied) for error in failed.values()):
                failed = self._errors(processes.answers(constructing))  # of the others too
            for error in failed.values():
                if not isinstance(error, WorkerDied):
                    processes.kill()
                    raise error
            return failed

        return Future(processes, ready, wait)

    def _errors(self, answers: Mapping[int, Any]) -> dict[str, CorerlError]:
        return {self.names[replica]: each for replica, each in answers.items() if isinstance(each, CorerlError)}

    def __len__(self) -> int:
        return len(self.assignments)

    @property
    def _there(self) -> list[_Replica]:
        """The replicas, without those that `resize` has ended."""
        return self._replicas[: len(self)]

    def _named(self, names: Iterable[str]) -> list[_Replica]:
        return [self._replicas[self.names.index(name)] for name in names]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(assignment.context.name for assignment in self.assignments)

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
        on_progress: Counted | None = None,
        on_tokens: Callable[[Generation], None] | None = None,
    ) -> Generation:
        """Complete the rows, in the request's order, spread over the replicas by `PrefixRouter`; those that `pause`
        interrupts go on after it, under the weights of that time. `urgent` requests overtake those that wait.
        `on_progress` gets every few seconds how many rows have ended, and how many there are; `on_tokens` gets all that
        is generated, piece by piece. Raises a replica's own error, or the cause of its death once restarts are used
        up."""
        number = -1 if urgent else next(self._numbers)
        return await self._divided(request, number, on_progress, on_tokens)

    async def _divided(
        self,
        request: GenerateRequest,
        number: int,
        on_progress: Counted | None,
        on_tokens: Callable[[Generation], None] | None,
    ) -> Generation:
        while not self._serving.is_set():  # what set it may be over when this task's turn comes
            await self._serving.wait()
        rows = self._router.divide(request, self._serving_replicas)
        ended = dict.fromkeys(rows, 0)

        async def generate_on(replica: int, own: IntArray, over: Callable[[int], None]) -> Generation:
            share = request.take(own) if len(rows) > 1 else request

            def counted(done: int) -> None:
                ended[replica] = done
                if on_progress is not None:
                    on_progress(sum(ended.values()), len(request))

            generated = await self._replicas[replica].batcher.generate(
                share, number=number, counted=None if on_progress is None else counted
            )
            over(replica)
            if generated is None:  # it died: others sample the same
                return await self._divided(share, number, None, on_tokens)
            counted(len(share) - int(generated.unfinished.sum()))
            if len(self) > 1:
                self._router.remember(replica, share, generated)
            if on_tokens is not None:
                on_tokens(generated)
            if not generated.unfinished.any():
                return generated
            return append(share, generated, await self._divided(continued(share, generated), number, None, on_tokens))

        # Counted from now on: others that come at this moment are to go elsewhere.
        with self._router.counted({replica: len(own) for replica, own in rows.items()}) as over:
            parts = await asyncio.gather(*(generate_on(replica, own, over) for replica, own in rows.items()))
        return in_order(request, list(zip(rows.values(), parts, strict=True)))

    async def _call(self, replica: int, request: GenerateRequest, counted: Count | None) -> Generation | None:
        """One call of a replica; None if it died."""

        def on_counts(counts: Mapping[int, int | None]) -> None:
            if counted is not None and (ended := counts.get(replica)) is not None:
                counted(ended)

        known = self._replicas[replica]
        started = known.started
        counts = None if counted is None else on_counts
        ask = functools.partial(self._ask, "generate", {replica: (request,)}, counts, {replica: started})
        ended = self._pauses - self._paused  # pauses; any other interrupts this call
        try:
            if not known.serves:  # lost while the request waited; a new process may be there, without weights
                return None
            with self._noted(self.names[replica]):
                generated: Generation | None = (await in_thread(ask, name=f"call of engine-{replica}")).get(replica)
        finally:
            self._changed()
        if generated is not None and ended == self._pauses and started == known.started:
            require_finished(generated)
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
        self._pauses += 1
        self._paused = True
        self._changed()
        await in_thread(functools.partial(self._ask_all, "pause"), name="pause")
        for each in self._replicas:
            await each.batcher.idle()

    async def resume(self) -> None:
        await in_thread(functools.partial(self._ask_all, "resume"), name="resume")
        self._paused = False
        self._changed()

    async def reset(self) -> None:
        """Interrupt all generation, whose callers are gone, and resume if the fleet is paused."""
        if not self._paused and any(each.batcher.calling for each in self._replicas):
            await self.pause()
        if self._paused:
            await self.resume()

    def _relieve(self) -> None:
        """A replica has nothing to do: route the request that waits longest for the busiest one again."""
        busiest = max((each.batcher for each in self._replicas), key=lambda batcher: batcher.rows_waiting)
        if not (self._paused or self._replacing):
            busiest.give_up_first()

    def _changed(self) -> None:
        """Let what waits go on, or wait, as replicas serve now. In the event loop's thread."""
        before, self._serving_replicas = (
            self._serving_replicas,
            [replica for replica, each in enumerate(self._there) if each.serves],
        )
        more = not set(before).issuperset(self._serving_replicas)  # what waits is divided among them too
        held = self._paused or self._replacing
        for replica, each in enumerate(self._replicas):
            if more or replica not in self._serving_replicas:
                each.batcher.abandon()
            if held:
                each.batcher.hold()
            else:
                each.batcher.go_on()
        _set(self._serving, bool(self._serving_replicas))
        _set(self._lost, not self._serving_replicas)

    def _apply_changes(self, forget: bool = False) -> None:
        """Run `_changed` in the event loop, from the thread that updates weights, and wait for it. `forget` drops the
        prefixes that replicas have read."""

        async def changed() -> None:
            if forget:
                self._router.forget()
            self._changed()

        self.loop.run(changed())

    # ---- deaths -----------------------------------------------------------------------------------------------------

    @property
    def dead(self) -> bool:
        """Whether any dead replica is not replaced yet."""
        return any(each.died_of is not None for each in self._there)

    @property
    def lacking(self) -> bool:
        """Whether any replica that lives has no weights yet."""
        with self._changing:
            return any(not each.serves and each.died_of is None for each in self._there)

    @property
    def died(self) -> dict[str, CorerlError]:
        """The cause of each death, by name, of replicas that are not replaced yet, in their order."""
        with self._changing:
            known = zip(self.names, self._there, strict=True)
            return {name: each.died_of for name, each in known if each.died_of is not None}

    def replace(self, failed: Mapping[str, CorerlError]) -> None:
        """Start new processes in place of these engines, dead or alive; `failed` maps each name to the reason. They
        serve once an update has reached them; a failed start is retried. Raises the error of an engine whose restarts
        since the last completed step are used up.
        """
        replicas = {self.names.index(name): error for name, error in failed.items()}
        for replica, error in replicas.items():
            self._require_allowed(replica, error)
        for replica, error in replicas.items():
            failure = self._restart(replica, error)
            while failure is not None:
                self._require_allowed(replica, failure)
                failure = self._restart(replica, failure)
        self._apply_changes()

    def _restart(self, replica: int, died_of: CorerlError) -> CorerlError | None:
        """Start a new process in place of a replica's; returns why it did not start, or None."""
        known = self._replicas[replica]
        with self._changing:
            known.serves = known.whole = False
            known.died_of = died_of  # it gets no calls until it is ready
            known.restarts += 1
            known.started += 1  # before the old process ends: later reports of its death are outdated
        try:
            self.processes.replace(replica, (self.assignments[replica],))
        except CorerlError as error:
            return error
        with self._changing:
            known.died_of = None
        return None

    def leave_out(self, failed: Mapping[str, CorerlError]) -> None:
        """Send no more calls to these hanging or failing engines until they are replaced."""
        with self._changing:
            for each, error in zip(self._named(failed), failed.values(), strict=True):
                each.died_of = error

    @property
    def whole(self) -> bool:
        """Whether every replica holds all weights, so that an update of adapters alone is enough."""
        with self._changing:
            return all(each.whole for each in self._there)

    def updated(self, taken: Collection[str], *, whole: bool) -> None:
        """Note which engines have taken an update, of all weights or of adapters alone. The others serve nothing until
        one reaches them."""
        with self._changing:
            for name, each in zip(self.names, self._there, strict=True):
                if name not in taken:
                    each.serves = each.whole = False
                elif whole:
                    each.whole = True
        self._apply_changes()

    def step_completed(self) -> None:
        """Reset the count of restarts."""
        for each in self._replicas:
            each.restarts = 0

    def _require_allowed(self, replica: int, error: CorerlError) -> None:
        """Kill all processes and raise `error` if the replica's restarts are used up."""
        if self._failure is not None:
            raise self._failure
        restarts = self._replicas[replica].restarts
        if restarts < self._allowed:
            return
        self._failure = error
        self.processes.kill()
        if restarts:
            error.add_note(
                f"the engine had already been restarted {restarts} time{'s' * (restarts > 1)} (rollout.restarts)"
            )
        raise error

    def _ask(
        self,
        method: str,
        arguments: Mapping[int, tuple[Any, ...]],
        counted: CallCounts | None = None,
        started: Mapping[int, int] | None = None,
    ) -> dict[int, Any]:
        """Return the answers of the live replicas; note which ones died. On any other failure, or when a dead replica's
        restarts are used up, kill all processes and raise the error. Processes that have come since replicas had
        `started` so many are not asked, and how those fail that have gone since is no matter."""
        try:
            with self._changing:
                self._calls_in_progress += 1
                asked = started or {replica: self._replicas[replica].started for replica in arguments}
                there = {each: own for each, own in arguments.items() if self._replicas[each].started == asked[each]}
                pending = self.processes.start_some(method, there)
            answers = self.processes.answers(pending, counted)
        except WorkerDied as gone:  # none can be asked any more
            raise self._failure or gone from None
        finally:
            with self._changing:
                self._calls_in_progress -= 1
                self._changing.notify_all()
        failed = {replica: answer for replica, answer in answers.items() if isinstance(answer, CorerlError)}
        for replica, error in failed.items():
            known = self._replicas[replica]
            with self._changing:
                if known.started != asked[replica]:
                    continue  # replaced or ended meanwhile: this is of its old process
                if isinstance(error, WorkerDied):
                    known.died_of, known.serves = error, False
            if not isinstance(error, WorkerDied):
                self._failure = self._failure or error
                self.processes.kill()
                raise error
            self._require_allowed(replica, error)
        return {replica: answer for replica, answer in answers.items() if replica not in failed}

    def _ask_all(self, method: str, *args: Any) -> dict[int, Any]:
        alive = [replica for replica, each in enumerate(self._there) if each.died_of is None]
        return self._ask(method, dict.fromkeys(alive, args))

    # ---- more or fewer ----------------------------------------------------------------------------------------------

    def resize(self, assignments: Sequence[EngineAssignment], slots: Sequence[Any]) -> None:
        """Start or end processes, so that there is one for each assignment, in its slot (as `RayGroup` takes them).
        Those that stay keep their assignments, and may be sampling meanwhile.

        New ones are awake, and serve once an update has reached them. If one does not start, it remains as it was, and
        a ResizeFailed says so. Of more than are wanted, the last ones end, dead or alive; others continue their
        rows, and the samples are the same."""
        _require_same(self.assignments, assignments)
        if len(assignments) > len(self):
            self._add(assignments[len(self) :], slots[len(self) :])
        elif len(assignments) < len(self):
            self._end_last(len(self) - len(assignments))

    def reassign(self, assignments: Sequence[EngineAssignment], slots: Sequence[Any]) -> None:
        """Give processes of a lost machine, which `replace` restarts, other slots and assignments; those that live
        keep theirs. Of more than are given the last ones end, as in `resize`."""
        if len(assignments) < len(self):
            self._end_last(len(self) - len(assignments))
        with self._changing:
            self.assignments = list(assignments)
            self.processes.reassign(slots)

    def _add(self, assignments: Sequence[EngineAssignment], slots: Sequence[Any]) -> None:
        names = [assignment.context.name for assignment in assignments]
        try:
            self.processes.grow(names, slots, [(assignment,) for assignment in assignments])
        except CorerlError as error:
            if self._failure is not None:  # meanwhile, of all
                raise self._failure from None
            stays = ResizeFailed(
                f"the engines stay {len(self)} and do not become {len(self) + len(names)}, since not all of "
                f"{', '.join(names)} have started: {error.message}"
            )
            stays.details = error.details
            raise stays from error
        with self._changing:
            for replica in range(len(self._replicas), len(self) + len(names)):  # there never was one of this number
                self._replicas.append(_Replica(batcher=self._batcher(replica), serves=False))
            self.assignments = [*self.assignments, *assignments]
        self._resized()

    def _end_last(self, count: int) -> None:
        rest = len(self) - count
        with self._changing:
            living = [replica for replica in range(rest, len(self)) if self._replicas[replica].died_of is None]
            for each in self._there[rest:]:
                each.started += 1  # from now on they get no calls, and their deaths are none
                each.serves, each.whole, each.died_of, each.restarts = False, False, None, 0
        self._apply_changes()
        try:
            self._close(lambda method: self.processes.start_some(method, dict.fromkeys(living, ())))
        except WorkerDied as gone:  # all have
            raise self._failure or gone from None
        with self._changing:
            self.assignments = self.assignments[:rest]
            self.processes.shrink(count)
        self._resized()

    def _resized(self) -> None:
        for each in self._replicas:
            each.batcher.width = self._width(len(self))
        self._apply_changes()

    # ---- weights and memory -----------------------------------------------------------------------------------------

    def receive(self, manifest: Manifest, version: int, address: Address) -> Any:
        """Start `receive` on the engines; call it together with the group's `update_weights`, and then `received`."""
        return self.processes.start("receive", manifest, version, address)

    def received(self, pending: Any, timeout: float) -> dict[str, Received]:
        """The results of the engines that answered within `timeout` seconds; a death counts as an answer."""
        return self._note_received(self.processes.answered(pending, timeout))

    def weight_sums(self, dtype: str) -> dict[str, Mapping[str, int] | None]:
        """Each live engine's `Engine.weight_sums`, by name."""
        return {self.names[replica]: sums for replica, sums in self._ask_all("weight_sums", dtype).items()}

    def sleep(self) -> int:
        """Free the engines' memory; returns the bytes that this frees on the fullest of their devices. Nothing is
        served until `wake_up` and a weight update."""
        with self._changing:
            for each in self._there:
                each.whole = False
        freed = self._ask_all("sleep")
        return max((each // self.assignments[replica].context.bundles for replica, each in freed.items()), default=0)

    def wake_up(self) -> int:
        """Reallocate the weights' memory; returns bytes. Idempotent."""
        return sum(self._ask_all("wake_up").values())

    def close(self) -> None:
        """End the replicas, even while they generate or hang."""
        try:
            self._close(self.processes.start)
        finally:
            self.end()

    def _close(self, start: Callable[[str], Any]) -> None:
        """Let the replicas that `start` asks shut down by themselves; what they generate comes back unfinished."""
        for method in ("pause", "close"):  # a replica that dies here has ended too
            self.processes.answered(start(method), CLOSE_SECONDS)

    def end(self) -> None:
        """End the processes at once, and whoever waits for them: when this returns, nobody asks Ray any more."""
        self.processes.kill()
        with self._changing:
            self._changing.wait_for(lambda: not self._calls_in_progress, END_SECONDS)

    def _note_received(self, answers: Mapping[int, Any]) -> dict[str, Received]:
        fared = {replica: _received(answer) for replica, answer in answers.items()}
        with self._changing:
            for replica, each in fared.items():
                known = self._replicas[replica]
                known.serves = not each.error
                if not each.error:
                    known.died_of = None  # a death reported for an earlier process
        self._apply_changes(forget=True)
        return {self.names[replica]: each for replica, each in fared.items()}


def _require_same(old: Sequence[EngineAssignment], new: Sequence[EngineAssignment]) -> None:
    """Raise ResizeFailed if there would be none, or other ones in the place of those that stay."""
    if not new:
        raise ResizeFailed("the engines cannot become 0: nothing would sample; keep 1 or more")
    for was, wanted in zip(old, new, strict=False):
        if was.context != wanted.context:
            raise ResizeFailed(
                f"{was.context.name} would need {wanted.context}, but has {was.context}, and engines that run are not "
                "moved; add or remove the last ones"
            )


async def _done(work: concurrent.futures.Future[Any]) -> None:
    """Wait for `work`, which goes on if this is cancelled."""
    ended, loop = asyncio.Event(), asyncio.get_running_loop()
    work.add_done_callback(lambda _: loop.call_soon_threadsafe(ended.set))
    await ended.wait()


def _set(event: asyncio.Event, value: bool) -> None:
    if value:
        event.set()
    else:
        event.clear()


def _received(answer: Received | CorerlError) -> Received:
    if isinstance(answer, CorerlError):
        return Received(version=-1, bytes=0, error=answer.message, died=isinstance(answer, WorkerDied))
    return answer
