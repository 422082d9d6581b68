"""The command `corerl`: run a subcommand, and turn errors into lines on stderr and an exit status."""

from __future__ import annotations

import argparse
import io
import os
import select
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from types import FrameType
from typing import TextIO

import corerl
from corerl.cli.commands import add_parsers
from corerl.errors import CorerlError, UserError
from corerl.messages import LONGEST, LONGEST_LINE, one_line, place, printable, shorten, shorten_inside

CORE = os.path.dirname(corerl.__file__) + os.sep
LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 success, 1 failure, 2 an error for the user to fix, 130 interrupted, 141 stdout was closed."""
    parser = argparse.ArgumentParser(
        prog="corerl", description="Reinforcement-learning post-training of language models on pluggable backends."
    )
    parser.add_argument("--version", action="version", version=f"corerl {corerl.__version__}")
    parser.add_argument("--debug", action="store_true", help="show tracebacks of errors; also CORERL_DEBUG=1")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    words = sys.argv[1:] if argv is None else argv
    debug = os.environ.get("CORERL_DEBUG") == "1" or "--debug" in words
    try:
        _add_working_directory()
        add_parsers(subparsers, words)
        args = _parse(parser, words)
        status: int = args.run(args)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print("corerl: interrupted", file=sys.stderr)
        return 130
    except BaseException as error:
        if isinstance(error, BrokenPipeError) and _reader_is_gone(sys.stdout):
            return 141  # a shell's status for SIGPIPE
        failure = _failure(error)
        if failure is None:  # argparse's exit, or a fault of CoreRL's
            raise
        if debug:
            traceback.print_exc()
            print(getattr(error, "details", ""), end="", file=sys.stderr)
        status, lines = failure
        start = "corerl: error:" if status else "corerl:"
        for line in (*lines, *getattr(error, "__notes__", ())):
            print(f"{start} {shorten_inside(line, LONGEST_LINE)}", file=sys.stderr)
        return status
    finally:
        _discard_unwritten(sys.stdout)


def _failure(error: BaseException) -> tuple[int, list[str]] | None:
    """How a command that raised this ends: its exit status, and lines for the user. None for what is nobody's mistake
    but CoreRL's."""
    match error:
        case CorerlError():
            return error.exit_status, error.message.split("\n")
        case SystemExit():
            return None
        case OSError():  # such as a full disk, or a directory that is gone
            what = printable(str(error.filename)) if error.filename else "cannot read or write"
            where = "" if error.filename else place(error, lambda frame: True)
            return 1, [f"{what}: {error.strerror or one_line(error)}{where}"]
    # The innermost line that is no library's: of the user's code, a plugin's or core's.
    if (where := place(error, _is_no_library)) and where != place(error, _is_core):
        return 1, [f"{one_line(error)}{where}; --debug shows the traceback"]
    return None


def _is_core(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(CORE)


def _is_no_library(frame: FrameType) -> bool:
    return _is_core(frame) or not frame.f_code.co_filename.startswith((*LIBRARIES, "<"))


def _parse(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """Parse arguments. Unlike argparse, allows KEY=VALUE both before and after options, and --debug anywhere."""
    args, rest = parser.parse_known_args(words)
    rest = [word for word in rest if word != "--debug"]
    overrides = [word for word in rest if "=" in word and not word.startswith("-")]
    if rest and (rest != overrides or "overrides" not in args):
        from corerl.config.load import key_of

        dashed = any(word.startswith("--") and "." in word.partition("=")[0] for word in rest)
        hint = "; settings are written KEY=VALUE, without dashes" if dashed and "overrides" in args else ""
        unknown = " ".join(shorten(key_of(word), LONGEST) for word in rest)
        parser.error(f"unrecognized arguments: {unknown}{hint}")
    if overrides:
        args.overrides = [*args.overrides, *overrides]
    return args


def _add_working_directory() -> None:
    """Let 'module:name', in a config or as a plugin, be a module in the working directory. It comes last on sys.path:
    what it holds, such as a model's files, is never imported in place of what is installed."""
    try:
        here = os.getcwd()
    except FileNotFoundError as error:
        raise UserError("the working directory does not exist any more; change to one that does") from error
    if here not in sys.path:
        sys.path.append(here)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # like stderr: an unprintable character ends no command


def _discard_unwritten(stdout: TextIO) -> None:
    """Discard what standard output does not take: Python would complain of it at exit, with a status of its own."""
    try:
        stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stdout.fileno())


def _reader_is_gone(stdout: TextIO) -> bool:
    """Whether the reader of stdout is gone, as with `head`."""
    poll = select.poll()
    poll.register(stdout.fileno(), select.POLLOUT)
    return any(events & select.POLLERR for _, events in poll.poll(0))
