"""The command `corerl`: finds the subcommand, runs it, and turns errors into lines on stderr and an exit status."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module

from corerl import __version__
from corerl.errors import CorerlError

# Modules of this package, each with `add_parser(subparsers)` and `run(args) -> int`; light, so that help is instant.
COMMANDS = (
    "train",
    "eval",
    "export",
    "config",
    "backends",
    "engines",
    "extensions",
    "verify",
    "options",
    "doctor",
    "new-backend",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 a failure, 2 something for the user to mend, 130 interrupted."""
    modules = {name: import_module(f"corerl.cli.{name.replace('-', '_')}") for name in COMMANDS}
    parser = argparse.ArgumentParser(
        prog="corerl", description="Reinforcement-learning post-training of language models on pluggable backends."
    )
    parser.add_argument("--version", action="version", version=f"corerl {__version__}")
    parser.add_argument("--debug", action="store_true", help="show tracebacks of errors; also CORERL_DEBUG=1")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in modules.values():
        module.add_parser(subparsers)
    for subparser in subparsers.choices.values():  # so that --debug may also stand behind the command
        subparser.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    # 'module:name', in a config or as a plugin, means a module beside the run, as it would for `python -m`.
    sys.path.insert(0, os.getcwd())
    try:
        status: int = modules[args.command].run(args)
        return status
    except CorerlError as error:
        if args.debug or os.environ.get("CORERL_DEBUG") == "1":
            traceback.print_exc()
            if error.details:
                print(error.details, file=sys.stderr)
        for line in error.message.splitlines():
            print(f"corerl: error: {line}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print("corerl: interrupted", file=sys.stderr)
        return 130
