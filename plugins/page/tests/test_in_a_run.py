"""A small real run with the extension, whose page is open meanwhile: what is kept equals what the run has reported."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from corerl.config import CONFIG_FILE, load_config
from tests.end_to_end.command import Command, metrics, write_small

pytestmark = pytest.mark.processes

EXTENSIONS = 'extensions=[{name="jsonl", options={samples="all"}}, {name="page", options={samples=0, serve=true}}]'


def test_kept_tokens_equal_what_the_run_reports(tmp_path: Path) -> None:
    config, run_dir = write_small(tmp_path), tmp_path / "run"
    more = ("eval.every=0", "checkpoint.export=false", "algorithm.old_logprobs=recompute", "algorithm.overlong=penalty")
    with Command("train", config, f"run.dir={run_dir}", EXTENSIONS, *more, logs=tmp_path) as command:
        while not (address := re.search(r"http://\S+/(?=#key=(\S+))", command.err)):
            assert command.process.poll() is None, command.err
            time.sleep(0.1)
        request = urllib.request.Request(f"{address[0]}api/runs", headers={"X-Key": address[1]})
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert [(each["name"], each["running"]) for each in json.load(answer)] == [("run", True)]
        assert command.finish() == 0, command.err
        command.assert_nothing_is_left()
    replicas = load_config(run_dir / CONFIG_FILE).rollout.replicas
    kept = [json.loads(line) for line in (run_dir / "rollouts.jsonl").read_text().splitlines()]
    texts = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    assert [{name: line[name] for name in texts[0]} for line in kept] == texts
    for line in metrics(run_dir):
        of_step = [each for each in kept if each["step"] == line["step"]]
        weighted = sum(each["diff"][0] * each["tokens"] for each in of_step) / sum(each["tokens"] for each in of_step)
        assert weighted == pytest.approx(line["rollout/logprob_diff"], rel=1e-4)
        assert max(each["diff"][1] for each in of_step) == pytest.approx(line["rollout/logprob_diff_max"], rel=1e-4)
        assert np.mean([each["truncated"] for each in of_step]) == pytest.approx(line["rollout/truncated"])
        assert sum(each["tokens"] for each in of_step) == line["rollout/tokens"]
        penalties = [each["shaped"] - each["reward"] for each in of_step]
        assert np.mean(penalties) == pytest.approx(line["rollout/overlong_penalty"], rel=1e-4)
        assert {engine for each in of_step for engine in each["engines"]} == set(range(replicas))
        assert np.mean([each["reward"] for each in of_step]) == pytest.approx(line["rollout/reward"])
