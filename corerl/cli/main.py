"""The command `corerl`: run a subcommand, and turn errors into lines on stderr and an exit status."""

from __future__ import annotations

import argparse
import io
import os
import select
import sys
import traceback
from collections.abc import Sequence
from contextlib import redirect_stdout
from importlib import import_module
from typing import TextIO

from corerl import __version__
from corerl.cli.commands import add_parsers, other_providers
from corerl.errors import CorerlError, UserError
from corerl.messages import LONGEST, LONGEST_LINE, note, one_line, place, printable, shorten, shorten_inside
from corerl.plugin.registry import CORE_COMMANDS


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 success, 1 failure, 2 an error for the user to fix, 130 interrupted, 141 stdout was closed."""
    parser = argparse.ArgumentParser(
        prog="corerl", description="Reinforcement-learning post-training of language models on pluggable backends."
    )
    parser.add_argument("--version", action="version", version=f"corerl {__version__}")
    parser.add_argument("--debug", action="store_true", help="show tracebacks of errors; also CORERL_DEBUG=1")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in CORE_COMMANDS:  # each with an `add_parser(subparsers)`; they import little: help is instant
        import_module(f"corerl.cli.{name}").add_parser(subparsers)
    args: argparse.Namespace | None = None
    words = sys.argv[1:] if argv is None else argv
    debug = os.environ.get("CORERL_DEBUG") == "1" or "--debug" in words
    stdout = sys.stdout  # which code that the command imports may close or replace
    try:
        _require_surroundings()
        add_parsers(subparsers, words)
        args = _parse(parser, words)
        for line in other_providers(args.command):
            note(line)
        status: int = args.run(args)
        stdout.flush()
        return status
    except CorerlError as error:
        if debug:
            traceback.print_exc()
            if error.details:
                print(error.details, file=sys.stderr)
        said = "corerl: error:" if error.exit_status else "corerl:"
        for line in (*error.message.split("\n"), *getattr(error, "__notes__", ())):
            print(f"{said} {shorten_inside(line, LONGEST_LINE)}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print("corerl: interrupted", file=sys.stderr)
        return 130
    except SystemExit as error:  # of a plugin or a user's function
        if args is None:
            raise  # argparse's own
        where = place(error, lambda frame: True)
        print(f"corerl: error: the command was ended by SystemExit({error.code!r}){where}; remove it", file=sys.stderr)
        return 2
    except ValueError:  # as Python has it
        if not stdout.closed:
            raise
        print("corerl: error: code that the command imported has closed sys.stdout; remove that", file=sys.stderr)
        return 2
    except BrokenPipeError:
        if not _reader_is_gone(stdout):
            raise
        return 141  # a shell's status for SIGPIPE
    except (
        OSError
    ) as error:  # the machine's, at a place that has no better words: a full disk, a directory that is gone
        if debug:
            traceback.print_exc()
        print(f"corerl: error: {_refused(error)}", file=sys.stderr)
        return 1
    finally:
        _discard_unwritten(stdout)


def _parse(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """Parse arguments. Unlike argparse, allows KEY=VALUE both before and after options, and --debug anywhere; and help
    that cannot be written is an OSError."""
    said = io.StringIO()
    try:
        with redirect_stdout(said):
            args, rest = parser.parse_known_args(words)
    except SystemExit:
        print(said.getvalue(), end="", flush=True)
        raise
    rest = [word for word in rest if word != "--debug"]
    overrides = [word for word in rest if "=" in word and not word.startswith("-")]
    if rest and (rest != overrides or "overrides" not in args):
        from corerl.config.load import without_value

        dashed = any(word.startswith("--") and "." in word.partition("=")[0] for word in rest)
        hint = "; settings are written KEY=VALUE, without dashes" if dashed and "overrides" in args else ""
        shown = " ".join(shorten(without_value(word), LONGEST) for word in rest)
        parser.error(f"unrecognized arguments: {shown}{hint}")
    if overrides:
        args.overrides = [*args.overrides, *overrides]
    return args


def _require_surroundings() -> None:
    """Raise UserError unless there are a working directory and a standard output."""
    # 'module:name', in a config or as a plugin, may be a module in the working directory. It comes last: what it holds,
    # such as a model's files, is never imported in the place of what is installed, or of Python's own modules.
    try:
        here = os.getcwd()
    except FileNotFoundError as error:
        raise UserError("the working directory does not exist any more; change to one that does") from error
    if here not in sys.path:
        sys.path.append(here)
    for descriptor in (0, 2):
        _require_open(descriptor)
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115  -- for as long as the command lasts
    if sys.stdout is None:  # and the next file that is opened would be the standard output of all processes
        raise UserError("standard output is closed; redirect it to a file or to /dev/null")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # like stderr: an unprintable character ends no command


def _require_open(descriptor: int) -> None:
    """Open /dev/null there if it is closed: else the next file that is opened would be what all processes write to."""
    try:
        os.fstat(descriptor)
    except OSError:
        opened = os.open(os.devnull, os.O_RDWR)  # the lowest that is free
        if opened != descriptor:
            os.dup2(opened, descriptor)
            os.close(opened)


def _refused(error: OSError) -> str:
    """What the system refused, in one line."""
    what = printable(str(error.filename)) if error.filename else ""
    why = error.strerror or one_line(error)
    return f"{what}: {why}" if what else f"cannot read or write: {why}{place(error, lambda frame: True)}"


def _discard_unwritten(stdout: TextIO | None) -> None:
    """Discard what standard output does not take: Python would complain of it at exit, with a status of its own."""
    if stdout is None or stdout.closed:
        return
    try:
        stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stdout.fileno())


def _reader_is_gone(stdout: TextIO) -> bool:
    """Whether the reader of stdout is gone, as with `head`."""
    poll = select.poll()
    poll.register(stdout.fileno(), select.POLLOUT)
    return any(events & select.POLLERR for _, events in poll.poll(0))
