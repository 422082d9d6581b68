"""The histories of an episode, a tree: each answer makes one, which any number of later requests may continue."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from attrs import define, field

from corerl.engines import GenerateRequest, Generation
from corerl.ops import hash_key
from corerl.types import IntArray
from corerl_agents.chat_requests import ChatRequest, OnPiece
from corerl_agents.conversation import Answer, Conversation, Difference, Message, RenderedRequest, Row


class Place(NamedTuple):
    """Where a request stands among those that continue the same history. Sorts them, whenever they came."""

    apart: bool  # it came when another one had been answered, or is the repetition of another one: it has its own noise
    content: int  # what it says
    repetition: int  # among those that say the same


@define(kw_only=True, eq=False)
class Turn:
    """One chat request of an episode, and what answers it."""

    chat: ChatRequest
    place: Place
    since: int  # answers that the episode had when it came
    request: GenerateRequest  # one row
    answer: asyncio.Task[tuple[Answer, Generation]]
    after: History | None = None  # with the answer, once that has come
    on_piece: OnPiece | None = None  # for its client, if that wants a stream
    abandoned: bool = False  # its client closed the connection before the answer came, and has not asked again

    def asked_again(self, since: int) -> None:
        """Its client has come back, after so many answers of the episode."""
        self.since = since
        if self.after is not None:
            self.after.since = since

    @property
    def history(self) -> History | None:
        """What may be continued, and is trained on."""
        return None if self.abandoned else self.after


@define(kw_only=True, eq=False)
class History:
    """A conversation up to an answer, and the requests that continue it. That of an episode's beginning is empty."""

    key: int  # of the noise that goes on
    conversation: Conversation = field(factory=Conversation)
    turns: list[Turn] = field(factory=list)  # by arrival
    # Messages of the request that was refused because rollout.max_tokens leaves no room for its answer; 0: no request.
    full: int = 0
    truncated: bool = False  # the last answer was cut by rollout.max_tokens
    since: int = 0  # answers that the episode had when the request came
    reward: float = 0.0  # of the last answer, if the function returns one for each turn

    def __iter__(self) -> Iterator[History]:
        """This history, and all that continue it, in breadth: those of one history by their places."""
        found = [self]
        for history in found:
            found += history.following
            yield history

    @property
    def following(self) -> list[History]:
        """Those that continue it, with one more answer each, by their places."""
        turns = sorted(self.turns, key=lambda turn: turn.place)
        return [turn.history for turn in turns if turn.history is not None]

    def continued(self, messages: Sequence[Message]) -> tuple[list[History], Difference | None]:
        """The histories behind this one that messages continue, the longest first; and where they leave one that goes
        on from the longest."""
        found, nearest = [self], None
        for history in found:
            since = len(history.conversation.messages)
            for after in (each for each in history.following if not each.conversation.by_tokens):
                difference = after.conversation.difference(messages, since=since)
                if difference is None:
                    found.append(after)
                elif nearest is None or difference.number > nearest.number:
                    nearest = difference
        # Of equal ones, such as of repetitions that were answered alike, one that nobody goes on from yet.
        known = sorted(found, key=lambda history: (-len(history.conversation.messages), bool(history.live_turns)))
        if nearest is not None and nearest.number < len(known[0].conversation.messages):
            nearest = None
        return known[:-1], nearest

    def continued_by_tokens(self, tokens: IntArray) -> History:
        """The longest history behind this one, or else this one, that tokens [n] continue."""
        found = [self]
        for history in found:
            for after in history.following:
                had = after.conversation.tokens
                if np.array_equal(had, tokens[: len(had)]):
                    found.append(after)
        return max(found, key=lambda history: (len(history.conversation.tokens), not history.live_turns))

    def place(self, asked: RenderedRequest, chat: ChatRequest) -> Place:
        """That of another request which continues this history."""
        new = asked.tokens if asked.by_tokens else asked.messages[len(self.conversation.messages) :]
        content = _content(new, asked, chat)
        before = [turn for turn in self.turns if turn.place.content == content]
        # The noise of another answer may be known by now: for what depends on that, it would be no noise.
        others = any(turn.after is not None for turn in self.turns if turn.place.content != content)
        return Place(apart=bool(before) or others, content=content, repetition=len(before))

    def key_at(self, place: Place) -> int:
        """Of the noise of the request at this place."""
        if not place.apart:
            return self.key
        return hash_key(self.key, len(self.conversation.exchanges), place.content, place.repetition)

    def abandoned_turn(self, place: Place) -> Turn | None:
        """The turn whose client has gone, if a request of this content is that client's second attempt."""
        same = (turn for turn in self.turns if turn.abandoned and turn.place.content == place.content)
        return next(same, None)

    @property
    def live_turns(self) -> list[Turn]:
        """Those whose clients have the answer, or wait for it."""
        return [turn for turn in self.turns if not turn.abandoned]

    @property
    def leaves(self) -> list[History]:
        """The histories that none continues, in the order of their places from the root on; [] if nothing was said."""
        found, stack = [], [self]
        while stack:
            history = stack.pop()
            after = history.following
            stack += reversed(after)
            if not after and history.conversation.exchanges:
                found.append(history)
        return found

    @property
    def final(self) -> History:
        """That with the answer to the request that came last. Of several that came before any of them was answered, the
        last by place."""
        return max(enumerate(self.leaves), key=lambda each: (each[1].since, each[0]), default=(0, self))[1]

    @property
    def rows(self) -> list[Row]:
        """One for each leaf, in their order. What several share is trained on in the first of them that was not cut, as
        those that were may be left out."""
        final, leaves, shared = self.final, self.leaves, dict[int, int]()
        rewards = {id(each.conversation.exchanges[-1]): each.reward for each in self if each.conversation.exchanges}
        for place in sorted(range(len(leaves)), key=lambda place: (leaves[place].cut, place)):
            own = leaves[place].conversation
            shared[place] = max((own.shared(leaves[other].conversation) for other in shared), default=0)
        return [
            leaf.conversation.row(
                shared=shared[place],
                truncated=leaf.cut,
                final=leaf is final,
                rewards=[rewards[id(exchange)] for exchange in leaf.conversation.exchanges],
            )
            for place, leaf in enumerate(leaves)
        ]

    @property
    def cut(self) -> bool:
        return self.truncated or bool(self.full)

    @property
    def begun(self) -> int:
        """How many rows there will be once all requests so far are answered."""
        return sum(max(len(history.live_turns) - 1, 0) for history in self) + bool(self.live_turns)


def _content(messages: Sequence[Message] | IntArray, asked: RenderedRequest, chat: ChatRequest) -> int:
    """An int64 that is equal for requests that say the same: the same new messages, or the same new tokens."""
    new = messages.tolist() if isinstance(messages, np.ndarray) else messages
    content = [new, asked.tools, asked.most_calls, asked.options, chat.max_tokens, chat.stop]
    digest = hashlib.blake2b(json.dumps(content, sort_keys=True, default=str).encode(), digest_size=8).digest()
    return int.from_bytes(digest, signed=True)
