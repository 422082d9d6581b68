"""Episodes that a command plays: an agent in any language, which is given the episode's URL."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import resource
import selectors
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

from attrs import field, frozen

from corerl.data import parse_json
from corerl.errors import ConfigError
from corerl.messages import did_you_mean, note, one_line, shorten_to_end
from corerl.rollout import exit_status, in_thread, number
from corerl_agents.episodes import Episode, EpisodeFunction, Played
from corerl_agents.posted import NoReward, read_reward, read_rewards

CHUNK = 64 * 2**10  # bytes read at once
KEPT = 64 * 2**10  # bytes of the end of each output that are kept
MOST = 64 * 2**20  # bytes of output after which a command is killed
LINES, SAID = 5, 600  # last lines of output in a failure's message, and their characters
FILES = 2**16  # that a process which plays episodes may have open
ROUNDS, PAUSE = 100, 0.02  # what is left is killed again, as it may start others meanwhile; seconds between
PLACEHOLDERS = ("base_url", "anthropic_url", "model", "api_key", "prompt_file")
OF_ROLES = ("base_url", "anthropic_url")  # of each role: {base_url_white}


@frozen(kw_only=True, eq=False)
class EpisodeCommand(EpisodeFunction):
    """In place of a user's function: a process for each episode, which ends it."""

    setting: ClassVar[str] = "samplers.episodes.command"
    command: tuple[str, ...]
    function: Any = field(default=None)  # there is none

    async def play(self, episode: Episode, *, name: str = "episode command") -> Played:
        """Run the command in a thread of this `name`; if this is cancelled, it is killed."""
        process = _Process()
        try:
            return await in_thread(functools.partial(self._run, episode, process), name=name)
        finally:
            process.kill()

    def _run(self, episode: Episode, process: _Process) -> Played:
        try:
            with tempfile.TemporaryDirectory(prefix="corerl-episode-") as directory:
                file = Path(directory) / "prompt.json"
                file.write_text(json.dumps(_fields(episode), default=str))
                values = _values(episode, str(file))
                command = [_filled(argument, values) for argument in self.command]
                ended = process.run(command, _environment(values), mark=episode.base_url)
        except OSError as error:
            return self.failure("raised", f"could not be run: {one_line(error)}", episode.prompt)
        if ended.flooded:
            what = f"wrote more than {MOST >> 20} MiB of output, and was killed"
            return self.failure("flooded", what, episode.prompt)
        if ended.status:
            what = f"ended with {exit_status(ended.status)}; its last output: {ended.said or 'none'};"
            return self.failure("died", what, episode.prompt)
        try:
            return _reward(ended.line, episode.roles)
        except NoReward as error:
            return self.failure("no-number", f"ended with a line that is no reward: {error},", episode.prompt)


def command_of(command: Sequence[str], roles: Sequence[str] = ()) -> EpisodeCommand:
    """The command that `samplers.episodes.command` names. Raises ConfigError if there is no such program, or nothing
    for a placeholder."""
    if not shutil.which(command[0]):
        raise ConfigError(
            f"samplers.episodes.command: no program {command[0]!r} here or in PATH; give its path, or install it"
        )
    known = [*PLACEHOLDERS, *(f"{kind}_{role}" for role in roles for kind in OF_ROLES)]
    for argument in command:
        for name in re.findall(r"\{(\w+)\}", argument):
            if name not in known and (near := did_you_mean(name, known)):
                raise ConfigError(f"samplers.episodes.command: unknown placeholder {{{name}}} in {argument!r}{near}")
    return EpisodeCommand(name=command[0], command=tuple(command))


def _values(episode: Episode, file: str) -> dict[str, str]:
    """By placeholder."""
    of_roles = {f"{kind}_{role}": getattr(episode.role(role), kind) for role in episode.roles for kind in OF_ROLES}
    return {
        "base_url": episode.base_url,
        "anthropic_url": episode.anthropic_url,
        "model": episode.model,
        "api_key": episode.api_key,
        "prompt_file": file,
        **of_roles,
    }


def _filled(argument: str, values: Mapping[str, str]) -> str:
    """Other braces, as of a shell's variables or of JSON, stay."""
    return re.sub(r"\{(\w+)\}", lambda found: values.get(found[1], found[0]), argument)


def _environment(values: Mapping[str, str]) -> dict[str, str]:
    return {
        **os.environ,
        **_direct(urlsplit(values["base_url"]).hostname or ""),
        "OPENAI_BASE_URL": values["base_url"],
        "OPENAI_API_KEY": values["api_key"],
        "ANTHROPIC_BASE_URL": values["anthropic_url"],
        "ANTHROPIC_API_KEY": values["api_key"],
        "CORERL_BASE_URL": values["base_url"],
        "CORERL_MODEL": values["model"],
        "CORERL_PROMPT_FILE": values["prompt_file"],
        **{f"CORERL_{name}".upper(): value for name, value in values.items() if name.startswith("base_url_")},
    }


