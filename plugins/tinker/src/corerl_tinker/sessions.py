"""Who is there, and what they wait for: sessions of clients, and promises of the answers to their requests, which are
kept until they are fetched. In memory, within one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import secrets
from collections.abc import Awaitable, Callable

from attrs import define, field
from starlette.responses import Response

from corerl.errors import UserError
from corerl.messages import message_of, short_repr
from corerl_tinker.requests import Category, Refused, Sampler

KEPT_SECONDS = 600.0  # after a result was fetched: the response may not have arrived, and clients ask again
GATHER_SECONDS = 0.01  # for requests that are done soon after another one
LEAST_BYTES = 1024  # what a promise counts for at least, of memory
GONE = 410  # for which clients neither wait nor ask again


class Failure(Response):
    """Why there is no result."""

    def __init__(self, sentence: str, category: Category = "user", status: int = 200) -> None:
        # In ASCII: a sentence may quote what is no Unicode, such as the name of a file.
        content = json.dumps({"error": sentence, "category": category})
        super().__init__(content, status, media_type="application/json")
        self.sentence = sentence


@define(kw_only=True, eq=False)
class Promise:
    """The answer to one request, once its work is done."""

    work: asyncio.Future[Response]
    size: int  # bytes of the request, then of the answer
    answer: Response | None = None  # not yet
    number: int = 0  # in the order in which promises of the session are done; 0: not yet
    fetched: float = math.inf  # when, by the clock

    def give_up(self, answer: Failure) -> None:
        if self.answer is None:
            self.answer = answer
            self.work.cancel()


@define(kw_only=True, eq=False)
class Session:
    """A client. What it has, it has until it ends."""

    id: str  # with which the names of its model, its samplers and their requests begin: `ID:...`
    seen: float  # when there was a request of it, by the clock
    samplers: dict[str, Sampler] = field(factory=dict)
    promises: dict[str, Promise] = field(factory=dict)  # by the names of the requests
    done: int = 0  # how many promises are, or were
    more: asyncio.Event = field(factory=asyncio.Event)  # since somebody has looked

    async def done_after(self, number: int, wanted: Callable[[str], bool], seconds: float) -> dict[str, Promise]:
        """What was done after this many, of the requests whose names are `wanted`. Waits so long for the first one, and
        a moment more for others: each poll costs client and server a request."""

        def found() -> dict[str, Promise]:
            return {name: each for name, each in self.promises.items() if each.number > number and wanted(name)}

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not found():
                    self.more.clear()
                    await self.more.wait()
                await asyncio.sleep(GATHER_SECONDS)
        return found()


class Sessions:
    def __init__(self, *, most_bytes: int, notify: Callable[[str], None], clock: Callable[[], float]) -> None:
        self._sessions: dict[str, Session] = {}
        self._most, self._notify, self._clock = most_bytes, notify, clock
        self.bytes = 0  # of requests that wait, and of answers that are kept

    def begin(self) -> str:
        # Of random characters: what has a name of an earlier server's is not taken for another.
        session = Session(id=f"session-{secrets.token_hex(8)}", seen=self._clock())
        self._sessions[session.id] = session
        return session.id

    def of(self, name: str, *, status: int = GONE) -> Session:
        """Whose request has just arrived, by the session's id or the name of something that it has. Raises Refused if
        it has ended."""
        session = self._sessions.get(name.partition(":")[0])
        if session is None:
            raise Refused(
                f"session {short_repr(name.partition(':')[0], 80)} has ended, or is one of an earlier server; begin "
                "another, with a new ServiceClient, and resume from a saved state",
                status=status,
            )
        session.seen = self._clock()
        return session

    def sampler(self, sampler_id: str) -> tuple[Session, Sampler]:
        session = self.of(sampler_id, status=404)
        if sampler_id not in session.samplers:
            raise Refused(f"sampler {short_repr(sampler_id, 80)} is not known; create another", status=404)
        return session, session.samplers[sampler_id]

    def add(self, session: Session, sampler: Sampler) -> str:
        """The id of a new sampler."""
        sampler_id = f"{session.id}:sampler:{sampler.number}"
        session.samplers[sampler_id] = sampler
        return sampler_id

    def silent_for(self, session_id: str) -> float:
        """Seconds since a request of this session."""
        return self._clock() - self._sessions[session_id].seen

    def idle(self, seconds: float) -> list[str]:
        """Sessions of which nothing was heard for so long."""
        return [each for each in self._sessions if self.silent_for(each) > seconds]

    def end(self, session_id: str) -> None:
        """What was promised is given up, and whoever still waits for it is told."""
        if (session := self._sessions.pop(session_id, None)) is not None:
            for name, promise in list(session.promises.items()):
                promise.give_up(Failure(f"session {session_id} has ended"))
                self._drop(session, name)

    # ---- promises ----------------------------------------------------------------------------------------------------

    def promise(
        self,
        session: Session,
        name: str,
        work: Callable[[], Awaitable[Response]],
        *,
        size: int = 0,
        urgent: bool = False,
    ) -> Promise:
        """Promise what `work` returns, or what was promised before under this name. Raises Refused, with the status for
        which clients wait and repeat the request, if there is no memory for what it holds; one that others wait for is
        `urgent` and never refused."""
        if name in session.promises:
            return session.promises[name]
        if not urgent and self.bytes + size > self._most:
            self.forget(seconds=0.0)
            if self.bytes + size > self._most:
                raise Refused(
                    f"requests and results hold {self.bytes >> 20} MiB of serve.memory_mib; fetch results, or send "
                    "less at once",
                    status=429,
                )
        promise = Promise(work=asyncio.ensure_future(work()), size=max(size, LEAST_BYTES))
        session.promises[name] = promise
        self.bytes += promise.size

        def done(work: asyncio.Future[Response]) -> None:
            if not work.cancelled():
                promise.answer = promise.answer or self._answer(work)
            if session.promises.get(name) is promise:  # and not dropped
                self.bytes -= promise.size
                promise.size = max(len(promise.answer.body) if promise.answer else 0, LEAST_BYTES)
                self.bytes += promise.size
            session.done += 1
            promise.number = session.done
            session.more.set()

        promise.work.add_done_callback(done)
        return promise

    def _answer(self, work: asyncio.Future[Response]) -> Response:
        """What it has returned, or the sentence of its error."""
        if (error := work.exception()) is None:
            return work.result()
        if isinstance(error, UserError):
            return Failure(error.message, error.category if isinstance(error, Refused) else "user")
        self._notify(f"a request has failed: {message_of(error)}")
        return Failure(message_of(error), "server")

    async def wait(self, name: str, promise: Promise, seconds: float) -> Response:
        """The answer. Raises Refused, with the status for which clients ask again, if there is none after `seconds`."""
        await asyncio.wait([promise.work], timeout=seconds)
        if promise.answer is None:
            raise Refused(f"request {name!r} is not done yet; ask again", status=408)
        promise.fetched = min(promise.fetched, self._clock())
        return promise.answer

    def forget(self, *, seconds: float = KEPT_SECONDS) -> None:
        """Forget what was fetched at least so long ago."""
        latest = self._clock() - seconds
        for session in self._sessions.values():
            for name in [name for name, promise in session.promises.items() if promise.fetched <= latest]:
                self._drop(session, name)

    def fetched(self, session: Session, name: str) -> None:
        """The client says that it has the answer."""
        if name in session.promises and session.promises[name].fetched < math.inf:
            self._drop(session, name)

    def fail_all(self, answer: Failure) -> None:
        """Give up all that is open."""
        for session in self._sessions.values():
            for promise in session.promises.values():
                promise.give_up(answer)

    def _drop(self, session: Session, name: str) -> None:
        self.bytes -= session.promises.pop(name).size
