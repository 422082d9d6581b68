"""The reference policy in whole runs, which may be another model or follow the actor."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from corerl.types import SampleBatch
from tests.end_to_end.command import metrics, numbers
from tests.in_process import execute_here, small

KL = ["algorithm.kl_coef=0.1", "train.optimizer.lr=0.01", 'extensions=[{name="jsonl"}]', "algorithm.on_mismatch=off"]


def divergences(directory: Path, *overrides: str) -> list[float]:
    """KL to the reference policy, step by step; k2 is 0 only where both give the same log-probs."""
    execute_here(small(directory, *KL, "algorithm.kl_estimator=k2", *overrides))
    return [line["train/kl_reference"] for line in metrics(directory / "run") if "train/kl_reference" in line]


@pytest.mark.processes
def test_a_renewed_reference_is_the_actor_of_then(tmp_path: Path) -> None:
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
    monkeypatch.setattr("tests.driver.test_reference_policy.SEEN", [])
    others = f"algorithm.reference={tmp_path}/a/run/model"
    after = "algorithm.postprocess=tests.driver.test_reference_policy:halved"
    found = divergences(tmp_path / "b", "run.steps=2", others, after)
    assert found[0] > 1e-9  # the same initial weights, compared with trained ones
    assert len(SEEN) == 2 and all("ref_logprobs" in samples.columns for samples in SEEN)


@pytest.mark.processes
def test_a_reference_role_gives_the_numbers_of_a_snapshot(tmp_path: Path) -> None:
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
