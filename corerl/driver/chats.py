"""Find the chats that the chat template refuses before the first step: all of them are rendered once."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from corerl.data.prompts import PromptSource
from corerl.errors import DataError
from corerl.rollout.encoding import refused

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FEW = 5000  # prompts that are checked at once; more are checked while the run's processes start


class ChatCheck:
    """Renders every chat of a source, in this thread or, between `begin` and `finish`, in one of its own."""

    def __init__(
        self, source: PromptSource, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any], *, skip: bool
    ) -> None:
        """`skip`: leave out the chats that are refused; otherwise the first one is an error."""
        self._source, self._tokenizer, self._options, self._skip = source, tokenizer, options, skip
        self._found: dict[int, str] | None = None  # index -> why
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    @property
    def few(self) -> bool:
        return not self._source.chat or len(self._source) <= FEW

    def begin(self) -> None:
        """Check in the background."""
        if self._found is None:
            self._thread = threading.Thread(target=self._look, name="chat check", daemon=True)
            self._thread.start()

    def finish(self) -> str:
        """Wait until all chats are checked; returns a notice about those that are now left out, "" if there are none.
        Raises DataError for the first refused one, or if no prompt is left."""
        if self._thread is not None:
            self._thread.join()
        elif self._found is None:
            self._look()
        if self._failure is not None:
            raise self._failure
        if not self._found:
            return ""
        index, why = next(iter(self._found.items()))
        first = f"{self._source.where(index)}: {why}"  # its line in a file: found by reading all before it
        if not self._skip:
            raise DataError(f"{first}; correct the row, or set data.refused='skip' to leave out such rows")
        count = f"{len(self._found)} of {len(self._source)} prompts"
        try:
            self._source.leave_out(frozenset(self._found))
        except DataError as error:
            raise DataError(f"{error.message}: the chat template refuses {count}; the first: {first}") from error
        return f"data: {count} are skipped, because the chat template refuses them; the first: {first}"

    def _look(self) -> None:
        found: dict[int, str] = {}
        try:
            for index, why in refused(self._source, self._tokenizer, self._options) if self._source.chat else ():
                found[index] = why
                if not self._skip:
                    break
            self._found = found
        except BaseException as error:  # `finish` raises it
            self._failure = error
