"""Files of a run in a directory that has some already: an earlier run's are kept, a resumed run's go on."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from corerl.errors import DataError


def keep(path: Path) -> None:
    """Rename the file, if there is one, to the next free number: trace-1.json."""
    if path.exists():
        number = 1
        while (other := path.with_stem(f"{path.stem}-{number}")).exists():
            number += 1
        path.rename(other)


@contextmanager
def beside(error: BaseException) -> Iterator[None]:
    """A block that writes down what goes with `error`. Where it cannot, that is a note of the error's, and no error in
    its place."""
    try:
        yield
    except Exception as failed:
        error.add_note(f"besides, what goes with it was not written: {failed}")


def reopen(path: Path, *, before: float) -> IO[str]:
    """Open `path` for appending, holding only the lines of steps before `before`; never seen half cut. Where that is
    none of them, what is there is kept under another name."""
    if not before and path.exists() and path.stat().st_size:
        keep(path)
    kept = "".join(line for line, _ in read_lines(path, before=before))
    part = path.with_name(f".{path.name}.part")
    part.write_text(kept, encoding="utf-8", newline="\n")
    os.replace(part, path)
    return path.open("a", encoding="utf-8", newline="\n")


def read_lines(path: Path, *, before: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """The lines of `path` whose step is smaller than `before`, as written and as read; none where there is no file.

    A killed run leaves at most its last line torn, without a newline: that one is left out.
    Raises DataError, naming the line, for anything else that is no object with a step.
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
                    f"{path}:{number}: {shown!r} is no object with a step; mend or delete the line"
                ) from error
            if step < before:
                yield line, record
