"""Training steps: compared with the plain backend and with themselves, on batches of every shape."""

from __future__ import annotations

import math

import numpy as np
import pytest
from attrs import evolve

from corerl.plugin.capabilities import Capability
from corerl.types import Output
from corerl_testing.compare import (
    assert_follows,
    assert_same_metrics,
    different,
    grad_norm_of,
    in_order,
    loss_of,
    mean_apart,
    metrics_of,
    same_bits,
    weights_apart,
    whole,
)
from corerl_testing.harness import Setup, make_samples, samples_at
from corerl_testing.marks import check
from corerl_testing.models import tiny_fields
from corerl_testing.scenarios import training
from corerl_testing.subject import CASES, PACKINGS, PLAIN, STEPS, WHOLE, Subject, steps_of
from corerl_testing.tolerances import BFLOAT16_GRAD_NORM, BFLOAT16_LOSS, GRAD_NORM, LOSS


@check(
    "C41",
    level=1,
    builds_on=["C15", "C16", "C17", "C27", "C51"],
    variants={"kind": "qwen3-tied", "packing": "packed"},
)
@pytest.mark.parametrize(("kind", "packing"), CASES)
def test_training_follows_the_plain_backend(subject: Subject, kind: str, packing: str) -> None:
    found = subject.trained(kind, packing)
    plain = subject.runs.trained(PLAIN, 1, kind, WHOLE, steps_of(packing))
    assert_follows(found, plain)
    assert_same_metrics(found, plain)
    assert found.adam_step == steps_of(packing)


@check("C15", level=1, builds_on=["C12"])
def test_many_micro_batches_train_like_one(subject: Subject) -> None:
    one, many = (
        subject.run(training.train_on, subject.setup("qwen3", packing), make_samples(3, samples=12))
        for packing in (WHOLE, (1, 1))
    )
    assert loss_of(many) == pytest.approx(loss_of(one), rel=LOSS.relative, abs=LOSS.absolute)
    assert grad_norm_of(many) == pytest.approx(grad_norm_of(one), rel=GRAD_NORM.relative)
    assert sum(result.tokens for result in many) == sum(result.tokens for result in one)


@check("C29", level=1, builds_on=["C41"])
@pytest.mark.parametrize("kind", ["qwen3-tied", "qwen3-moe"])
def test_ranks_without_samples_keep_in_step(subject: Subject, kind: str) -> None:
    samples = make_samples(5, samples=1)
    found = subject.run(training.train_on, subject.setup(kind), samples)
    wanted = subject.runs.of_plain(training.train_on, kind, samples)
    assert loss_of(found) == pytest.approx(loss_of(wanted), rel=LOSS.relative, abs=LOSS.absolute)
    assert grad_norm_of(found) == pytest.approx(grad_norm_of(wanted), rel=GRAD_NORM.relative)
    assert [result.applied for result in found] == [True] * subject.world_size


@check("C50", level=1, builds_on=["C14"], variants={})
def test_a_step_that_is_not_finite_is_skipped_on_all_ranks_and_the_next_one_trains(subject: Subject) -> None:
    setup = subject.setup("qwen3")
    ranks = subject.run(training.skip_a_step, setup)
    assert [rank.result.applied for rank in ranks] == [False] * subject.world_size
    assert not any(math.isfinite(rank.result.grad_norm) for rank in ranks)
    assert [(rank.steps_before, rank.steps_after) for rank in ranks] == [(2, 2)] * subject.world_size
    assert different(whole([rank.after for rank in ranks]), whole([rank.before for rank in ranks])) == []
    undisturbed = subject.undisturbed(setup, 3)
    assert loss_of([rank.then for rank in ranks]) == undisturbed.losses[2]
    norm = grad_norm_of([rank.then for rank in ranks])
    assert not math.isnan(norm), "the step after a skipped one has norm nan: gradients were not cleared"
    assert norm == undisturbed.grad_norms[2]
    assert different(whole([rank.end for rank in ranks]), undisturbed.state) == []


@check("C16", level=1, builds_on=["C12"])
def test_batches_are_left_as_they_were_given(subject: Subject) -> None:
    changed = subject.run(training.changed_in_batches, subject.setup("qwen3", PACKINGS["padded"]))
    assert changed == [[]] * subject.world_size


