"""Every route, on a directory as a run leaves it: answers equal the files, and only the key opens them."""

from __future__ import annotations

import fcntl
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from corerl_page.app import STATIC, app
from corerl_page.runs import RECENT, runs_of
from plugins.page.tests.batches import shown
from plugins.page.tests.test_recorder import CONFIG, record, started, step

KEY = "k" * 20
Get = Callable[..., Any]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    run_dir = tmp_path / "first"
    run_dir.mkdir()
    (run_dir / "config.toml").write_text(CONFIG + "run.steps = 9\n")
    metrics: list[dict[str, Any]] = [
        {"step": 0, "eval/reward": 0.5},
        {"step": 0, "rollout/reward": 0.25, "train/loss": None, "time/step": 1.0},
        {"step": 1, "rollout/reward": 0.75, "train/loss": -0.5, "time/step": 1.5},
    ]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    (run_dir / "notices.jsonl").write_text('{"step": 1, "text": "<b>rewards</b> are equal"}\n')
    record(run_dir, started(run_dir), step(0), step(1), samples=0)
    texts = [{"step": 2, "kind": "sampled", **each.record()} for each in shown()]
    (run_dir / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in texts))
    return run_dir


@pytest.fixture
def client(run_dir: Path) -> TestClient:
    return TestClient(app(runs_of([run_dir]), key=KEY, hosts=["here.example"]), base_url="http://localhost:8000")


@pytest.fixture
def get(client: TestClient) -> Get:
    def found(path: str, **query: Any) -> Any:
        answer = client.get(f"/api/{path}", params=query, headers={"X-Key": KEY})
        assert answer.status_code == 200, answer.text
        return answer.json()

    return found


def test_only_the_key_opens_every_route(client: TestClient) -> None:
    for path in ("runs", "runs/0/metrics", "runs/0/samples?step=0", "runs/0/config", "runs/0/timeline"):
        for key in ("", KEY[:-1], KEY + "x"):
            assert client.get(f"/api/{path}", headers={"X-Key": key}).status_code == 401
        assert client.get(f"/api/{path}", headers={"X-Key": KEY}).status_code == 200
        assert client.post(f"/api/{path}", headers={"X-Key": KEY}).status_code == 405


def test_a_name_that_is_not_the_pages_is_refused(client: TestClient) -> None:
    own, others = ("localhost:1", "127.0.0.1:1", "[::1]:1", "Here.Example"), ("rebound.example", "[")
    for host, status in {**dict.fromkeys(own, 200), **dict.fromkeys(others, 403)}.items():
        for path in ("/", "/api/runs"):
            assert client.get(path, headers={"Host": host, "X-Key": KEY}).status_code == status, host


def test_files_of_the_page_are_served_and_no_others(client: TestClient) -> None:
    for file in STATIC.iterdir():
        answer = client.get(f"/{file.name}")
        assert answer.content == file.read_bytes()
        assert "default-src 'none'" in answer.headers["content-security-policy"]
    for path in ("/nothing.js", "/..%2Fapp.py", "/%2e%2e/app.py", "/static/main.js"):
        assert client.get(path).status_code == 404


def test_metrics_equal_the_file(get: Get) -> None:
    found = get("runs/0/metrics", names="rollout/reward,train/loss,eval/reward,unknown")
    assert found["names"] == ["eval/reward", "rollout/reward", "time/step", "train/loss"]
    assert found["series"] == {
        "rollout/reward": {"steps": [0, 1], "values": [0.25, 0.75]},
        "train/loss": {"steps": [0, 1], "values": [None, -0.5]},
        "eval/reward": {"steps": [0], "values": [0.5]},
    }


