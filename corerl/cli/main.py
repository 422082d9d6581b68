"""The command `corerl`: run a command of core or of a plugin, and turn errors into lines on stderr and an exit status.
`--help` lists the specs of all; only the chosen one's code is imported."""

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
from typing import Any, TextIO

import corerl
from corerl.errors import CorerlError, PluginBroken, PluginError, UserError
from corerl.messages import LONGEST, LONGEST_LINE, one_line, place, printable, shorten, shorten_inside
from corerl.plugin.registry import CORE_COMMANDS, Kind, Loaded, load, load_implementation, scan
from corerl.plugin.spec import API, CommandSpec

CORE = os.path.dirname(corerl.__file__) + os.sep
LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
COMMANDS = {  # of core
    name: CommandSpec(implementation=implementation, api=API, summary=summary)
    for name, implementation, summary in (
        ("train", "corerl.cli.config:add_train_arguments", "train as a configuration specifies"),
        ("eval", "corerl.cli.eval:add_arguments", "score weights on the held-out prompts"),
        (
            "export",
            "corerl.cli.export:add_arguments",
            "write a checkpoint's weights as a Hugging Face model directory",
        ),
        (
            "config",
            "corerl.cli.config:add_arguments",
            "check a configuration, or show it with everything filled in",
        ),
    )
}
assert tuple(COMMANDS) == CORE_COMMANDS


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
        _add_parsers(subparsers, words)
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


def _add_parsers(subparsers: Any, words: Sequence[str]) -> None:
    """Add the parser of the command that `words` choose, or an entry for each if they ask for `corerl --help`. Raises
    PluginError if the command is unknown or cannot be used."""
    name = next((word for word in words if not word.startswith("-")), None)
    leading = words if name is None else words[: words.index(name)]
    if {"-h", "--help"} & set(leading):
        shown = {command: spec.summary for command, spec in COMMANDS.items()}
        entries = scan(Kind.COMMANDS)
        for each in entries:
            qualified = f"{each.distribution}:{each.name}"
            command = qualified if sum(other.name == each.name for other in entries) > 1 else each.name
            try:
                shown[command] = load(Kind.COMMANDS, qualified).spec.summary
            except PluginError as error:
                shown[command] = error.message
        for command, summary in shown.items():
            subparsers.add_parser(command, help=printable(summary).replace("%", "%%"))
    elif name is not None:
        _add_chosen(subparsers, name)


def _add_chosen(subparsers: Any, name: str) -> None:
    if (spec := COMMANDS.get(name)) is not None:
        loaded = Loaded(name=name, distribution="corerl", version="", value=spec.implementation, spec=spec)
    else:
        loaded = load(Kind.COMMANDS, name)
    add_arguments = load_implementation(Kind.COMMANDS, loaded)
    code = f"command {loaded}: {loaded.spec.implementation}"

    def run(args: argparse.Namespace) -> int:
        raise PluginBroken(f"{code} has not set `run`; it must call parser.set_defaults(run=FUNCTION)")

    parser = subparsers.add_parser(name)
    parser.set_defaults(run=run)
    try:
        add_arguments(parser)
    except (Exception, SystemExit) as error:
        raise PluginBroken(f"{code} cannot add its arguments: {one_line(error)}") from error


def _parse(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """Parse arguments. Unlike argparse, allows KEY=VALUE both before and after options, and --debug anywhere."""
    args, rest = parser.parse_known_args(words)
    rest = [word for word in rest if word != "--debug"]
    overrides = [word for word in rest if "=" in word and not word.startswith("-")]
    if rest and (rest != overrides or "overrides" not in args):
        from corerl.config.load import key_of

        hint = _undashed(rest) if "overrides" in args else ""
        unknown = " ".join(shorten(key_of(word), LONGEST) for word in rest)
        parser.error(f"unrecognized arguments: {unknown}{hint}")
    if overrides:
        args.overrides = [*args.overrides, *overrides]
    return args


def _undashed(words: Sequence[str]) -> str:
    """The end of a message about arguments, if one of them is a setting with dashes; its value may be a secret."""
    from corerl.config import Config
    from corerl.config.structuring import deeper

    keys = [word[2:].partition("=")[0] for word in words if word.startswith("--")]
    meant = [path for key in keys for path in ([key] if "." in key else deeper(Config, key.replace("-", "_")))]
    return f"; settings are written KEY=VALUE, without dashes, such as {meant[0]}=VALUE" if meant else ""


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
