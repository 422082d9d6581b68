"""Rotary embeddings that a config scales: the log-probs of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from transformers import AutoConfig, AutoModelForCausalLM

from corerl.types import Output, SampleBatch
from corerl_testing import LOGPROBS, Runs, in_order, tiny_fields, transformers_outputs
from corerl_testing.scenarios import training
from plugins.megatron.tests import ranks

LENGTH = 400
FACTORS = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, **FACTORS}


@pytest.mark.parametrize("rope", [LLAMA3, {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}])
def test_a_llamas_logprobs_are_those_of_transformers(runs: Runs, tmp_path: Path, rope: Mapping[str, Any]) -> None:
    samples = SampleBatch(
        tokens=np.random.default_rng(0).integers(3, 97, LENGTH),
        offsets=np.array([0, LENGTH]),
        columns={"loss_mask": np.ones(LENGTH, np.bool_)},
        row_columns={},
        temperature=1.0,
    )
    for name, parameters in (("scaled", rope), ("plain", {"rope_type": "default", "rope_theta": rope["rope_theta"]})):
        fields = {**tiny_fields("llama"), "initializer_range": 0.2, "rope_parameters": dict(parameters)}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields), dtype=torch.float32)
        model.save_pretrained(tmp_path / name)
    setup = evolve(runs.setup("megatron", "llama"), model=str(tmp_path / "scaled"))
    found = in_order(runs.rank_sets[1].run(training.forward_only, setup, samples), samples, Output.LOGPROBS)
    wanted, unscaled = (transformers_outputs(tmp_path / name, samples)[Output.LOGPROBS] for name in ("scaled", "plain"))
    np.testing.assert_allclose(found, wanted, rtol=LOGPROBS.relative, atol=LOGPROBS.absolute)
    assert np.abs(unscaled - wanted).max() > 100 * LOGPROBS.absolute


def test_tables_of_rotary_embeddings_are_not_kept_asleep(runs: Runs) -> None:
    """On a device each is as large as its longest sequence, and in no kind of memory."""
    kept, asleep = runs.rank_sets[1].run(ranks.rotary_tables, runs.setup("megatron", "llama"))[0]
    assert (kept > 0, asleep) == (True, 0)
