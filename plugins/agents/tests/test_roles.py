"""Episodes that several roles play: their rows, noise and rewards, and a run that trains two at once."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from corerl.ops import hash_key
from corerl.rollout import Failure, Judged, Rollout
from corerl.types import TURN_REWARDS
from corerl_agents.commands import command_of
from corerl_agents.episodes import Episode
from plugins.agents.tests import worker_functions
from plugins.agents.tests.clients import post
from plugins.agents.tests.oracle import PROMPTS, TOKENIZER, Fails, Play, assert_equal, noise_keys, oracle_says
from tests.end_to_end.command import metrics
from tests.in_process import execute_here, small

ROLES = ("white", "black")
white_twice_black_once = worker_functions.white_twice_black_once


def by_role(rollout: Rollout, name: str) -> np.ndarray[Any, Any]:
    """The rows of this role."""
    return np.flatnonzero(rollout.batch.row_columns["role"] == name)


def test_each_role_has_its_own_rows_noise_and_reward(play: Play) -> None:
    rollout = play(white_twice_black_once, roles=ROLES)
    rows, batch = rollout.batch.row_columns, rollout.batch
    assert rows["role"].tolist() == ["white", "black"] * 8
    assert rows["group"].tolist() == [0] * 8 + [1] * 8
    assert rows["sample"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3] * 2
    assert rows["episode"].tolist() == list(range(16))
    assert rows["turns"].tolist() == [2, 1] * 8 and rows["final"].all()
    for number, key in enumerate(noise_keys()):
        asked = TOKENIZER.encode(PROMPTS[number // 4].text)
        for place, first in enumerate(([*asked, 14], asked)):  # white is asked with one more character
            row = 2 * number + place
            answer = oracle_says(hash_key(key, place), limit=2)
            tokens = batch.tokens[batch.offsets[row] : batch.offsets[row + 1]].tolist()
            assert tokens[: len(first) + len(answer)] == [*first, *answer]
    lengths = [len(text) for text in rollout.texts]
    for white, black in zip(by_role(rollout, "white"), by_role(rollout, "black"), strict=True):
        said = lengths[white]
        assert rollout.outcomes[white] == Judged(reward=said - 0.5, parts={"said": said, "cost": -0.5})
        assert rollout.outcomes[black] == -said and black == white + 1


def test_rewards_of_turns_are_those_of_the_roles_own_answers(play: Play) -> None:
    def rewarded(episode: Episode) -> dict[str, Any]:
        white_twice_black_once(episode)
        return {"white": [1.0, 2.0], "black": [4.0]}

    rollout = play(rewarded, roles=ROLES, samples=1)
    sums = np.add.reduceat(rollout.batch.columns[TURN_REWARDS], rollout.batch.offsets[:-1])
    assert sums.tolist() == [3.0, 4.0] * 2
    assert rollout.outcomes[:2] == [Judged(reward=3.0, turns=(1.0, 2.0)), Judged(reward=4.0, turns=(4.0,))]


def test_rewards_are_posted_or_left_to_the_run_by_role(play: Play) -> None:
    said: list[int] = []

    def posts(episode: Episode) -> dict[str, float | None]:
        white_twice_black_once(episode)
        said.append(post(f"{episode.role('white').base_url}/reward", {"reward": 3.0})[0])
        return {"black": None}

    rollout = play(posts, roles=ROLES, samples=1)
    assert rollout.outcomes == [Judged(reward=3.0), None] * 2 and said == [200, 200]
    left = play(lambda episode: white_twice_black_once(episode) and None, roles=ROLES, samples=1)
    assert left.outcomes == [None] * 4


def test_a_role_that_said_nothing_has_no_row(play: Play) -> None:
    def resigns(episode: Episode) -> dict[str, float]:
        episode.role("black").chat(episode.messages, max_tokens=1)
        if episode.prompt.index == 40:
            episode.role("white").chat(episode.messages, max_tokens=1)
        return {"white": 1.0, "black": -1.0}

    rollout = play(resigns, roles=ROLES, samples=1)
    assert rollout.batch.row_columns["role"].tolist() == ["white", "black", "black"]
    assert rollout.outcomes == [1.0, -1.0, -1.0]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.0, "returned 1.0, wanted a reward for each role by its name (white, black), or None, on prompt 40"),
        ({"white": 1.0, "blak": 0.0}, "returned a reward for 'blak', wanted those of the roles white, black, on"),
        ({"white": "won", "black": 0.0}, "returned 'won' for the role 'white', wanted a finite number, numbers by"),
        ({"white": 1.0}, "gave no reward for the role 'black', which has played, and none was posted to its URL;"),
        ({"white": [1.0], "black": 0.0}, "returned 1 rewards, one for each turn, but got 2 answers on prompt 40"),
    ],
)
def test_wrong_rewards_of_roles_cost_one_episode(play: Play, value: Any, text: str) -> None:
    def wrong(episode: Episode) -> Any:
        good = white_twice_black_once(episode)
        return value if episode.prompt.index == 40 else good

    *failed, white, black = play(wrong, roles=ROLES, samples=1).outcomes
    assert len(failed) == 2 and failed[0] == failed[1]
    assert isinstance(failed[0], Failure) and failed[0].kind == "no-number"
    assert failed[0].message.startswith(f"samplers.episodes.function 'mine:play' {text}")
    assert isinstance(white, Judged) and isinstance(black, float)


def test_an_episode_that_fails_keeps_the_rows_of_its_roles(play: Play) -> None:
    def fails(episode: Episode) -> Any:
        good = white_twice_black_once(episode)
        if episode.prompt.index == 40:
            raise KeyError("board")
        return good

    rollout, whole = play(fails, roles=ROLES, samples=2), play(white_twice_black_once, roles=ROLES, samples=2)
    assert_equal(rollout, whole)
    assert {getattr(each, "kind", None) for each in rollout.outcomes[:4]} == {"raised"}
    assert rollout.outcomes[4:] == whole.outcomes[4:]
    silent = play(lambda episode: 1 / 0, roles=ROLES, samples=1)
    assert silent.batch.row_columns["role"].tolist() == ["white"] * 2 and not silent.batch.columns["loss_mask"].any()


def test_the_url_of_the_episode_belongs_to_no_role(failure: Fails) -> None:
    said: list[tuple[int, Any]] = []

    def forgets(episode: Episode) -> dict[str, float]:
        good = white_twice_black_once(episode)
        said.append(post(f"{episode.base_url}/reward", {"reward": 1.0}))
        episode.chat(episode.messages)
        return good

    how = "to the URL of one of white, black: episode.role('white'), or {base_url_white}"
    asked = failure(forgets, roles=ROLES).message
    assert f"the episode has roles (samplers.episodes.roles); send requests {how}" in asked
    ((status, answer),) = said
    assert status == 400 and f"post rewards {how}" in answer["error"]["message"]

    unknown = failure(lambda episode: episode.role("wite"), roles=ROLES).message
    assert "no role 'wite'; roles are white, black; did you mean 'white'" in unknown
    without = failure(lambda episode: episode.role("white")).message
    assert "no role 'white'; set samplers.episodes.roles" in without


AGENT = """
import json, os, sys, urllib.request

