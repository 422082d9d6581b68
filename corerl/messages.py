"""Helpers for wording error messages."""

from __future__ import annotations

import difflib
import os
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from types import FrameType

from corerl.errors import CorerlError

LONGEST = 120  # characters of what a file says, in a message
CHECKOUT = Path(__file__).parents[1]  # unless core is installed from a wheel
LONGEST_LINE = 960  # characters of a whole message, whatever files and values it speaks of

# Other common names for ours.
OTHER_NAMES = {
    "gpu": "cuda",
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "fp32": "float32",
    "sync": "synchronous",
    "async": "asynchronous",
    "r": "rank",
}


def install_hint(extra: str) -> str:
    """The command that installs the wheel of one of CoreRL's extras: from the same checkout where core runs from one,
    whose version no index need have."""
    wheel = re.compile(rf"corerl-([\w-]+)(\[\w+\])?[^;]*; extra == ['\"]{re.escape(extra)}['\"]")
    try:
        lines = requires("corerl") or []
    except PackageNotFoundError:
        lines = []  # core is on the path without its metadata
    wheels = [(found[1], found[2] or "") for found in filter(None, map(wheel.match, lines))]
    own = [each for each in wheels if each[0] == extra] or wheels  # extras of backends bring other wheels too
    if len(own) == 1:
        directory = CHECKOUT / "plugins" / own[0][0]
        if (directory / "pyproject.toml").exists():
            return "pip install -e " + shlex.quote(f"{directory}{own[0][1]}")
    return f"pip install 'corerl[{extra}]'"


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that means the same as `name`, or is most similar to it; "" if no name is similar."""
    if len(name) > LONGEST:  # no slip of the hand, and comparing takes time that grows with its square
        return ""
    names = {each.lower(): each for each in reversed(list(known))}
    meant = OTHER_NAMES.get(name.lower(), "")
    close = [meant] if meant in names else difflib.get_close_matches(name.lower(), names, n=1)
    return names[close[0]] if close else ""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: a suggestion if a known one is similar, otherwise ""."""
    near = nearest(name, known)
    return f"; did you mean {near!r}?" if near else ""


def did_you_mean_path(path: str | os.PathLike[str]) -> str:
    """`did_you_mean` for a path that does not exist: with the name most similar to the first that is missing in it."""
    missing = Path(path)
    while not os.path.isdir(missing.parent):
        if missing.parent == missing:
            return ""
        missing = missing.parent
    try:
        near = nearest(missing.name, os.listdir(missing.parent))
    except OSError:  # a directory that may not be read
        return ""
    if not near or near == missing.name:
        return ""
    meant = missing.with_name(near)
    whole = meant / Path(path).relative_to(missing)
    return f"; did you mean {str(whole if whole.exists() else meant)!r}?"


def message_of(error: BaseException) -> str:
    """The message of a CoreRL error; of any other, its type and full text."""
    return error.message if isinstance(error, CorerlError) else f"{type(error).__name__}: {error}"


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its type if it has none."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def last_line(error: BaseException) -> str:
    """The last line of an error's text, which in Ray's errors is the informative one, or its type if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()


def one_line(error: BaseException) -> str:
    """The type of an error and the first line of its text."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}".removesuffix(": ")


def place(error: BaseException, own: Callable[[FrameType], bool]) -> str:
    """The innermost of the traceback's lines that are `own`, as " (file:line)"; "" if no line is. The path is
    relative to the working directory, if inside it."""
    lines = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__) if own(frame)]
    if not lines:
        return ""
    file, line = lines[-1]
    here = os.path.realpath(file).removeprefix(os.path.join(os.path.realpath("."), ""))
    return f" ({file if os.path.isabs(here) else here}:{line})"


def listed(items: Sequence[str], longest: int) -> str:
    """The first `longest` items, separated by commas, and how many more there are."""
    more = [f"and {len(items) - longest} more"] if len(items) > longest else []
    return ", ".join([*items[:longest], *more])


def printable(text: str) -> str:
    """The text with all characters escaped, as in Python, that move a terminal's cursor, color it or do not show: what
    a file holds or a model samples may be anything."""
    return (
        text
        if text.isprintable()
        else "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
    )


def shorten(text: str, longest: int) -> str:
    """`printable`, cut to `longest` characters."""
    # Cut first: escaping only makes it longer, and a file may hold megabytes.
    line = printable(text[: longest + 1])
    return line if len(line) <= longest else line[: max(longest - 3, 0)] + "..."


def shorten_inside(text: str, longest: int) -> str:
    """`printable`, cut to `longest` characters in its middle: the end of a message says what to do."""
    line = printable(text) if len(text) <= longest else printable(text[:longest]) + "..." + printable(text[-longest:])
    end = longest // 3
    return line if len(line) <= longest else f"{line[: longest - end - 3]}...{line[-end:]}"


def shorten_to_end(text: str, longest: int) -> str:
    """`printable`, cut to its last `longest` characters."""
    line = printable(text[-longest - 1 :])
    return line if len(line) <= longest else "..." + line[len(line) - max(longest - 3, 0) :]


def short_repr(value: object, longest: int = LONGEST) -> str:
    """`repr(value)` on one line, cut to `longest` characters."""
    return shorten(repr(value), longest)


def loading() -> None:
    """A first line at once, on a terminal: importing what a run needs takes up to half a minute."""
    if sys.stderr.isatty():
        print("corerl: loading torch, transformers and plugins", file=sys.stderr, flush=True)


def note(line: str) -> None:
    """Print a notice for the user where there is no display of a run."""
    print(f"corerl: note: {shorten(line, LONGEST_LINE)}", file=sys.stderr)