def _direct(host: str) -> dict[str, str]:
    """The variables of hosts that are asked without a proxy, with this one: the episode's server is not behind a proxy
    that this machine asks others by."""
    found = {}
    for name, other in (("no_proxy", "NO_PROXY"), ("NO_PROXY", "no_proxy")):
        value = os.environ.get(name, os.environ.get(other, ""))  # one that is set may go before the other
        # `*` means all hosts, but only by itself.
        found[name] = value if value == "*" else ",".join(filter(None, (value, host)))
    return found


def _fields(episode: Episode) -> dict[str, Any]:
    prompt = episode.prompt
    return {
        "index": prompt.index,
        "text": prompt.text,
        "messages": episode.messages,
        "answer": prompt.answer,
        "tools": list(prompt.tools),
        "fields": dict(prompt.fields),
    }


def _reward(line: str, roles: Collection[str]) -> Played:
    """The reward that a last line of output has, or those of the roles; None if it is something else. Raises
    NoReward."""
    try:
        content = parse_json(line)
    except ValueError:
        return None
    if isinstance(content, dict) and "reward" in content:
        return read_rewards(content, roles) if roles else read_reward(content)
    if roles or isinstance(content, bool) or (reward := number(content)) is None:
        return None
    _note_number()
    return reward


@functools.cache
def _note_number() -> None:
    """Once: an agent may print its answer, and mean no reward."""
    note(
        "samplers.episodes.command: a last line of output that is a number is the episode's reward; if it is not meant "
        "as one, let the command print another line behind it"
    )


def allow_open_files() -> None:
    """Raise this process's soft limit. A command takes four files while it runs, and each client's connection one: the
    1,024 of many systems are too few for the 256 episodes that `concurrency` allows by default."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if resource.RLIM_INFINITY != soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # above the system's own limit, `fs.nr_open`
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


# ---- the process -----------------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class _Ended:
    status: int  # as subprocess has it: negative for a signal
    flooded: bool
    line: str  # the last of its standard output that is not empty
    said: str  # its last lines


class _Process:
    """One process in a session of its own; any thread may kill it, also before it starts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None  # while it has not been waited for
        self._killed = False

    def kill(self) -> None:
        """Kill it with its group; returns at once."""
        with self._lock:
            self._killed = True
            if self._process is not None:
                _kill_group(self._process.pid)

    def run(self, command: Sequence[str], environment: Mapping[str, str], *, mark: str) -> _Ended:
        """Run it to its end, and end what it has left running. Raises OSError if it cannot be started."""
        with self._lock:
            if self._killed:
                return _Ended(status=-signal.SIGKILL, flooded=False, line="", said="")
            process = self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        with process:
            try:
                output, errors, flooded = _read(process)
            finally:
                self.kill()  # while it has its number: what it has started, too
                with self._lock:
                    self._process = None
                    process.wait()
                kill_marked(mark)
        lines = output.decode(errors="replace").strip().splitlines()
        last = (errors.decode(errors="replace").strip().splitlines() or lines)[-LINES:]
        return _Ended(
            status=process.returncode,
            flooded=flooded,
            line=lines[-1] if lines else "",
            said=shorten_to_end(" | ".join(last), SAID),
        )


def _read(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes, bool]:
    """The ends of both outputs once the process has ended, and whether they were too long. Others may hold the pipes
    open longer."""
    assert process.stdout is not None and process.stderr is not None
    kept = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
    ended, read = os.pidfd_open(process.pid), 0
    try:
        with selectors.DefaultSelector() as selector:
            for pipe in (ended, *kept):
                selector.register(pipe, selectors.EVENT_READ)
            while ready := {key.fd for key, _ in selector.select()} - {ended}:
                for pipe in ready:
                    if not (part := os.read(pipe, CHUNK)):
                        selector.unregister(pipe)
                    kept[pipe] += part
                    del kept[pipe][:-KEPT]
                    read += len(part)
                if read > MOST:
                    break
    finally:
        os.close(ended)
    output, errors = map(bytes, kept.values())
    return output, errors, read > MOST


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def kill_marked(mark: str) -> None:
    """Kill the processes with this mark in the environment in which they were started, such as daemons that have left
    the group of a command: its mark is the episode's URL."""
    for _ in range(ROUNDS):
        if not (found := _marked(mark.encode())):
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(PAUSE)


def _marked(mark: bytes) -> list[int]:
    found = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if mark in file.read_bytes():
                found.append(int(file.parent.name))
    return found
