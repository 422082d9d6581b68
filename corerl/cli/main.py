"""The command `corerl`: run a subcommand, and turn errors into lines on stderr and an exit status."""

from __future__ import annotations

import argparse
import io
import os
import select
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module

from corerl import __version__
from corerl.errors import CorerlError

# Modules of this package, each with an `add_parser(subparsers)` that sets `run`. They import little: help is instant.
COMMANDS = ("train", "eval", "export", "config", "plugins", "verify", "options", "doctor", "new_backend")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 success, 1 failure, 2 an error for the user to fix, 130 interrupted, 141 stdout was closed."""
    parser = argparse.ArgumentParser(
        prog="corerl", description="Reinforcement-learning post-training of language models on pluggable backends."
    )
    parser.add_argument("--version", action="version", version=f"corerl {__version__}")
    parser.add_argument("--debug", action="store_true", help="show tracebacks of errors; also CORERL_DEBUG=1")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        import_module(f"corerl.cli.{name}").add_parser(subparsers)
    args = _parse(parser, argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # like stderr: an unprintable character ends no command
    # 'module:name', in a config or as a plugin, may be a module in the working directory, as for `python -m`.
    sys.path.insert(0, os.getcwd())
    try:
        status: int = args.run(args)
        sys.stdout.flush()
        return status
    except CorerlError as error:
        if args.debug or os.environ.get("CORERL_DEBUG") == "1":
            traceback.print_exc()
            if error.details:
                print(error.details, file=sys.stderr)
        said = "corerl: error:" if error.exit_status else "corerl:"
        for line in error.message.splitlines():
            print(f"{said} {line}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print("corerl: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        if not _reader_is_gone():
            raise
        return 141  # a shell's status for SIGPIPE


def _parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse arguments. Unlike argparse, allows KEY=VALUE both before and after options, and --debug anywhere."""
    args, rest = parser.parse_known_args(argv)
    args.debug = args.debug or "--debug" in rest
    rest = [word for word in rest if word != "--debug"]
    overrides = [word for word in rest if "=" in word and not word.startswith("-")]
    if rest and (rest != overrides or "overrides" not in args):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if overrides:
        args.overrides = [*args.overrides, *overrides]
    return args


def _reader_is_gone() -> bool:
    """Whether the reader of stdout is gone, as with `head`; if so, redirects stdout to devnull."""
    stdout = sys.stdout.fileno()
    poll = select.poll()
    poll.register(stdout, select.POLLOUT)
    if not any(events & select.POLLERR for _, events in poll.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), stdout)  # for what Python flushes at exit
    return True
