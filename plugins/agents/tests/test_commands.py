"""Episodes that programs play: real ones."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from corerl.rollout import Judged
from corerl_agents.commands import EpisodeCommand, _direct, command_of
from plugins.agents.tests.oracle import PROMPTS, Fails, Play, assert_equal
from tests.machine import paced

pytestmark = pytest.mark.processes

AGENT = str(Path(__file__).with_name("agent.py"))


def agent(what: str) -> EpisodeCommand:
    return command_of([sys.executable, "-S", AGENT, "{base_url}", "{prompt_file}", what])


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def all_ended(file: Path) -> bool:
    pids = [int(line) for line in file.read_text().split()]
    assert len(pids) == 2
    deadline = time.monotonic() + paced(20)
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(alive, pids))


def test_a_command_plays_episodes_and_gives_rewards(play: Play) -> None:
    rollout = play(agent("reward"), samples=2)
    assert rollout.outcomes == [Judged(reward=each, parts={"asked": 1.0}) for each in (5.0, 5.0, 1.0, 1.0)]
    assert rollout.batch.row_columns["turns"].tolist() == [1] * 4
    assert_equal(rollout, play(lambda episode: episode.chat(episode.messages, max_tokens=2) and None, samples=2))


@pytest.mark.parametrize(
    ("what", "outcome"), [("number", 0.25), ("none", None), ("brackets", None), ("post", Judged(reward=0.5))]
)
def test_a_reward_is_printed_posted_or_the_runs(play: Play, what: str, outcome: object) -> None:
    assert play(agent(what), samples=1, prompts=PROMPTS[:1]).outcomes == [outcome]


def test_a_proxy_of_the_machine_is_not_asked_for_episodes(failure: Fails, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # where nothing listens
    monkeypatch.setenv("no_proxy", "example.org")
    monkeypatch.delenv("NO_PROXY", raising=False)
    known = "assert os.environ['NO_PROXY'] == 'example.org,127.0.0.1'"
    code = f"import os, sys, urllib.request as r; r.urlopen(sys.argv[1]).read(); {known}"
    command = command_of([sys.executable, "-Sc", code, "{base_url}/models"])
    assert failure(command).kind == "silent"  # it has asked for nothing else


@pytest.mark.parametrize(
    ("had", "found"),
    [
        ({}, ("127.0.0.1", "127.0.0.1")),
        ({"no_proxy": "*"}, ("*", "*")),
        ({"no_proxy": "*", "NO_PROXY": "a.org"}, ("*", "a.org,127.0.0.1")),
        ({"no_proxy": "a.org", "NO_PROXY": "b.org"}, ("a.org,127.0.0.1", "b.org,127.0.0.1")),
        ({"NO_PROXY": "b.org"}, ("b.org,127.0.0.1", "b.org,127.0.0.1")),
        ({"no_proxy": "", "NO_PROXY": "b.org"}, ("127.0.0.1", "b.org,127.0.0.1")),
    ],
)
def test_hosts_without_a_proxy_stay_without_one(
    had: dict[str, str], found: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in had.items():
        monkeypatch.setenv(name, value)
    assert _direct("127.0.0.1") == dict(zip(("no_proxy", "NO_PROXY"), found, strict=True))


@pytest.mark.parametrize(
    ("what", "kind", "text"),
    [
        ("exit", "died", "ended with exit status 3; its last output: no such tool | see above; on prompt 40 ('21>')"),
        ("crash", "died", "ended with SIGSEGV; its last output: I have asked.; on prompt 40"),
        ("nan", "no-number", "ended with a line that is no reward: reward: got nan, wanted a finite number, on prompt"),
        ("flood", "flooded", "wrote more than 64 MiB of output, and was killed on prompt 40"),
    ],
)
def test_a_command_that_fails_costs_its_episode(failure: Fails, what: str, kind: str, text: str) -> None:
    outcome = failure(agent(what))
    assert outcome.kind == kind
    assert outcome.message.startswith(f"samplers.episodes.command {sys.executable!r} {text}")


def test_a_command_is_killed_with_its_children_at_the_timeout(failure: Fails, tmp_path: Path) -> None:
    file = tmp_path / "pids"
    started = time.monotonic()
    assert failure(agent(f"hang:{file}"), timeout=paced(3)).kind == "timeout"
    assert time.monotonic() - started < paced(60)
    assert all_ended(file)


def test_what_a_command_leaves_running_ends_with_it(play: Play, tmp_path: Path) -> None:
    file = tmp_path / "pids"
    assert play(agent(f"leave:{file}"), samples=1, prompts=PROMPTS[:1]).outcomes == [None]
    assert all_ended(file)
