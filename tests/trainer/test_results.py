"""What ranks return, value by value, as the columns of a batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attrs import evolve

from corerl.errors import ContractError
from corerl.trainer.results import assemble_columns
from corerl.types import FloatArray, ForwardResult, Output, SampleBatch
from tests.trainer.outputs import LOGPROBS, batch_of, result_of


@pytest.mark.parametrize(
    ("chosen", "once", "said"),
    [
        ([(0, 1)], None, "forward returned row 2 0 times, expected exactly once"),
        ([(0, 1), (2, 1)], None, "forward returned row 1 2 times, expected exactly once"),
        ([(0, 0, 1, 2)], None, "forward returned row 0 2 times, expected exactly once"),
        ([(0, 1), (2,)], [0, 2], "forward returned row 1 1 times, expected never, as it is not in the plan"),
    ],
)
def test_a_missing_repeated_or_foreign_sample_is_an_error(
    chosen: list[tuple[int, ...]], once: list[int] | None, said: str
) -> None:
    batch = batch_of(3, 1, 4)
    planned = None if once is None else np.array(once)
    with pytest.raises(ContractError) as caught:
        assemble_columns([result_of(batch, *samples) for samples in chosen], LOGPROBS, batch, planned, role="actor")
    assert caught.value.message == f"actor: {said}"


EXPERTS = Output.ROUTED_EXPERTS


def experts_of(batch: SampleBatch, *samples: int, dtype: type = np.int16, layers: int = 3) -> ForwardResult:
    """In layer l, of token t: 10 t + l and -t."""
    result = result_of(batch, *samples)
    tokens = result.outputs[Output.LOGPROBS][:, None]
    experts = np.stack([10 * tokens + np.arange(layers), -tokens.repeat(layers, axis=1)], axis=2)
    return evolve(result, outputs={EXPERTS: experts.astype(dtype)})


def test_experts_of_all_layers_are_scattered_as_integers() -> None:
    batch = batch_of(3, 1, 4, 0, 2)
    results = [experts_of(batch, 4, 0), result_of(batch), experts_of(batch, 3, 2, 1)]
    column = assemble_columns(results, (EXPERTS,), batch, role="actor")[EXPERTS]
    assert column.dtype == np.int16
    assert column.tolist() == [[[10 * t, -t], [10 * t + 1, -t], [10 * t + 2, -t]] for t in batch.tokens.tolist()]


@pytest.mark.parametrize(
    ("other", "said"), [({"dtype": np.int32}, "int32 [3, 2] per token"), ({"layers": 2}, "int16 [2, 2] per token")]
)
def test_disagreement_on_an_outputs_shape_is_an_error(other: dict[str, Any], said: str) -> None:
    batch = batch_of(3, 1)
    with pytest.raises(ContractError) as caught:
        assemble_columns([experts_of(batch, 0), experts_of(batch, 1, **other)], (EXPERTS,), batch, role="actor")
    wanted = "actor: forward returned routed_experts as int16 [3, 2] per token on one rank"
    assert caught.value.message == f"{wanted} and as {said} on another"


def test_a_sample_of_another_length_is_an_error() -> None:
    result = evolve(result_of(batch_of(3, 2), 0, 1), offsets=np.array([0, 2, 5]))
    with pytest.raises(ContractError, match=r"^actor: forward returned rows whose lengths differ from the batch$"):
        assemble_columns([result], LOGPROBS, batch_of(3, 2), role="actor")


@pytest.mark.parametrize(
    ("outputs", "said"),
    [
        ({}, "forward returned no logprobs, expected 5: one for each token"),
        ({Output.LOGPROBS: np.ones(1, np.float32)}, "forward returned 1 logprobs, expected 5: one for each token"),
    ],
)
def test_a_missing_or_short_output_is_an_error(outputs: dict[Output, FloatArray], said: str) -> None:
    with pytest.raises(ContractError) as caught:
        assemble_columns(
            [evolve(result_of(batch_of(3, 2), 0, 1), outputs=outputs)], LOGPROBS, batch_of(3, 2), role="actor"
        )
    assert caught.value.message == f"actor: {said}"


def test_a_sample_that_was_never_given_is_an_error() -> None:
    result = evolve(result_of(batch_of(3, 2), 0, 1), rows=np.array([0, 7]))
    with pytest.raises(ContractError, match=r"^actor: forward returned rows outside its batch of 2$"):
        assemble_columns([result], LOGPROBS, batch_of(3, 2), role="actor")
