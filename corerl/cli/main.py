"""The command `corerl`: finds the subcommand, runs it, and turns errors into lines on stderr and an exit status."""

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

# Modules of this package, each with `add_parser(subparsers)`, whose parsers say what runs; light: help is instant.
COMMANDS = ("train", "eval", "export", "config", "plugins", "verify", "options", "doctor", "new_backend")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 a failure, 2 something for the user to mend, 130 interrupted, 141 nobody reads stdout."""
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
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: what a terminal cannot show ends no command
    # 'module:name', in a config or as a plugin, means a module beside the run, as it would for `python -m`.
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
        return 141  # as a shell says it of SIGPIPE


def _parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """argparse takes KEY=VALUE from one place; here they may stand before options and behind them, --debug anywhere."""
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
    """Whether it is stdout that is closed at its other end, as by `head`; then nothing more is written there."""
    stdout = sys.stdout.fileno()
    poll = select.poll()
    poll.register(stdout, select.POLLOUT)
    if not any(events & select.POLLERR for _, events in poll.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), stdout)  # for what Python flushes as it ends
    return True
