"""Give a case to the command, in this process, and judge what it does."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import evolve, frozen
from transformers import AutoModelForCausalLM, AutoTokenizer

import corerl.loop
from corerl.cli.main import main
from corerl.config.load import config_of, dump_toml, load_config, recorded
from corerl.config.schema import Config
from corerl.config.toml_text import to_plain
from corerl.errors import ConfigError, CorerlError, NothingLeft
from corerl.plan.make import make_plan
from corerl.rollout.encoding import encode
from fuzz.case import SECRET, Case
from fuzz.edits import apply
from tests.in_process import execute_here

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 60  # of one case, of a core: others may take most of the machine's time
WAITING = 180  # seconds of one case in all
GIB = 2**30
MEMORY = 4 * GIB  # of one case
LONGEST = 1000  # characters of a line
FRAME = re.compile(r"Traceback \(most recent call last\)")


class Hang(BaseException):
    """The alarm: no `except Exception` may take it for an error of a file."""


@frozen(kw_only=True)
class Finding:
    """`key` is the same for all findings of one kind; `text` says what was seen."""

    key: str
    text: str


def try_case(case: Case, inputs: Path) -> Finding | None:
    """What is wrong with the answer to a case; None if nothing is."""
    with _directory(inputs) as streams:
        apply(case.edits, inputs)
        _reset_peak()
        held = _peak()
        _said.clear()
        before = time.process_time()
        status: int | None = None
        error: BaseException | None = None
        _set_alarms(SECONDS, WAITING)
        try:
            status = main(list(case.command))
        except SystemExit as ended:  # argparse's own
            status = ended.code if isinstance(ended.code, int) else 1
        except BaseException as raised:
            error = raised
        finally:
            _set_alarms(0, 0)
        seconds, peak = time.process_time() - before, _peak() - held
        out, err = streams()
        finding = _judge(case, status, error, out, err)
        if finding is None and seconds > SECONDS:
            finding = Finding(key=f"slow {' '.join(case.command[:2])}", text=f"{seconds:.0f} s")
        if finding is None and peak > MEMORY:
            finding = Finding(key=f"memory {' '.join(case.command[:2])}", text=f"{peak / GIB:.1f} GiB")
        if finding is None and status == 0:
            finding = _without_result(case, out)
        return finding


# ---- surroundings ----------------------------------------------------------------------------------------------------

_said: list[CorerlError] = []


def _remember(error: CorerlError) -> str:
    _said.append(error)
    return str(error.args[0])


def _raise(*_: Any) -> None:
    raise Hang


_alarms = {signal.ITIMER_PROF: signal.SIGPROF, signal.ITIMER_REAL: signal.SIGALRM}


def _set_alarms(cpu: float, wall: float) -> None:
    for which, seconds in ((signal.ITIMER_PROF, cpu), (signal.ITIMER_REAL, wall)):
        if signal.getsignal(_alarms[which]) is _raise:
            signal.setitimer(which, seconds)


@contextlib.contextmanager
def surroundings() -> Iterator[None]:
    """What a process that tries cases needs around all of them: runs in the process itself, an alarm, errors that are
    remembered, and a limit on memory that a case cannot leave."""
    own = corerl.loop.train, CorerlError.message
    free = [number for which, number in _alarms.items() if not any(signal.getitimer(which))]  # not pytest's
    handlers = {number: signal.signal(number, _raise) for number in free}
    path, modules = list(sys.path), set(sys.modules)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    corerl.loop.train = execute_here  # type: ignore[assignment]
    CorerlError.message = property(_remember)  # type: ignore[method-assign, assignment]
    virtual = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (virtual + MEMORY + GIB, limits[1]))
    try:
        yield
    finally:
        corerl.loop.train, CorerlError.message = own  # type: ignore[method-assign]
        for number, handler in handlers.items():
            signal.signal(number, handler)
        sys.path[:] = path
        for name in set(sys.modules) - modules:
            if name == "rewards":
                del sys.modules[name]
        resource.setrlimit(resource.RLIMIT_AS, limits)


@contextlib.contextmanager
def _directory(inputs: Path) -> Iterator[Any]:
    """A working directory with links to the inputs, and streams of its own; gives what was written to these."""
    here, path = os.getcwd(), list(sys.path)
    scratch = Path(tempfile.mkdtemp(prefix="corerl-fuzz-"))
    for entry in inputs.iterdir():
        (scratch / entry.name).symlink_to(entry)
    buffers = [io.BytesIO() for _ in range(2)]
    streams = [io.TextIOWrapper(buffer, encoding="utf-8", errors="backslashreplace") for buffer in buffers]

    def written() -> list[str]:
        for stream in streams:
            if not stream.closed:  # as a user's module may have done
                stream.flush()
        return ["" if buffer.closed else buffer.getvalue().decode("utf-8", "backslashreplace") for buffer in buffers]

    os.chdir(scratch)
    try:
        with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
            yield written
    finally:
        if dist.is_initialized():  # by a rank that did not come to its end
            dist.destroy_process_group()
        os.chdir(here)
        sys.path[:] = path
        sys.modules.pop("rewards", None)
        shutil.rmtree(scratch, ignore_errors=True)


def _reset_peak() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _peak() -> int:
    """The most memory that this process has held since `_reset_peak`, in bytes."""
    found = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


# ---- judging ---------------------------------------------------------------------------------------------------------


def place_of(error: BaseException) -> str:
    """The innermost frame of CoreRL's own, as file:function; of an error that was made from another, that one's."""
    cause = error.__cause__
    if isinstance(error, CorerlError) and isinstance(cause, CorerlError):
        return place_of(cause)
    if isinstance(error, CorerlError) and isinstance(cause, ExceptionGroup):
        return place_of(cause.exceptions[0])
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename.startswith(str(ROOT / "corerl"))]
    return f"{Path(own[-1].filename).relative_to(ROOT)}:{own[-1].name}" if own else "nowhere"


def _judge(case: Case, status: int | None, error: BaseException | None, out: str, err: str) -> Finding | None:
    if error is not None:
        key = f"{type(error).__name__} in {place_of(error)}"
        return Finding(key=key, text="".join(traceback.format_exception(error))[-3000:])
    said = _said[-1] if _said else None
    command = " ".join(case.command[:2])
    where = place_of(said) if said is not None else command
    if FRAME.search(out + err):
        return Finding(key=f"shown traceback in {where}", text=(out + err)[-3000:])
    if SECRET in out + err and case.command[1] != "show":
        return Finding(key=f"secret in {where}", text=err[-1000:])
    for text in (out, err):
        if control := {c for c in text if unicodedata.category(c) == "Cc" and c not in "\n\t"}:
            return Finding(key=f"control characters in {where}", text=f"{sorted(control)} in {text[-1500:]!r}")
    lines = err.splitlines()
    if long := next((line for line in lines if line.startswith("corerl") and len(line) > LONGEST), None):
        return Finding(key=f"long line in {where}", text=f"{len(long)} characters: {long[:300]} ... {long[-300:]}")
    if status and not any(line.startswith(("corerl: ", "corerl ")) for line in lines):
        return Finding(key=f"status {status} without a word in {command}", text=err[-1500:])
    if status not in (0, 1, 2, 130):  # 130: a module that is imported may interrupt
        return Finding(key=f"status {status} of {command}", text=err[-1500:])
    if said is not None and status and (many := _several_lines(said)):
        return Finding(key=f"several lines in {place_of(many)}", text=many.args[0][:1500])
    return None


def _several_lines(error: BaseException) -> BaseException | None:
    """The error whose own message has several lines; one that collects others has a line for each of them."""
    if isinstance(error.__cause__, ExceptionGroup):
        return next(filter(None, map(_several_lines, error.__cause__.exceptions)), None)
    own = place_of(error)
    if isinstance(error, ConfigError) and own.startswith(("corerl/config/", "corerl/plan/resolve.py:")):
        return None  # one line for each problem, each cut and made printable
    return error if "\n" in str(error.args[0]) else None


# ---- results ---------------------------------------------------------------------------------------------------------


def _without_result(case: Case, out: str) -> Finding | None:
    """What a command that ended with status 0 lacks."""
    _set_alarms(SECONDS, WAITING)
    try:
        match case.command[:2]:
            case ("config", "show"):
                return _shown(case, out)
            case ("config", "check"):
                return _checked(case, out)
            case ("export", _):
                return _exported(out)
            case ("eval", _) if "--json" in case.command:
                scores = json.loads(out.splitlines()[-1])
                return None if scores else Finding(key="eval without scores", text=out)
    except BaseException as error:
        if isinstance(error, NothingLeft):
            return None
        key = f"ok, then {type(error).__name__} in {place_of(error)}"
        return Finding(key=key, text="".join(traceback.format_exception(error))[-3000:])
    finally:
        _set_alarms(0, 0)
    return None


def _shown(case: Case, out: str) -> Finding | None:
    Path("shown.toml").write_text(out, encoding="utf-8")
    shown = load_config("shown.toml")
    if dump_toml(shown) != dump_toml(load_config("shown.toml")):
        return None
    again = dump_toml(shown)
    return None if again == out else Finding(key="shown config differs when read", text=again)


def _checked(case: Case, out: str) -> Finding | None:
    """A run's own preparation, as far as it needs no processes; a run where the case asks for it."""
    if not out.endswith(": ok\n"):
        return Finding(key="check without ok", text=out)
    file, overrides = case.command[2], [word for word in case.command[3:] if "=" in word]
    config = load_config(file, overrides)
    if os.path.exists(config.run.dir) and config.checkpoint.resume != "auto":
        config = evolve(config, run=evolve(config.run, dir="another"))  # which a check allows, and a start may not
    plan = make_plan(config)
    rollout = plan.rollout
    again = config_of(to_plain(recorded(config)))
    if not config.cluster.environment and again != config:
        return Finding(key="written config differs", text=dump_toml(recorded(config)))
    prompts = [rollout.prompts.prompt(index) for index in rollout.prompts.train.tolist()[:32]]
    if plan.run.has_engines:
        encode(rollout.tokenizer, prompts, config.data.chat_template_options)
    if case.runs:
        _run(config)
    return None


def _run(config: Config) -> None:
    try:
        reward = evolve(config.reward, processes=0)  # which are this one's, too
        algorithm = evolve(config.algorithm, on_mismatch="off")  # the fake engine's log-probs are of no model
        execute_here(evolve(config, run=evolve(config.run, dir="another"), reward=reward, algorithm=algorithm))
    except CorerlError as error:
        if "reward" not in error.message:  # whose code may do anything
            raise


def _exported(out: str) -> Finding | None:
    if out != "wrote out\n":
        return Finding(key="export without a word", text=out)
    model = AutoModelForCausalLM.from_pretrained("out")
    AutoTokenizer.from_pretrained("out")
    if any(param.is_meta for param in model.parameters()):
        return Finding(key="export without all tensors", text=out)
    with torch.no_grad():
        model(torch.tensor([[1, 2, 3]]))
    return None
