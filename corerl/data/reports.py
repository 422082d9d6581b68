"""Say now and then how far the reading of a large data set is."""

from __future__ import annotations

import time
from collections.abc import Callable

EVERY = 10.0  # seconds between two lines, and before the first


class Reports:
    """Gives a line to `say` every `EVERY` seconds, however often it is told how far the work is."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._clock = say, clock
        self._said = clock()

    def tell(self, what: str, done: int, of: int = 0) -> None:
        """`what` happens to the rows, of which there are `of`; 0: nobody knows yet."""
        if self._clock() >= self._said + EVERY:
            self._said = self._clock()
            self._say(f"{what}: {done:,} {f'of {of:,} ' if of else ''}rows")


NO_REPORTS = Reports(lambda line: None)
