"""Who is there: sessions of clients, the model that one of them trains, and samplers; all end with their session."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

from attrs import define, field

from corerl_tinker.futures import Completions
from corerl_tinker.order import Turns
from corerl_tinker.requests import ModelMade, Refused, Sampler

HEARTBEATS_SECONDS = 35.0  # clients send one every 10 s
GONE = 410  # for which clients neither wait nor ask again


@define(kw_only=True, eq=False)
class Model:
    """A model that a session trains."""

    id: str
    session: str
    turns: Turns
    made: ModelMade | None = None  # None: not yet
    incomplete: str = ""  # why the gradients so far are not those that the client means; empty: they are


@define(kw_only=True, eq=False)
class Sampling:
    """A sampler that a session has."""

    session: str
    sampler: Sampler
    done: Completions = field(factory=Completions)  # of its requests


class Sessions:
    def __init__(self, *, idle_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._idle, self._clock = idle_seconds, clock
        self._seen: dict[str, float] = {}  # session -> when, by the clock
        self._samplers: dict[str, Sampling] = {}  # by id
        self.model: Model | None = None  # the one that is trained

    def begin(self) -> str:
        session_id = f"session-{secrets.token_hex(8)}"
        self._seen[session_id] = self._clock()
        return session_id

    def seen(self, session_id: str) -> None:
        """A request of this session has just arrived. Raises Refused if it has ended."""
        if session_id not in self._seen:
            raise Refused(
                f"session {session_id!r} has ended, or is one of an earlier server; begin another, with a new "
                "ServiceClient, and resume from a saved state",
                status=GONE,
            )
        self._seen[session_id] = self._clock()

    def end(self, session_id: str) -> None:
        self._seen.pop(session_id, None)
        for sampler_id, each in list(self._samplers.items()):  # at once: the group's thread adds to them
            if each.session == session_id:
                del self._samplers[sampler_id]
        if self.model is not None and self.model.session == session_id:
            self.model = None

    def idle(self) -> list[str]:
        """Sessions of which nothing was heard for long."""
        return [session_id for session_id, seen in list(self._seen.items()) if self._clock() > seen + self._idle]

    def trained(self, model_id: str) -> Model:
        """The model of this id, whose session is there."""
        self.seen(model_id.partition(":")[0])
        if self.model is None or self.model.id != model_id:
            now = f"trains {self.model.id!r}" if self.model else "trains none"
            raise Refused(f"model {model_id!r} is not trained here any more; this server {now}", status=404)
        return self.model

    def was_answered(self, owner: str, number: str) -> bool:
        """Whether a request of this number was made of a model or sampler that is there. A sampler's numbers leave
        gaps, and a client whose answer is forgotten asks again under another one."""
        if self.model is not None and self.model.id == owner:
            return number.isdecimal() and int(number) < self.model.turns.next
        return owner in self._samplers

    def silent_trainer(self, session_id: str) -> str:
        """The other session that trains a model, if its client has missed its heartbeats: "" if there is none. Raises
        Refused if its client is there."""
        if self.model is None or self.model.session == session_id:
            return ""
        silent = self._clock() - self._seen[self.model.session]
        if silent > HEARTBEATS_SECONDS:
            return self.model.session
        raise Refused(
            f"session {self.model.session} trains {self.model.id!r}, and this server trains one model at a time; its "
            f"client was there {silent:.0f} s ago; close that client, or try again once it has been silent for "
            f"{HEARTBEATS_SECONDS:.0f} s"
        )

    def add(self, session_id: str, sampler: Sampler) -> str:
        """The id of a new sampler. Raises Refused if its session has ended."""
        self.seen(session_id)
        sampler_id = secrets.token_hex(8)  # in no other server's life, or a client of that would get other weights
        self._samplers[sampler_id] = Sampling(session=session_id, sampler=sampler)
        return sampler_id

    def sampling(self, sampler_id: str) -> Sampling:
        if (found := self._samplers.get(sampler_id)) is None:
            raise Refused(
                f"sampler {sampler_id!r} is not known; create another: samplers end with their session or server",
                status=404,
            )
        self.seen(found.session)
        return found