def test_samples_come_page_by_page_in_order(get: Get, run_dir: Path) -> None:
    assert get("runs/0/steps") == [{"step": each, "kinds": {"sampled": 4}} for each in range(3)]
    found = get("runs/0/samples", step=1, sort="-reward", offset=1, limit=2)
    assert (found["total"], found["cut_off"]) == (4, 1)
    assert [each["reward"] for each in found["samples"]] == [0.5, 0.25]
    lines = [json.loads(line) for line in (run_dir / "rollouts.jsonl").read_text().splitlines()]
    for each in found["samples"]:
        line = get(f"runs/0/samples/{each['id']}", step=1)
        assert line in lines
        assert (line["step"], line["reward"], line["diff"][0]) == (1, each["reward"], each["diff"])


def test_steps_that_are_no_longer_in_memory_are_read_again(get: Get, run_dir: Path) -> None:
    record(run_dir, started(run_dir), *map(step, range(RECENT + 4)), samples=0)
    found = [get("runs/0/samples", step=each)["samples"] for each in range(RECENT + 4)]
    assert [[{**each, "id": 0, "step": 0} for each in of] for of in found] == [
        [{**each, "id": 0, "step": 0} for each in found[-1]]
    ] * len(found)
    assert {each["step"] for each in found[0]} == {0}


def test_memory_does_not_grow_with_the_samples_of_a_run(tmp_path: Path) -> None:
    line = {"prompt": "p" * 200, "response": "r" * 200, "reward": 0.5, "tokens": 9, "engines": [0], "diff": [0.5, 1.0]}
    with (tmp_path / "rollouts.jsonl").open("w") as file:
        for at in range(8 * RECENT):
            file.writelines(json.dumps({"step": at, "kind": "sampled", **line}) + "\n" for _ in range(16))
    (run,) = runs_of([tmp_path])
    tracemalloc.start()
    assert len(run.steps()) == 8 * RECENT
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    whole = (tmp_path / "rollouts.jsonl").stat().st_size
    assert peak < 0.6 * whole  # all lines at once, and a summary of each, took more than twice as much
    assert run.diffs() == {at: {0: 0.5} for at in range(8 * RECENT)}


def test_a_line_that_cannot_be_read_is_an_error_each_time(client: TestClient, run_dir: Path) -> None:
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "rew{"step": 3, "rollout/reward": 1.0}\n{"step": 4}\n')
    for _ in range(2):
        answer = client.get("/api/runs/0/metrics", headers={"X-Key": KEY})
        assert (answer.status_code, answer.json()["error"][:19]) == (500, "cannot read the run")


def test_samples_are_chosen_and_counted_by_engine(get: Get) -> None:
    whole = get("runs/0/samples", step=1, sort="engines")
    assert [each["engines"] for each in whole["samples"]] == [[0], [0, 1], [1], [1]]
    assert [(each["engine"], each["samples"], each["cut_off"]) for each in whole["engines"]] == [(0, 2, 0), (1, 3, 1)]
    own = get("runs/0/samples", step=1, engine=1)
    assert [each["number"] for each in own["samples"]] == [1, 2, 3]
    diffs, tokens = ([each[name] for each in own["samples"]] for name in ("diff", "tokens"))
    mean = np.average(diffs, weights=tokens)  # over tokens, as the metric is
    assert whole["engines"][1]["diff"] == own["engines"][1]["diff"] == pytest.approx(mean)
    assert len(set(tokens)) > 1 and whole["engines"][1]["tokens"] == sum(tokens)
    assert (own["total"], own["cut_off"], own["far"]) == (3, 1, sum(diff > 0.1 for diff in diffs))
    assert own["bad"] == {"cut_off": True, "far": True}  # one of three, and means above 0.01
    assert get("runs/0/samples", step=1, engine=0)["bad"]["cut_off"] is False
    assert get("runs/0/samples", step=2)["bad"] == {"cut_off": False, "far": False}


def test_an_engine_that_sampled_nothing_chooses_nothing(get: Get) -> None:
    for of, engine, applied, total in ((0, 1, 1, 3), (0, 7, None, 4), (2, 1, None, 4)):  # step 2 is of samples.jsonl
        found = get("runs/0/samples", step=of, engine=engine)
        assert (found["engine"], found["total"]) == (applied, total)
    assert get("runs/0/samples", step=2, engine=1)["engines"] == []


