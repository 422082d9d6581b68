"""The earlier weights that a run passes samples through, in whole runs: the reference policy, which may be another
model or follow the actor, and what the engines hold or have held."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from corerl.config.schema import AlgorithmConfig
from corerl.driver.earlier_policies import EarlierPolicies
from corerl.types import SampleBatch
from tests.driver.fakes import Ears, progress, told
from tests.end_to_end.command import metrics, numbers
from tests.in_process import execute_here, small

KL = ["algorithm.kl_coef=0.1", "train.optimizer.lr=0.01", 'extensions=[{name="jsonl"}]', "algorithm.on_mismatch=off"]


def divergences(directory: Path, *overrides: str) -> list[float]:
    """KL to the reference policy, step by step; k2 is 0 only where both give the same log-probs."""
    execute_here(small(directory, *KL, "algorithm.kl_estimator=k2", *overrides))
    return [line["train/kl_reference"] for line in metrics(directory / "run") if "train/kl_reference" in line]


@pytest.mark.processes
def test_a_reference_that_follows_the_actor_is_the_actor_after_each_renewal(tmp_path: Path) -> None:
    renewed = ["algorithm.reference_every=2", "checkpoint.every=2"]
    found = divergences(tmp_path, "run.steps=4", *renewed)
    assert [value > 1e-9 for value in found] == [False, True, False, True]
    # A resumed run begins with the weights of its checkpoint, which were the reference when it was written.
    again = divergences(tmp_path, "run.steps=6", *renewed, "checkpoint.resume=auto")
    assert again[:4] == found and [value > 1e-9 for value in again[4:]] == [False, True]


@pytest.mark.processes
def test_the_reference_may_be_another_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert divergences(tmp_path / "a", "run.steps=2")[0] < 1e-9
    monkeypatch.setattr("tests.driver.test_earlier_policies.SEEN", [])
    others = f"algorithm.reference={tmp_path}/a/run/model"
    after = "algorithm.postprocess=tests.driver.test_earlier_policies:halved"
    found = divergences(tmp_path / "b", "run.steps=2", others, after)
    assert found[0] > 1e-9  # the same initial weights, compared with trained ones
    assert len(SEEN) == 2 and all("ref_logprobs" in samples.columns for samples in SEEN)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("sampled_by", "setting"), [("old", "rollout.source=one-step-off"), ("rollout", "weights.every=2")]
)
def test_logprobs_of_the_sampling_weights_equal_the_engines(tmp_path: Path, sampled_by: str, setting: str) -> None:
    given = [*KL[1:], "algorithm.old_logprobs=recompute", "run.steps=4", "checkpoint.every=4", setting]
    differences = {}
    for weights in ("current", sampled_by):
        directory = tmp_path / weights
        directory.mkdir()
        execute_here(small(directory, *given, f"algorithm.old_weights={weights}"))
        rows = [line["rollout/logprob_diff"] for line in metrics(directory / "run") if "rollout/logprob_diff" in line]
        differences[weights] = rows
    # One step off, the first batch is of the initial weights, and each other one of those before the last update; with
    # an update every other step, so is every second batch.
    assert [value > 1e-4 for value in differences["current"]] == (
        [False, True, True, True] if sampled_by == "old" else [False, True, False, True]
    )
    assert max(differences[sampled_by]) < 1e-5


@pytest.mark.processes
def test_a_reference_that_is_a_role_gives_the_numbers_of_one_that_is_a_snapshot(tmp_path: Path) -> None:
    """Here both are the plain backend's; of another model, or on other devices, only the former can be."""
    found = {}
    for name, own in {"snapshot": [], "role": ["roles.reference.ranks=1"]}.items():
        (tmp_path / name).mkdir()
        execute_here(small(tmp_path / name, *KL, "run.steps=3", *own))
        found[name] = numbers(tmp_path / name / "run")
    assert found["role"] == found["snapshot"]
    assert found["role"][2]["train/kl_reference"] > 1e-4


SEEN: list[SampleBatch] = []


def halved(samples: SampleBatch) -> SampleBatch:
    """A user's `algorithm.postprocess`."""
    SEEN.append(samples)
    return samples.with_columns(advantages=samples.columns["advantages"] * np.float32(0.5))


def test_a_resumed_run_is_told_that_its_checkpoint_has_no_old_weights() -> None:
    nobody: Any = None  # no reference is asked for, so that no rank is
    policies = EarlierPolicies(
        group=nobody, tags={"old"}, settings=AlgorithmConfig(), progress=progress(ears := Ears(), step=4)
    )
    policies.begin(resumed=False)
    assert told(ears) == []
    policies.begin(resumed=True)
    assert told(ears) == ["until the second update, the old weights are those of the checkpoint, which has no others"]