@check("C55", level=1, needs=[Capability.BFLOAT16], builds_on=["C41"])
def test_bfloat16_stays_near_float32(subject: Subject) -> None:
    setup = subject.setup("qwen3")
    half = evolve(setup, train=evolve(setup.train, precision="bfloat16"))
    found, wanted = subject.train(half, range(STEPS)), subject.trained("qwen3")
    assert mean_apart(found.losses, wanted.losses) < BFLOAT16_LOSS
    assert mean_apart(found.grad_norms, wanted.grad_norms) < BFLOAT16_GRAD_NORM
    assert weights_apart(found.state["master"], wanted.state["master"]) > 0  # the precision matters


@check("C55", level=1, needs=[Capability.BFLOAT16], builds_on=["C41"])
def test_masters_of_a_model_in_bfloat16_take_steps_that_are_lost_in_it(subject: Subject) -> None:
    setup = subject.setup("qwen3")
    half = evolve(setup, train=evolve(setup.train, precision="bfloat16"))
    ranks, wider = (subject.run(training.train_slowly, each, 5, 1e-6) for each in (half, setup))
    assert loss_of([rank.result for rank in ranks]) != loss_of([rank.result for rank in wider])  # the precision matters
    before, after = (whole([getattr(rank, when) for rank in ranks])["master"] for when in ("before", "after"))
    moved = sum(int((after[name] != was).sum()) for name, was in before.items())
    assert moved > 0.9 * sum(was.size for was in before.values())


@check("C61", level=1, builds_on=["C41"])
@pytest.mark.parametrize("clip_norm", [100.0, 0.0], ids=["never reached", "none"])
def test_a_gradient_below_the_norm_is_not_scaled(subject: Subject, clip_norm: float) -> None:
    def unclipped(setup: Setup) -> Setup:
        return evolve(setup, train=evolve(setup.train, optimizer=evolve(setup.train.optimizer, clip_norm=clip_norm)))

    found = subject.train(unclipped(subject.setup("qwen3")), range(3))
    assert_follows(found, subject.runs.trained_as(1, unclipped(subject.runs.setup(PLAIN, "qwen3")), 3))


@check("C61", level=1, builds_on=["C41"])
def test_a_gradient_of_nothing_leaves_a_step_of_decay_alone(subject: Subject) -> None:
    ranks = subject.run(training.train_on_nothing, subject.setup("qwen3"))
    assert [(rank.result.applied, rank.result.grad_norm) for rank in ranks] == [(True, 0.0)] * subject.world_size
    wanted = subject.runs.of_plain(training.train_on_nothing, "qwen3")
    found, plain = (whole([rank.after for rank in each])["master"] for each in (ranks, wanted))
    for name, values in plain.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-6, atol=1e-7)


@check("C63", level=1, needs=[Capability.WHOLE], builds_on=["C41", "C61"])
def test_training_on_padded_rows_follows_the_plain_backend(subject: Subject) -> None:
    fields = {**tiny_fields("llama"), "model_type": "mistral", "sliding_window": 8}
    setup = Setup(backend=subject.backend, model="", fields=fields).packed_by(80)  # a few rows at once
    found = subject.train(subject.of(evolve(setup, train=evolve(setup.train, layout="whole"))), range(3))
    plain = subject.runs.trained_as(1, evolve(setup, backend=PLAIN), 3)
    assert_follows(found, plain)
    assert_same_metrics(found, plain)


@check("C12", level=1, builds_on=["C11"])
def test_a_step_moves_every_weight_and_tells_finite_metrics_of_the_same_names(subject: Subject) -> None:
    found = subject.trained("qwen3-tied")
    assert found.adam_step == STEPS
    unmoved = [name for name, was in found.at_start["master"].items() if same_bits(was, found.state["master"][name])]
    assert unmoved == []
    assert all(math.isfinite(norm) and norm > 0 for norm in found.grad_norms)
    metrics = [metrics_of(results) for results in found.results]
    names = {frozenset(each) for each in metrics}
    assert len(names) == 1 and "loss" in min(names)
    assert [
        name for results in found.results for name, at in metrics_of(results).items() if not math.isfinite(at)
    ] == []
    assert all(
        sum(result.tokens for result in results) >= len(samples_at(step).tokens)
        for step, results in enumerate(found.results)
    )
    assert len(set(found.losses)) == STEPS