def test_a_search_finds_texts_in_any_case(get: Get) -> None:
    assert [each["number"] for each in get("runs/0/samples", step=0, q="TEXT 2")["samples"]] == [2]
    assert get("runs/0/samples", step=2, q="prompt 3")["samples"][0]["tokens"] is None  # of samples.jsonl


def test_a_text_that_looks_like_a_samples_rows_is_read_whole(get: Get, run_dir: Path) -> None:
    text = 'of {"a": 1, "rows": [2]}'
    with (run_dir / "rollouts.jsonl").open("a") as file:
        file.write(json.dumps({"step": 5, "response": text, "reward": 1.0, "rows": [{"pieces": [text]}]}) + "\n")
    (found,) = get("runs/0/samples", step=5, q='A": 1')["samples"]
    assert (found["response"], found["reward"]) == (text, 1.0)
    assert get(f"runs/0/samples/{found['id']}", step=5)["rows"] == [{"pieces": [text]}]


def test_what_is_wrong_is_a_sentence(client: TestClient) -> None:
    paths = {
        "runs/7/metrics": (404, "there is no run 7"),
        "runs/0/samples": (400, "step='None', expected a whole number"),
        "runs/0/samples?step=-1": (400, "step='-1'"),
        "runs/0/samples?step=0&sort=__class__": (400, "sort='__class__', expected one of reward"),
        "runs/0/samples/1?step=0": (404, "rollouts.jsonl has no sample at 1"),
    }
    for path, (status, sentence) in paths.items():
        answer = client.get(f"/api/{path}", headers={"X-Key": KEY})
        assert (answer.status_code, answer.json()["error"][: len(sentence)]) == (status, sentence)


def test_a_run_that_goes_on_is_read_on(get: Get, run_dir: Path) -> None:
    (before,) = get("runs")
    assert (before["name"], before["running"], before["done"], before["steps"]) == ("first", False, 2, 9)
    with (run_dir / "metrics.jsonl").open("a") as file, (run_dir / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        file.write('{"step": 2, "rollout/reward": 1.0, "time/step": 1.0}\n{"step": 3, "roll')
        file.flush()
        (after,) = get("runs")
    assert (after["running"], after["done"]) == (True, 3)
    assert after["changed"] != before["changed"]
    assert get("runs/0/metrics", names="rollout/reward")["series"]["rollout/reward"]["values"] == [0.25, 0.75, 1.0]


@pytest.mark.parametrize("scored", [0, 40])
def test_an_evaluation_counts_the_steps_before_it(get: Get, run_dir: Path, scored: int) -> None:
    (run_dir / "metrics.jsonl").write_text(json.dumps({"step": scored, "eval/reward": 0.5}) + "\n")
    assert get("runs")[0]["done"] == scored


def test_a_resumed_run_replaces_its_steps(get: Get, run_dir: Path) -> None:
    get("runs/0/metrics")
    path = run_dir / "metrics.jsonl"
    path.with_name("part").write_text('{"step": 0, "rollout/reward": 0.125}\n')
    path.with_name("part").replace(path)
    series = get("runs/0/metrics", names="rollout/reward")["series"]
    assert series == {"rollout/reward": {"steps": [0], "values": [0.125]}}


def test_differences_are_of_the_runs_asked_for(run_dir: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.toml").write_text(CONFIG + "run.steps = 7\n")
    shown = TestClient(app(runs_of([run_dir, other]), key=KEY), base_url="http://localhost:8000")
    for runs, wanted in {"0,1": [{"name": "run.steps", "values": ["9", "7"]}], "1": [], "0,x": [], "": []}.items():
        assert shown.get("/api/differences", params={"runs": runs}, headers={"X-Key": KEY}).json() == wanted
