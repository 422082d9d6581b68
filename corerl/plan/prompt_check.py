"""Look at every prompt before the first step: which cannot be shown to the model, which are too long."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from corerl.calls import Future
from corerl.data.prompts import PromptSource
from corerl.engines.base import UNLIMITED
from corerl.errors import DataError
from corerl.rollout.encoding import unusable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_COSTLY = 3  # chats that are left out because the template takes too much for them: each may take seconds
AT_ONCE = 10.0  # seconds for which prompts are looked at before anything starts; the others, while processes start


class PromptCheck:
    """Looks at every prompt of a source, in this thread or, once it was told to `begin`, in one of its own, until it is
    told to `stop`; `finish` leaves out those that a run cannot use."""

    def __init__(
        self,
        source: PromptSource,
        tokenizer: PreTrainedTokenizerBase,
        options: Mapping[str, Any],
        *,
        skip: bool,
        longest: int = UNLIMITED,
        limit: str = "",
    ) -> None:
        """`skip`: leave out the prompts that are refused; otherwise the first one is an error. Prompts of more than
        `longest` tokens are left out, because of `limit`, for messages."""
        self.notices: tuple[str, ...] | None = None  # what `finish` has returned
        self.done = 0  # prompts that were looked at
        self.of = len(source)
        self._source, self._skip, self._longest, self._limit = source, skip, longest, limit
        self._parts = unusable(source, tokenizer, options, longest=longest, characters=skip)
        self._refused: dict[int, str] = {}  # index -> why
        self._too_long: dict[int, int] = {}  # index -> tokens
        self._costly = 0  # of those that are refused, for which the template takes too much
        self._failure: BaseException | None = None
        self._ended = threading.Event()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def look(self, seconds: float = math.inf) -> bool:
        """Look at prompts in this thread, for about `seconds` and the rest of a chat that is being rendered; returns
        whether that was all there is to look at."""
        until = time.monotonic() + seconds
        try:
            for part in () if self._ended.is_set() else self._parts:
                self.done += part.looked_at
                self._refused.update(part.refused)
                self._too_long.update(part.too_long)
                self._costly += part.costly
                if (self._refused and not self._skip) or self._costly >= MOST_COSTLY:
                    break
                if self._stopped.is_set() or time.monotonic() >= until:
                    return False
        except BaseException as error:  # `finish` raises it
            self._failure = error
        self._ended.set()
        return True

    def begin(self) -> None:
        """Look at the other prompts in the background."""
        self._thread = threading.Thread(target=self.look, name="prompt check", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Look at no other prompt in the background; nothing may wait for the check any more."""
        self._stopped.set()

    def ready(self, timeout: float) -> bool:
        """Whether `finish` would return or raise at once; waits at most `timeout` seconds for that."""
        return self._ended.wait(timeout)

    @property
    def future(self) -> Future[tuple[str, ...]]:
        """To be waited for beside calls."""
        return Future(self, self.ready, self.finish)

    def finish(self) -> tuple[str, ...]:
        """Wait until all prompts were looked at; returns notices about those that are now left out. Raises DataError
        for the first refused one, or if no prompt is left."""
        if self.notices is None:
            if self._thread is None:
                self.look()
            else:
                self._thread.join()
            if self._failure is not None:
                raise self._failure
            self.notices = tuple(filter(None, (self._leave_out_refused(), self._leave_out_long())))
        return self.notices

    def _leave_out_refused(self) -> str:
        if not self._refused:
            return ""
        index, why = next(iter(self._refused.items()))
        first = f"{self._source.where(index)}: {why}"  # its line in a file: found by reading all before it
        if not self._skip:
            what = "the template or the row" if self._costly else "the row"
            raise DataError(f"{first}; correct {what}, or set data.refused='skip' to leave out such rows")
        if self._costly >= MOST_COSTLY:
            raise DataError(
                f"{first}; the template takes too much for {self._costly} of the first {self.done} prompts, so the "
                "others are not tried; correct the template, or set model.tokenizer to another one"
            )
        count = f"{len(self._refused)} of {self.of} prompts"
        try:
            self._source.leave_out(frozenset(self._refused))
        except DataError as error:
            raise DataError(f"{error.message}: {count} cannot be shown to the model; the first: {first}") from error
        return f"data: {count} are skipped, because they cannot be shown to the model; the first: {first}"

    def _leave_out_long(self) -> str:
        if not self._too_long:
            return ""
        why = (
            f"they have up to {max(self._too_long.values())} tokens, but at most {self._longest} fit with {self._limit}"
        )
        try:
            self._source.leave_out(frozenset(self._too_long))
        except DataError as error:
            raise DataError(
                f"{error.message}: {why}; lower {self._limit.partition('=')[0]} or shorten the prompts"
            ) from error
        return f"data: {len(self._too_long)} of {self.of} prompts are skipped: {why}"