@check("C13", level=1, builds_on=["C12", "C51"], ranks=[1])
def test_twenty_steps_on_one_batch_learn_it_by_heart_with_a_loss_of_the_users(subject: Subject) -> None:
    samples = make_samples(21, samples=4)
    ranks = subject.run(training.overfit, subject.setup("qwen3", WHOLE), samples, 20, 2e-2)
    before, after = (
        in_order([getattr(rank, when) for rank in ranks], samples, Output.LOGPROBS) for when in ("before", "after")
    )
    chosen = samples.columns["loss_mask"]
    losses = [sum(rank.losses[step] for rank in ranks) for step in range(20)]
    assert losses[0] == pytest.approx(-before[chosen].mean(), rel=1e-4)
    assert -after[chosen].mean() < 0.5 * losses[0]
    assert losses[-1] < losses[10] < losses[0]


@check("C14", level=1, builds_on=["C12"])
def test_the_same_seed_gives_the_same_run_to_the_last_bit(subject: Subject) -> None:
    first, second = subject.trained("qwen3-tied"), subject.train(subject.setup("qwen3-tied"), range(STEPS))
    assert second.losses == first.losses
    assert second.grad_norms == first.grad_norms
    assert [metrics_of(each) for each in second.results] == [metrics_of(each) for each in first.results]
    assert different(second.state, first.state) == []


@check("C17", level=1, builds_on=["C12"])
def test_tokens_that_are_masked_or_padding_change_nothing(subject: Subject) -> None:
    setup, samples = subject.setup("qwen3", PACKINGS["padded"]), make_samples(31)
    wanted = subject.run(training.train_on, setup, samples)
    rng, mask = np.random.default_rng(0), samples.columns["loss_mask"]
    garbage = {
        name: np.where(mask, column, rng.normal(0.0, 3.0, len(mask))).astype(column.dtype)
        for name, column in samples.columns.items()
        if column.dtype == np.float32
    }
    for found in (
        subject.run(training.train_on, setup, samples.with_columns(**garbage)),
        subject.run(training.train_on_garbage, setup, samples),
    ):
        assert loss_of(found) == pytest.approx(loss_of(wanted), rel=LOSS.relative, abs=LOSS.absolute)
        assert grad_norm_of(found) == pytest.approx(grad_norm_of(wanted), rel=GRAD_NORM.relative)


@check("C26", level=2, builds_on=["C14", "C51"], ranks=[2])
@pytest.mark.parametrize("kind", ["qwen3-tied", "qwen3-moe"])
def test_two_ranks_train_as_one_does_on_the_same_batch(subject: Subject, kind: str) -> None:
    subject.require_ranks(1)
    alone = subject.runs.trained_as(1, subject.setup(kind))
    assert_follows(subject.trained(kind), alone)


@check("C27", level=2, builds_on=["C26"], ranks=[2])
def test_the_metrics_of_two_ranks_together_are_those_of_one(subject: Subject) -> None:
    subject.require_ranks(1)
    found = subject.trained("qwen3-tied")
    for results in found.results:
        grad_norm_of(results)  # equal on all ranks
    assert_same_metrics(found, subject.runs.trained_as(1, subject.setup("qwen3-tied")))


@check("C56", level=1, needs=[Capability.FLOAT16], builds_on=["C41"])
def test_float16_stays_near_float32(subject: Subject) -> None:
    setup = subject.setup("qwen3")
    half = evolve(setup, train=evolve(setup.train, precision="float16"))
    found, wanted = subject.train(half, range(STEPS)), subject.trained("qwen3")
    assert mean_apart(found.losses, wanted.losses) < BFLOAT16_LOSS
    assert mean_apart(found.grad_norms, wanted.grad_norms) < BFLOAT16_GRAD_NORM
    assert weights_apart(found.state["master"], wanted.state["master"]) > 0  # the precision matters


@check("C57", level=1, needs=[Capability.RECOMPUTE], builds_on=["C41"])
def test_recomputing_activations_keeps_few_of_them_and_changes_no_number(subject: Subject) -> None:
    setup = subject.setup("qwen3")
    less = evolve(setup, train=evolve(setup.train, recompute="full"))
    wanted, found = (subject.run(training.saved_for_backward, each, 0) for each in (setup, less))
    assert loss_of([result for result, _ in found]) == pytest.approx(
        loss_of([result for result, _ in wanted]), rel=1e-6
    )
    norms = [grad_norm_of([result for result, _ in each]) for each in (found, wanted)]
    assert norms[0] == pytest.approx(norms[1], rel=GRAD_NORM.relative)
    for (_, few), (_, many) in zip(found, wanted, strict=True):
        assert 0 < 2 * few < many
