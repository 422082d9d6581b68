"""Real processes, which import `tests.rollout.user_rewards` by name."""

import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from corerl.config.schema import RewardConfig, RewardFunction
from corerl.data.prompts import Prompt
from corerl.errors import ConfigError, RewardError
from corerl.rollout.reward_processes import RewardPool
from corerl.rollout.rewards import Failure, Judged, Reward, reward_of
from corerl.rollout.scoring import RewardScorer, Scores, samples_of
from corerl.types import OnProgress
from tests.ended import alive, gone
from tests.machine import paced
from tests.rollout import rewarding

ACT = "tests.rollout.user_rewards:act"


rollout = functools.partial(rewarding.rollout, prompt=Prompt(index=7, text="p", answer="a"))


@contextmanager
def scorer(
    reward: Reward, config: RewardConfig, on_progress: OnProgress | None = None, notices: list[str] | None = None
) -> Iterator[RewardScorer]:
    """As that of a run, in this process or in others."""
    if not config.processes:
        yield RewardScorer(reward, on_progress=on_progress)
        return
    with closing(RewardPool(reward, config, [].append if notices is None else notices.append)) as pool:
        yield RewardScorer(reward, pool.outcomes, on_progress=on_progress)


def scores(texts: list[str], name: str = ACT, options: dict[str, Any] | None = None, **settings: Any) -> Scores:
    config = RewardConfig(name=name, options=options or {}, **settings)
    with scorer(reward_of(config), config) as judge:
        return judge.score(rollout(texts))


def test_each_sample_fails_by_what_the_reward_did_with_it() -> None:
    late, ended = "took longer than reward.timeout=0.5 seconds", "ended its process"
    failures = {
        "raise": ("raised", r"raised KeyError: 'x\ny' (tests/rollout/user_rewards.py:29)"),
        "nan": ("no-number", "returned nan, wanted a finite number,"),
        "leave": ("died", f"{ended} (sys.exit(4))"),
        "exit": ("died", f"{ended} (exit status 3)"),
        "segfault": ("died", f"{ended} (SIGSEGV)"),
        **dict.fromkeys(("loop", "regular", "sleep"), ("timeout", late)),
    }
    config, texts = RewardConfig(name=ACT, processes=2, timeout=0.5), ["ok", *failures, "four"]
    first, *found, last = rewarding.outcomes_of(config, samples_of(rollout(texts), tokens=False))
    assert (first, last) == (Judged(reward=2.0), Judged(reward=4.0))
    assert found == [
        Failure(kind=kind, message=f"reward {ACT!r} {what} on prompt 7 ('p') with the response {text!r}")
        for text, (kind, what) in failures.items()
    ]


def test_a_lost_process_costs_one_sample_and_no_second_call(tmp_path: Path) -> None:
    texts = ["a", "stuck", "bb", "ccc", "exit", "four", "seven", "raise", "loop", "last"]  # 3 travel together
    found = scores(texts, ACT, {"directory": str(tmp_path)}, processes=1, timeout=0.3, failed_value=-1.0)
    assert found.rewards.tolist() == [1.0, -1.0, 2.0, 3.0, -1.0, 4.0, 5.0, -1.0, -1.0, 4.0]
    assert found.failures == {"timeout": 2, "died": 1, "raised": 1}
    assert found.first == (
        f"reward {ACT!r} took longer than reward.timeout=0.3 seconds on prompt 7 ('p') with the response 'stuck'"
    )
    assert sorted((tmp_path / "calls").read_text().split()) == sorted(texts)  # each bad one has cost its time once


