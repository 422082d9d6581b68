"""The table of model types tells what becomes of each, with numbers, and no type can end it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from corerl_testing.matrix import TOLERANCE, Row, Status, examine, model_types, rows

# What the documentation's page of models says of each type.
PAGE = Path(__file__).parents[3] / "benchmarks/results/models.json"
PUBLISHED = {row["model_type"]: (row["status"], row["reason"]) for row in json.loads(PAGE.read_text())}
# One type for each kind; others are examined by `corerl models --check`.
ACCEPTED = {
    "qwen2_moe": (Status.PACKED, ""),
    "glm4_moe": (Status.PACKED, ""),
    "gpt_oss": (Status.PACKED, ""),
    "mamba": (Status.WHOLE, "MambaMixer is called without the bounds of sequences"),
    "bloom": (Status.WHOLE, "BloomForCausalLM computes attention with its own code (BloomAttention), which treats"),
}
NOT = {
    "xlnet": (Status.REFUSED, "XLNetLMHeadModel lets every token see later ones; use another model"),
    "musicgen": (Status.UNBUILT, "ValueError: Multiple valid text configs were found"),
}


@pytest.mark.parametrize("model_type", ACCEPTED)
def test_an_accepted_type_is_compared_with_transformers(model_type: str) -> None:
    row, (status, reason) = examine(model_type, check=True), ACCEPTED[model_type]
    assert row.status is status and row.reason.startswith(reason) and bool(row.reason) == bool(reason)
    assert row.logprobs is not None and row.gradients is not None
    assert 0 < max(row.logprobs, row.gradients) <= TOLERANCE
    assert PUBLISHED[model_type] == (status, row.reason)


@pytest.mark.parametrize("model_type", NOT)
def test_another_type_has_its_reason(model_type: str) -> None:
    row, (status, reason) = examine(model_type), NOT[model_type]
    assert row.status is status and row.reason.startswith(reason)
    assert (row.logprobs, row.gradients) == (None, None)
    assert PUBLISHED[model_type] == (status, row.reason)


def test_a_type_with_non_causal_attention_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corerl.models.parts.OTHERS", {})  # where core refuses it by name
    row = examine("cpmant", check=True)
    assert row.status is Status.WRONG and row.reason.endswith("though whole")
    assert row.logprobs is not None and row.logprobs > 10 * TOLERANCE


def faulty(model_type: str, *, check: bool) -> Row:
    if model_type == "dies":
        os._exit(3)
    if model_type == "hangs":
        time.sleep(60)
    if model_type == "raises":
        raise KeyError("layer")
    return Row(model_type=model_type, status=Status.PACKED, logprobs=1e-7 if check else None)


@pytest.mark.processes
def test_a_type_that_dies_hangs_or_raises_is_a_row(capfd: Any) -> None:
    found = list(rows(["good", "dies", "hangs", "raises", "good"], check=True, examine_row=faulty, limit=1.0))
    good = Row(model_type="good", status=Status.PACKED, logprobs=1e-7)
    assert found == [
        good,
        Row(model_type="dies", status=Status.UNBUILT, reason="ended its process with status 3"),
        Row(model_type="hangs", status=Status.UNBUILT, reason="did not end within 1 s"),
        Row(model_type="raises", status=Status.WRONG, reason="it raised KeyError: 'layer'"),
        good,
    ]
    assert capfd.readouterr() == ("", "")


def test_every_type_that_transformers_lists_is_asked_for() -> None:
    assert {"qwen3", "gemma2", "bert", "falcon_h1", "gpt2"} < set(model_types())
