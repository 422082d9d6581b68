"""Open a run's files in a directory that may have some: keep an earlier run's, continue a resumed run's."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from corerl.errors import DataError


def keep(path: Path) -> None:
    """Rename an existing file to the next free number: trace-1.json."""
    if path.exists():
        number = 1
        while (other := path.with_stem(f"{path.stem}-{number}")).exists():
            number += 1
        path.rename(other)


def reopen(path: Path, *, before: float, same_run: bool = False) -> IO[str]:
    """Open `path` for appending after atomically dropping all steps from `before` on. If `before` is 0, and it is not
    of the same run anyway, first keep the existing file under another name."""
    if not before and not same_run and path.exists() and path.stat().st_size:
        keep(path)
    kept = "".join(line for line, _ in read_lines(path, before=before))
    part = path.with_name(f".{path.name}.part")
    part.write_text(kept, encoding="utf-8", newline="\n")
    os.replace(part, path)
    return path.open("a", encoding="utf-8", newline="\n")


def read_lines(path: Path, *, before: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (line, record) for the lines of `path` whose step is smaller than `before`; none if there is no file.

    A killed run can leave its last line incomplete, without a newline; that line is left out.
    Raises DataError, naming the line, for any other line that is not an object with a step.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if not raw.endswith(b"\n"):
                return
            try:
                line = raw.decode()
                record = json.loads(line)
                step = int(record["step"])
            except (ValueError, TypeError, KeyError, OverflowError) as error:
                shown = raw.decode(errors="replace").strip()[:60]
                raise DataError(
                    f"{path}:{number}: {shown!r} is not an object with a step; fix or delete the line"
                ) from error
            if step < before:
                yield line, record