@pytest.mark.parametrize(("text", "timeout"), [("stuck", 0.3), ("ok", 600.0), ("exit", 600.0)])
def test_what_a_reward_has_started_ends_with_its_process(text: str, timeout: float, tmp_path: Path) -> None:
    options = {"directory": str(tmp_path)}
    config = RewardConfig(name="tests.rollout.user_rewards:parent", options=options, processes=1, timeout=timeout)
    with scorer(reward_of(config), config) as judge:
        judge.score(rollout([text]), partial=True)
        pids = {int(each.name): each.read_text() for each in tmp_path.iterdir()}
        assert len(pids) == 4
        if text == "exit":  # by itself, which leaves no trace of what is in a session of its own
            os.kill(next(pid for pid, kind in pids.items() if kind == "own session"), signal.SIGKILL)
        if text == "ok":
            assert all(map(alive, pids))
        else:
            assert gone({*pids})
    assert gone({*pids})


@pytest.mark.parametrize("processes", [0, 2])
def test_it_tells_how_many_samples_of_a_batch_are_scored(processes: int) -> None:
    told: list[tuple[int, int]] = []
    config = RewardConfig(name="position-match", processes=processes)
    with scorer(reward_of(config), config, lambda done, of: told.append((done, of))) as judge:
        judge.score(rollout(["a", "b"] * 40))
        counted = list(told)
        judge.score(rollout(["a", "b"] * 40), partial=True)
    assert told == counted and {of for _, of in told} == {80}  # a part is no batch
    done = [each for each, _ in told]
    assert done == sorted(done) and done[0] == 0 and 0 < done[-1] <= 80
    assert processes or done == list(range(81))


def test_processes_import_no_torch_that_the_reward_does_not() -> None:
    assert scores(["x"], name="tests.rollout.user_rewards:without_torch", processes=1).rewards.tolist() == [1.0]


@pytest.mark.processes
def test_an_async_reward_that_breaks_its_process_fails_alone() -> None:
    found = scores(["one", "exit", "three", "block", "sleep"], name="tests.rollout.user_rewards:promised", timeout=0.5)
    assert found.rewards.tolist() == [3.0, 0.0, 5.0, 0.0, 0.0]
    assert found.failures == {"died": 1, "timeout": 2}
    assert found.parts == {"length": (8.0, 2)}


def test_processes_that_cannot_import_the_reward_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    reward = Reward(name="tests.rollout.no_such_module:f", function=lambda prompt, response: 1.0)
    with scorer(reward, RewardConfig(name=reward.name)) as judge:
        with pytest.raises(ConfigError, match="no_such_module.*ModuleNotFoundError"):
            judge.score(rollout(["x"]))


def test_a_process_that_ended_while_free_is_replaced() -> None:
    config, notices = RewardConfig(name="tests.rollout.user_rewards:pid", processes=1), list[str]()
    with scorer(reward_of(config), config, notices=notices) as judge:
        first = int(judge.score(rollout(["x"])).rewards[0])
        os.kill(first, signal.SIGKILL)
        assert gone({first})
        again = judge.score(rollout(["x", "x"]))
    assert again.failures == {}
    assert len(set(again.rewards)) == 1 and int(again.rewards[0]) != first
    reward = "'tests.rollout.user_rewards:pid'"
    assert notices == [f"a process for reward {reward} ended while it was idle (SIGKILL); it is replaced"]


def test_a_process_that_ends_before_its_import_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rewards_that_exit.py").write_text("import os\nos._exit(5)\n")
    monkeypatch.syspath_prepend(tmp_path)
    reward = Reward(name="rewards_that_exit:f", function=lambda prompt, response: 1.0)
    with scorer(reward, RewardConfig(name=reward.name, processes=1)) as judge:
        with pytest.raises(RewardError, match=r"'rewards_that_exit:f' ended \(exit status 5\) before importing it"):
            judge.score(rollout(["x"]))


def test_late_outcomes_are_not_taken_for_the_next_rollouts() -> None:
    config = RewardConfig(name=ACT, options={"seconds": 1.0}, processes=1)
    with scorer(reward_of(config), config) as judge:
        assert judge.score(rollout(["x"])).rewards.tolist() == [1.0]  # it has started

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(KeyboardInterrupt):
                judge.score(rollout(["seven.."]))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, before)
        assert judge.score(rollout(["four"])).rewards.tolist() == [4.0]


