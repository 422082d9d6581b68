"""What clients send for a loss, as rows; what is wrong with it, as a sentence. Gradients are in test_training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve

from corerl.algorithms import LossInputs
from corerl.backend import resolve_loss
from corerl_tinker.losses import Rows, rows_of
from corerl_tinker.requests import Datum, Pass, Refused
from plugins.tinker.tests.served import datum

POLICY: Mapping[str, Sequence[float]] = {"logprobs": [0.0, -1.0, -2.0], "advantages": [0.0, 1.5, -1.0]}
ROW = datum([5, 6, 7, 8], **POLICY)


def rows(loss: str, *datums: Datum, **config: float | str) -> Rows:
    return rows_of(Pass(loss=loss, datums=datums, config=config), vocabulary=32, longest=16)


def test_targets_are_the_next_tokens_of_a_row() -> None:
    found = rows("importance_sampling", ROW, datum([1, 2], logprobs=[-1.0], advantages=[2.0]))
    assert found.samples.tokens.tolist() == [5, 6, 7, 8, 1, 2] and found.samples.offsets.tolist() == [0, 4, 6]
    columns = {name: column.tolist() for name, column in found.samples.columns.items()}
    assert columns == {
        "loss_mask": [False, False, True, True, False, True],
        "old_logprobs": [0.0, 0.0, -1.0, -2.0, 0.0, -1.0],
        "advantages": [0.0, 0.0, 1.5, -1.0, 0.0, 2.0],
    }
    outputs = found.done(np.arange(6, dtype=np.float32))[0]
    assert [row.tolist() for row in outputs] == [[1.0, 2.0, 3.0], [5.0]]


def test_targets_that_are_not_the_next_token_are_a_column() -> None:
    """As recipes write 0 at prompts."""
    inputs = {**ROW.inputs, "target_tokens": np.array([0, 9, 8])}
    found = rows("importance_sampling", evolve(ROW, inputs=inputs))
    assert found.samples.tokens.tolist() == [5, 6, 7, 8]
    assert found.samples.columns["targets"].tolist() == [0, 0, 9, 8]
    (row,) = found.done(np.arange(4, dtype=np.float32))[0]
    assert row.tolist() == [1.0, 2.0, 3.0]


def test_targets_that_do_not_count_may_be_no_tokens() -> None:
    last = {**ROW.inputs, "target_tokens": np.array([6, 7, -100]), "advantages": np.array([1.0, 0.0, 0.0])}
    found = rows("importance_sampling", evolve(ROW, inputs=last))
    assert found.samples.tokens.tolist() == [5, 6, 7, 7] and "targets" not in found.samples.columns
    (row,) = found.done(np.arange(4, dtype=np.float32))[0]
    assert row[:2].tolist() == [1.0, 2.0] and np.isnan(row[2])


def test_datums_with_other_numbers_of_targets_go_through_one_pass() -> None:
    several = {"target_tokens": np.array([[6, 9, 9], [3, 1, 2]]), "weights": np.array([[0, 0, 0], [0.5, 0, -0.25]])}
    each = {"target_tokens": np.array([[4], [8]]), "weights": np.ones((2, 1))}
    given = [Datum(tokens=np.array(tokens), inputs=of) for tokens, of in (([5, 6], several), ([7, 4], each))]
    found = rows("cross_entropy", *given, datum([1, 2], weights=[1.0]))
    assert found.samples.tokens.tolist() == [5, 6, 3, 7, 4, 8, 1, 2]
    columns = {name: column.tolist() for name, column in found.samples.columns.items()}
    nothing = [0, 0, 0]
    assert columns == {
        "targets": [nothing, [6, 9, 9], [3, 1, 2], nothing, [4, 0, 0], [8, 0, 0], nothing, [2, 0, 0]],
        "logprob_weights": [nothing, nothing, [-0.5, 0, 0.25], nothing, [-1, 0, 0], [-1, 0, 0], nothing, [-1, 0, 0]],
        "loss_mask": [False, False, True, False, True, True, False, True],
    }
    logprobs = -np.arange(24, dtype=np.float32).reshape(8, 3)
    outputs = [row.tolist() for row in found.done(logprobs)[0]]
    assert outputs == [[[-3, -4, -5], [-6, -7, -8]], [[-12], [-15]], [-21]]
    assert found.done(logprobs)[1] == pytest.approx(0.5 * 6 - 0.25 * 8 + 12 + 15 + 21)


def test_one_target_of_each_token_needs_no_column() -> None:
    inputs = {"target_tokens": np.array([[6], [7]]), "weights": np.ones((2, 1))}
    found = rows("cross_entropy", Datum(tokens=np.array([5, 6]), inputs=inputs))
    columns = {name: column.tolist() for name, column in found.samples.columns.items()}
    assert columns == {"logprob_weights": [0.0, -1.0, -1.0], "loss_mask": [False, True, True]}
    assert found.done(np.arange(3, dtype=np.float32))[0][0].tolist() == [[1.0], [2.0]]


def test_thresholds_are_those_of_the_api_unless_given() -> None:
    wanted = {"ppo": (0.8, 1.2), "cispo": (0.0, 4.0), "gspo": (0.9997, 1.0004)}
    for loss, (low, high) in wanted.items():
        mask = {"sequence_ratio_mask": [0.0, 1.0, 1.0]} if loss == "gspo" else {}
        given = datum([5, 6, 7, 8], **POLICY, **mask)
        found = rows(loss, given).loss.params
        assert found == pytest.approx({"clip_low_threshold": low, "clip_high_threshold": high})
        assert rows(loss, given, clip_high_threshold=4.5).loss.params["clip_high_threshold"] == 4.5
    ratios = np.array([0.0, 0.0, 0.0, 0.0], np.float32)  # e and e^2
    value = rows("ppo", ROW, clip_high_threshold=1.1).done(ratios)[1]
    assert value == pytest.approx(-(1.1 * 1.5) + np.exp(2.0), rel=1e-5)


def test_a_token_far_from_its_policy_keeps_sums_finite() -> None:
    found = rows("importance_sampling", datum([5, 6], logprobs=[-200.0], advantages=[-1.0]))
    logprobs = torch.tensor([0.0, -1.0], requires_grad=True)
    columns = {name: torch.tensor(column) for name, column in found.samples.columns.items()}
    inputs = LossInputs(logprobs=logprobs, columns={**columns, "weights": columns["loss_mask"].float()})
    loss = resolve_loss(found.loss)(inputs).loss
    loss.backward()
    assert torch.isfinite(loss) and loss.item() == pytest.approx(np.exp(20.0))
    assert logprobs.grad is not None and torch.isfinite(logprobs.grad).all()


INPUTS = {"target_tokens": np.array([6, 7, 8]), "logprobs": np.zeros(3), "advantages": np.ones(3)}


@pytest.mark.parametrize(
    ("loss", "inputs", "config", "sentence"),
    [
        ("reinforce", {}, {}, "unknown loss_fn='reinforce'; there are cross_entropy, .*, dro"),
        ("ppo", {}, {"clip": 0.2}, "ppo has no 'clip'; its settings: clip_low_threshold, clip_high_threshold"),
        ("importance_sampling", {}, {"beta": 0.1}, "has no 'beta'; its settings: none"),
        ("dro", {}, {}, "dro needs 'beta', a finite number; got None"),
        ("ppo", {}, {"clip_low_threshold": "low"}, "needs 'clip_low_threshold', a finite number; got 'low'"),
        ("ppo", {}, {"clip_low_threshold": 2.0}, "clip_low_threshold is above clip_high_threshold"),
        ("cross_entropy", {}, {}, "weights: cross_entropy takes target_tokens, weights; got advantages, logprobs, "),
        ("ppo", {"mask": np.ones(3)}, {}, "mask: ppo takes advantages, logprobs, target_tokens; got advantages, "),
        ("ppo", {"weights": np.array([1, 1, 2])}, {}, "ppo has no weights other than 1; multiply the advantages"),
        ("ppo", {"advantages": np.array([1, np.nan, 1])}, {}, "advantages has values that are not finite"),
        ("ppo", {"target_tokens": np.array([6, 7, 32])}, {}, r"datum 0: target \[2\] is 32, where ids are from 0 to"),
        ("ppo", {name: np.ones((3, 2)) for name in INPUTS}, {}, r"target_tokens has the shape \[3, 2\], wanted \[3\]$"),
        ("ppo", {"advantages": np.ones((3, 1))}, {}, r"datum 0: advantages has the shape \[3, 1\], wanted \[3\]$"),
        ("ppo", {name: np.ones(2) for name in INPUTS}, {}, r"target_tokens has the shape \[2\], wanted \[3\]$"),
        ("gspo", {"sequence_ratio_mask": np.zeros(3)}, {}, "sequence_ratio_mask is 0 everywhere"),
    ],
)
def test_what_would_be_another_loss_is_refused(
    loss: str, inputs: Mapping[str, Any], config: Mapping[str, Any], sentence: str
) -> None:
    with pytest.raises(Refused, match=sentence):
        rows(loss, Datum(tokens=np.array([5, 6, 7]), inputs={**INPUTS, **inputs}), **config)


def test_wrong_tensors_of_several_targets_are_refused() -> None:
    targets, weights = np.array([[1, 2], [3, -1]]), np.array([[1.0, 1.0], [1.0, 0.5]])
    for each, sentence in (
        (weights, r"target \[1, 1\] is -1, where ids"),
        (weights[:, 0], r"weights has the shape \[2\], wanted \[2\], or \[2, K\] for K targets of each token"),
        (weights[:, :0], r"weights has the shape \[2, 0\], wanted"),
        (weights[:, :, None], r"weights has the shape \[2, 2, 1\], wanted"),
    ):
        with pytest.raises(Refused, match=sentence):
            rows("cross_entropy", Datum(tokens=np.array([5, 6]), inputs={"target_tokens": targets, "weights": each}))


@pytest.mark.parametrize(
    ("tokens", "sentence"),
    [
        ([32], "datum 1: token 32 is not in the vocabulary of 32 tokens"),
        ([-1], "datum 1: token -1 is not in the vocabulary"),
        ([], r"datum 1: target_tokens has the shape \[0\], wanted"),
        ([1] * 16, "datum 1: 16 tokens and a last target are more than the context length 16"),
    ],
)
def test_a_row_that_no_model_could_read_is_refused(tokens: list[int], sentence: str) -> None:
    inputs = {"target_tokens": np.array(tokens[1:] + tokens[:1], np.int64), "weights": np.ones(len(tokens))}
    good = datum([5, 6], weights=[1.0])
    with pytest.raises(Refused, match=sentence):
        rows("cross_entropy", good, Datum(tokens=np.array(tokens, np.int64), inputs=inputs))


def test_weights_of_one_change_nothing() -> None:
    """Some clients mark what is sampled besides giving it advantages."""
    marked = evolve(ROW, inputs={**ROW.inputs, "weights": np.array([0.0, 1.0, 1.0])})
    plain, found = rows("ppo", ROW).samples.columns, rows("ppo", marked).samples.columns
    assert {name: column.tolist() for name, column in found.items()} == {
        name: column.tolist() for name, column in plain.items()
    }