def ask(url):
    body = json.dumps({"messages": [{"role": "user", "content": "21>"}], "max_tokens": 2}).encode()
    urllib.request.urlopen(url + "/chat/completions", body).read()

ask(sys.argv[1])
ask(os.environ["CORERL_BASE_URL_BLACK"])
print(sys.argv[2])
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("line", "outcomes"),
    [
        ('{"reward": {"white": 1, "black": {"reward": -1, "parts": {"moves": 3}}}}', [1.0, -1.0]),
        ('{"reward": {"wite": 1}}', 'as in {"reward": {"white": 1.0, "black": 1.0}}'),
    ],
)
def test_a_command_plays_roles(play: Play, line: str, outcomes: Any) -> None:
    command = command_of([sys.executable, "-Sc", AGENT, "{base_url_white}", line], ROLES)
    found = play(command, roles=ROLES, samples=1, prompts=PROMPTS[:1]).outcomes
    if isinstance(outcomes, str):
        assert isinstance(found[0], Failure) and outcomes in found[0].message
    else:
        assert [each.reward if isinstance(each, Judged) else each for each in found] == outcomes


# ---- a run -----------------------------------------------------------------------------------------------------------


def digit(text: str) -> float:
    return int(text) / 9 if text.isdigit() else 0.5


def opposed(episode: Episode) -> dict[str, float]:
    """Two roles with the same question behind another digit: one earns by low digits, and always more than the other,
    which earns by high ones."""
    said = [
        episode.role(name).chat([{"role": "user", "content": f"{first}{episode.prompt.text}"}])["message"]["content"]
        for name, first in (("low", 3), ("high", 7))
    ]
    return {"low": 4.0 - digit(said[0]), "high": digit(said[1])}


def run(directory: Path, *overrides: str) -> list[dict[str, float]]:
    """The metrics of each step."""
    directory.mkdir(exist_ok=True)
    common = ("rollout.prompts=4", "rollout.max_tokens=1", "data.held_out=0", "checkpoint.every=0")
    roles = (f"samplers.episodes.function={__name__}:opposed", "samplers.episodes.roles=['low','high']")
    learns = ("train.optimizer.lr=1e-2", "train.schedule.warmup_steps=0", "checkpoint.export=false")
    execute_here(small(directory, "rollout.sampler=episodes", *roles, *learns, *common, *overrides))
    return [line for line in metrics(directory / "run") if "train/loss" in line]


def test_a_run_reports_roles_and_streams_them_alike(tmp_path: Path) -> None:
    kept = ("rollout.save=true", "extensions=[{name='jsonl',options={samples='all'}}]")
    plain = run(tmp_path / "plain", "run.steps=2", *kept)
    streamed = run(tmp_path / "streamed", "run.steps=2", "rollout.source=streamed")
    for one, other in zip(plain, streamed, strict=True):
        assert one["rollout/reward"] == pytest.approx((one["reward/low"] + one["reward/high"]) / 2)
        for name in ("reward/low", "reward/high", "train/grad_norm", "rollout/groups_without_spread"):
            assert one[name] == pytest.approx(other[name], rel=1e-4)
    saved = np.load(tmp_path / "plain" / "run" / "rollouts" / "step-00000000.npz", allow_pickle=False)
    assert saved["rows/role"].tolist() == ["low", "high"] * 16
    lines = [json.loads(line) for line in (tmp_path / "plain" / "run" / "samples.jsonl").read_text().splitlines()]
    assert [list(line["parts"]) for line in lines] == [["low"], ["high"]] * (len(lines) // 2)
    for low, high in zip(lines[::2], lines[1::2], strict=True):
        assert (low["prompt"], low["sample"], low["step"]) == (high["prompt"], high["sample"], high["step"])
        assert low["reward"] == pytest.approx(4.0 - digit(low["response"]))
        assert high["reward"] == pytest.approx(digit(high["response"]))