def test_closing_the_pool_ends_scoring_with_an_error(tmp_path: Path) -> None:
    options = {"directory": str(tmp_path)}
    config = RewardConfig(name="tests.rollout.user_rewards:mark", options=options, processes=2, timeout=600.0)
    told: list[BaseException] = []
    before = multiprocessing.active_children()
    with scorer(reward_of(config), config) as judge:

        def score() -> None:
            try:
                judge.score(rollout(["x"] * 8))
            except BaseException as error:
                told.append(error)

        thread = threading.Thread(target=score)
        thread.start()
        end = time.monotonic() + paced(60)
        while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < end:
            time.sleep(0.05)
    thread.join(timeout=paced(60))
    assert not thread.is_alive()
    assert [type(error) for error in told] == [RewardError] and "were stopped because the run has ended" in str(told[0])
    assert multiprocessing.active_children() == before and len(list(tmp_path.iterdir())) == 2


def test_closing_the_pool_ends_the_wait_for_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = tmp_path / "begun"
    (tmp_path / "rewards_that_take_long.py").write_text(
        f"import pathlib, time\npathlib.Path({str(begun)!r}).touch()\ntime.sleep(600)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    reward = Reward(name="rewards_that_take_long:f", function=lambda prompt, response: 1.0)
    with ThreadPoolExecutor(1) as thread:
        with scorer(reward, RewardConfig(name=reward.name, processes=1)) as judge:
            scored = thread.submit(judge.score, rollout(["x"]))
            end = time.monotonic() + paced(60)
            while not begun.exists() and time.monotonic() < end:
                time.sleep(0.05)
        with pytest.raises(RewardError, match="were stopped because the run has ended"):
            scored.result(timeout=paced(60))


DRIVER = """
import contextlib
import signal
import sys
from corerl.config.schema import RewardConfig
from corerl.data.prompts import Prompt
from corerl.rollout.reward_processes import RewardPool
from corerl.rollout.rewards import reward_of

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what runs in the background without it
    config = RewardConfig(name="tests.rollout.user_rewards:parent", options={"directory": sys.argv[1]}, timeout=600.0)
    with contextlib.closing(RewardPool(reward_of(config), config)) as pool:
        pool.outcomes([(Prompt(index=0, text="p", answer=""), "loop", ())] * 2)
"""


@pytest.mark.processes
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_busy_processes_do_not_outlive_the_driver(tmp_path: Path, how: signal.Signals) -> None:
    script, marks = tmp_path / "driver.py", tmp_path / "marks"
    script.write_text(DRIVER)
    marks.mkdir()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    driver = subprocess.Popen(
        [sys.executable, str(script), str(marks)], env=environment, start_new_session=True, stderr=subprocess.DEVNULL
    )
    end = time.monotonic() + paced(60)
    while len(list(marks.iterdir())) < 8 and time.monotonic() < end:
        time.sleep(0.05)
    pids = {int(mark.name) for mark in marks.iterdir()}
    assert len(pids) == 8 and all(map(alive, pids))
    # Ctrl-C in a terminal reaches the whole group: the processes leave it to the driver.
    (os.kill if how is signal.SIGKILL else os.killpg)(driver.pid, how)
    assert driver.wait(timeout=paced(30)) != 0
    assert gone(pids)


def test_samples_that_are_awaited_together_have_each_its_own_time(tmp_path: Path) -> None:
    names: dict[str, dict[str, Any]] = {"promised": {"directory": str(tmp_path)}, "lazy": {"seconds": 0.3}}
    config = RewardConfig(
        functions=tuple(
            RewardFunction(name=f"tests.rollout.user_rewards:{name}", options=options)
            for name, options in names.items()
        ),
        processes=1,
        timeout=0.5,
    )
    texts = ["x" * length for length in range(1, 9)]  # together 2.4 s of what is not async, and needs the main thread
    with scorer(reward_of(config), config) as judge:
        assert judge.score(rollout(texts)).rewards.tolist() == [1.0 + len(text) for text in texts]
    assert sorted((tmp_path / "calls").read_text().split()) == texts  # each once
