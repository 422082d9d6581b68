"""Use several engine processes as one: requests are split over them, weights go to all of them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import itertools
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import evolve

from corerl.engines.base import UNLIMITED, CacheUse, GenerateRequest, Generation, Received
from corerl.engines.batching import Batcher, OnRowsEnded
from corerl.engines.continuation import append, continued
from corerl.engines.prefix_router import PrefixRouter, in_order
from corerl.engines.replicas import Replica, Replicas, State
from corerl.engines.service import EngineAssignment
from corerl.errors import CorerlError, EngineFailed, VersionGone, WorkerDied
from corerl.event_loop import EventLoop, in_thread
from corerl.types import IntArray, OnProgress
from corerl.weights.manifest import Manifest
from corerl.weights.transport import Address

if TYPE_CHECKING:
    from corerl.cluster.group import RayGroup


class EngineFleet(Replicas):
    """Replicas `engine-0`, `engine-1`, ... A sample depends on its noise key, never on the replica that sampled it.

    If a replica's process dies while sampling, the others sample its share with the same noise, so the samples are the
    same as the dead replica's would have been. If none is left, whoever samples waits until `replace` has put new
    processes in their place, and an update has brought weights; `until` reports that. The same holds for replicas that
    `resize` ends.

    `generate`, `pause`, `resume` and `until` are coroutines of `loop`. All else is called in the thread that updates
    weights.
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
        self._span = span
        self.loop = loop
        self._calls, self._width = calls, width
        self._router: PrefixRouter[Replica] = PrefixRouter()
        self._numbers = itertools.count()  # of requests
        self._pauses_begun = 0  # by `pause`, so far
        self._pauses_ended = 0  # by `resume`; fewer than have begun while the fleet is paused
        self._replacing = False  # while True, no engine is called
        self._routed: list[Replica] = []  # the replicas that serve, as of the last `_route`
        self._serving = asyncio.Event()  # set while any of them does
        self._lost = asyncio.Event()  # set while none serves
        self._lost.set()
        super().__init__(processes, assignments, restarts=restarts)

    def _batcher(self, replica: Replica) -> Batcher:
        call = functools.partial(self._call, replica)
        return Batcher(call, calls=self._calls, width=UNLIMITED, on_free_slot=self._relieve)  # `_route` says how wide

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
            share = request.take_rows(own) if len(rows) > 1 else request

            def on_ended(done: int) -> None:
                ended[replica] = done
                if on_progress is not None:
                    on_progress(sum(ended.values()), len(request))

            generated = await replica.batcher.generate(
                share, number=number, on_ended=None if on_progress is None else on_ended
            )
            over(replica)
            if generated is None:  # it died: others sample the same
                return await self._divided(share, number, None, on_tokens)
            on_ended(len(share) - int(generated.unfinished.sum()))
            if len(self) > 1:
                self._router.remember(replica, share, generated)
            if on_tokens is not None:
                on_tokens(generated)
            if not generated.unfinished.any():
                return generated
            if share.params.scored:  # scores are of these prompts, and not of those that go on with a response
                return await self._divided(share, number, None, on_tokens)
            return append(share, generated, await self._divided(continued(share, generated), number, None, on_tokens))

        # Counted from now on: others that come at this moment are to go elsewhere.
        with self._router.in_progress({replica: len(own) for replica, own in rows.items()}) as over:
            parts = await asyncio.gather(*(generate_on(replica, own, over) for replica, own in rows.items()))
        return in_order(request, list(zip(rows.values(), parts, strict=True)))

    async def _call(
        self, replica: Replica, request: GenerateRequest, on_ended: OnRowsEnded | None
    ) -> Generation | None:
        """One call of a replica; None if it died."""

        def on_counts(counts: Mapping[int, int | None]) -> None:
            for ended in counts.values():
                if on_ended is not None and ended is not None:
                    on_ended(ended)

        counts = None if on_ended is None else on_counts
        ask = functools.partial(self._ask, "generate", {replica: (request,)}, counts)
        pauses_ended = self._pauses_ended
        try:
            # Lost while the request waited.
            if replica.state is not State.SERVING or request.version not in (None, *replica.held):
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
            busiest.hand_back_first()

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
                each.batcher.hand_back_all()
            if self._paused or self._replacing:
                each.batcher.hold()
            else:
                each.batcher.go_on()
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

    def wake_up(self) -> int:
        """Reallocate the weights' memory; returns bytes. Idempotent."""
        return sum(self._ask_all("wake_up").values())


async def _done(work: concurrent.futures.Future[Any]) -> None:
    """Wait for `work`, which goes on if this is cancelled."""
    ended, loop = asyncio.Event(), asyncio.get_running_loop()
    work.add_done_callback(lambda _: loop.call_soon_threadsafe(ended.set))
    await ended.wait()


def _received(answer: Received | CorerlError) -> Received:
    if isinstance(answer, CorerlError):
        return Received(version=-1, bytes=0, error=answer.message, died=isinstance(answer, WorkerDied))
    return answer
