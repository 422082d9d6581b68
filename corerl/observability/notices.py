"""Keep a run's notices in notices.jsonl of its directory, whichever extensions show them; and read them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from attrs import asdict

from corerl.observability.files import read_lines, reopen
from corerl.plugin.events import Event, Notice, RunStarted

NOTICES_FILE = "notices.jsonl"


class NoticeFile:
    """An observer of every run. A resumed run appends, without a text that the file has; a new run keeps the previous
    run's file, as notices-1.jsonl."""

    def __init__(self, run_dir: str) -> None:
        self._run_dir = Path(run_dir)
        self._file: IO[str] | None = None
        self._written: set[str] = set()

    def observe(self, event: Event) -> None:
        match event:
            case RunStarted():
                self.close()
                self._file = reopen(self._run_dir / NOTICES_FILE, before=math.inf if event.repeats_from else 0)
                self._written = {notice.text for notice in read_notices(self._run_dir)}
            case Notice() if self._file is not None and event.text not in self._written:
                self._written.add(event.text)
                self._file.write(json.dumps(asdict(event)) + "\n")
                self._file.flush()

    def shutdown(self, reason: str) -> None:
        self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None


def read_notices(run_dir: Path) -> Iterator[Notice]:
    """The notices of a run so far, the first one first; none if its directory has no such file."""
    for _, record in read_lines(run_dir / NOTICES_FILE, before=math.inf):
        yield Notice(step=record["step"], text=str(record.get("text")))
