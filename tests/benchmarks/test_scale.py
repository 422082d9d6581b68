from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import ray

from benchmarks import scale
from benchmarks.packing import arrays_of
from corerl.cluster.runtime import ray_session
from corerl.types import SampleBatch

pytestmark = pytest.mark.processes


def nbytes(samples: SampleBatch) -> int:
    return sum(array.nbytes for array in arrays_of(samples))


def test_all_nodes_together_pull_the_batch_once_and_the_file_has_every_row(shared_ray: None) -> None:
    batch = scale.make_batch(100_000)
    samples = batch.samples
    assert (len(samples), samples.columns.keys()) == (
        24,
        {"loss_mask", "rollout_logprobs", "versions", "old_logprobs", "advantages"},
    )
    with ray_session(address="", cpus=1):
        reader: Any = ray.remote(scale.Reader).remote()
        alone, apart, together = (
            scale.measure(batch, reader, ranks=ranks, dp_size=dp_size) for ranks, dp_size in ((8, 8), (16, 2), (16, 16))
        )
    passed = nbytes(samples) - sum(column.nbytes for name, column in samples.columns.items() if name != "loss_mask")
    # One node: a copy without most columns for the forward pass, and a whole one for the steps.
    assert alone.put == alone.pulled == passed + nbytes(samples)
    assert {row.whole for row in (alone, apart, together)} == {2 * nbytes(samples)}
    # Two nodes: each sample goes to one of them, but for those that fill up micro-batches, and what begins a piece.
    for row in (apart, together):
        assert row.put > alone.put and row.pulled < row.put
        assert row.put - alone.put < samples.lengths.max() * 8 * 33  # a few fillers
    assert abs(apart.pulled / apart.put - 0.5) < 0.2
    rows = scale.table_of_rows([alone, apart, together]).splitlines()
    assert [row.split(" | ")[:3] for row in rows[2:]] == [
        ["| 0.1 M", "8", "8"],
        ["| 0.1 M", "16", "2"],
        ["| 0.1 M", "16", "16"],
    ]
    seconds = scale.medians([batch.seconds, batch.seconds, dict.fromkeys(batch.seconds, -1.0)])
    assert seconds == batch.seconds
    batches = {len(samples.tokens): {**seconds, "peak": 1.0}}
    found = scale.document(batches, [alone, apart, together], command="a command", load=0.5)
    assert all(line in found for line in rows) and "| command | `a command` |" in found


def test_ranks_of_a_dp_rank_are_neighbors_and_one_of_them_outputs() -> None:
    layouts = scale.layouts_of(16, 2)
    assert [layout.dp_rank for layout in layouts] == [0] * 8 + [1] * 8
    assert np.flatnonzero([layout.outputs for layout in layouts]).tolist() == [0, 8]
