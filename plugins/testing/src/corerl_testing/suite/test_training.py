"""Training steps: compared with the plain backend and with themselves, on batches of every shape."""

from __future__ import annotations

import math

import numpy as np
import pytest
from attrs import evolve

from corerl.config.schema import Precision
from corerl.plugin import Capability
from corerl.types import AdamSettings, FloatArray, Output, SampleBatch
from corerl_testing.compare import (
    assert_follows,
    assert_near_float32,
    assert_same_metrics,
    grad_norm_of,
    in_order,
    loss_of,
    metrics_of,
    require_same_state,
    same_bits,
    together,
    whole,
)
from corerl_testing.harness import LONG, Setup, make_branches, make_samples, samples_at
from corerl_testing.marks import check
from corerl_testing.models import tiny_fields
from corerl_testing.require import require, require_equal, require_near
from corerl_testing.scenarios import training
from corerl_testing.subject import CASES, PACKINGS, PLAIN, STEPS, WHOLE, Subject
from corerl_testing.tolerances import BFLOAT16_PACKED, GRAD_NORM, LOSS, Tolerance

DECAYED = Tolerance(1e-6, 1e-7)  # one multiplication
RECOMPUTED = Tolerance(1e-6)
FROM_LOGPROBS = Tolerance(1e-4)


@check(
    "C41",
    level=1,
    builds_on=["C15", "C16", "C17", "C27", "C51"],
    variants={"kind": "qwen3-tied", "packing": "packed"},
)
@pytest.mark.parametrize(("kind", "packing"), CASES)
def test_training_follows_the_plain_backend(subject: Subject, kind: str, packing: str) -> None:
    steps = subject.steps_against_plain(packing)
    found = subject.undisturbed(subject.setup(kind, PACKINGS[packing]), steps)
    plain = subject.runs.trained(PLAIN, 1, kind, WHOLE, steps)
    assert_follows(found, plain)
    assert_same_metrics(found, plain)
    require_equal("Backend.adam_step at the end", found.adam_step, steps)


@check("C15", level=1, builds_on=["C14"])
def test_many_micro_batches_train_like_one(subject: Subject) -> None:
    assert_trains_alone_as_together(subject, make_samples(3, samples=12))


@check("C15", level=1, builds_on=["C14", "C51"])
def test_long_sequences_train_alone_as_packed_together(subject: Subject) -> None:
    assert_trains_alone_as_together(subject, make_samples(3, lengths=LONG))


def assert_trains_alone_as_together(subject: Subject, samples: SampleBatch) -> None:
    """A step on these samples in one micro-batch is one with each in a micro-batch of its own."""
    one, many = (
        subject.run(training.train_on, subject.setup("qwen3", packing), samples) for packing in (WHOLE, (1, 1))
    )
    lengths = f"of samples of {samples.lengths.min()} to {samples.lengths.max()} tokens, each alone against all packed,"
    require_near(f"the loss {lengths}", loss_of(many), loss_of(one), LOSS)
    require_near(f"the gradient norm {lengths}", grad_norm_of(many), grad_norm_of(one), GRAD_NORM)
    counted = [sum(result.tokens for result in results) for results in (many, one)]
    require_equal(f"GradientResult.tokens {lengths}", *counted)


@check("C29", level=1, builds_on=["C41"])
@pytest.mark.parametrize("kind", ["qwen3-tied", "qwen3-moe"])
def test_ranks_without_samples_keep_in_step(subject: Subject, kind: str) -> None:
    samples = make_samples(5, samples=1)
    found = subject.run(training.train_on, subject.setup(kind), samples)
    wanted = subject.runs.of_plain(training.train_on, kind, samples)
    require_near("the loss of a step on one sample", loss_of(found), loss_of(wanted), LOSS)
    norms = (grad_norm_of(found), grad_norm_of(wanted))
    require_near("the gradient norm of a step on one sample, which one data-parallel rank has,", *norms, GRAD_NORM)
    applied = {f"rank {number}": result.applied for number, result in enumerate(found)}
    require_equal("StepResult.applied", applied, dict.fromkeys(applied, True))


@check("C50", level=1, builds_on=["C14"], variants={})
def test_a_nonfinite_step_is_skipped_on_all_ranks(subject: Subject) -> None:
    setup = subject.setup("qwen3")
    ranks = subject.run(training.skip_a_step, setup)
    for number, rank in enumerate(ranks):
        of = f"of a step with NaN advantages, on rank {number},"
        require_equal(f"StepResult.applied {of}", rank.result.applied, False)
        norm = rank.result.grad_norm
        require(
            not math.isfinite(norm),
            f"StepResult.grad_norm {of} is {norm}, expected nan or inf: it is the norm of all ranks' gradients",
        )
        counted = (rank.steps_before, rank.steps_after)
        require_equal("the list of Backend.adam_step before and after the skipped step", counted, (2, 2))
    states = (whole([getattr(rank, when) for rank in ranks]) for when in ("after", "before"))
    require_same_state("the state after the skipped step and before it", *states)
    undisturbed = subject.undisturbed(setup, 3)
    found = loss_of([rank.then for rank in ranks])
    require_equal("the loss of the step after a skipped one", found, undisturbed.losses[2])
    norm = grad_norm_of([rank.then for rank in ranks])
    require(not math.isnan(norm), "the step after a skipped one has norm nan: gradients were not cleared")
    require_equal("the gradient norm of the step after a skipped one", norm, undisturbed.grad_norms[2])
    end = whole([rank.end for rank in ranks])
    require_same_state("the state of the run with a skipped step and of one without", end, undisturbed.state)


@check("C16", level=1, builds_on=["C12"])
def test_batches_are_left_as_they_were_given(subject: Subject) -> None:
    changed = subject.run(training.changed_in_batches, subject.setup("qwen3", PACKINGS["padded"]))
    for number, names in enumerate(changed):
        require(
            not names, f"rank {number} has written into {', '.join(names)} of the batch it was given; copy it first"
        )


@check("C55", level=1, needs=[Capability.BFLOAT16], builds_on=["C41"])
def test_bfloat16_stays_near_float32(subject: Subject) -> None:
    setup = subject.setup("qwen3")
    half = evolve(setup, train=evolve(setup.train, precision="bfloat16"))
    found, wanted = subject.train(half, range(STEPS)), subject.trained("qwen3")
    assert_near_float32(found, wanted)


@check("C55", level=1, needs=[Capability.BFLOAT16], builds_on=["C41"])
def test_long_sequences_in_bfloat16_do_not_see_each_other(subject: Subject) -> None:
    samples = make_samples(7, lengths=LONG)

    def logprobs(packing: tuple[int, int], precision: Precision = "bfloat16") -> FloatArray:
        setup = subject.setup("qwen3", packing)
        chosen = evolve(setup, train=evolve(setup.train, precision=precision))
        return in_order(subject.run(training.forward_only, chosen, samples), samples, Output.LOGPROBS)

    packed = logprobs(WHOLE)
    require(bool((packed != logprobs(WHOLE, "float32")).any()), "log-probs in bfloat16 are those in float32")
    apart = float(np.abs(packed - logprobs((1, 1))).mean())
    require(
        apart < BFLOAT16_PACKED,
        f"log-probs in bfloat16 of samples of {min(LONG)} to {max(LONG)} tokens, each alone against all packed, differ "
        f"by {apart:.2g} on average, at most {BFLOAT16_PACKED:g} is allowed: samples see what they are packed with",
    )


@check("C55", level=1, needs=[Capability.BFLOAT16], builds_on=["C41"])
def test_masters_take_steps_that_bfloat16_would_lose(subject: Subject) -> None:
    setup = subject.setup("qwen3")
    half = evolve(setup, train=evolve(setup.train, precision="bfloat16"))
    ranks, wider = (subject.run(training.train_slowly, each, 5, 1e-6) for each in (half, setup))
    losses = [loss_of([rank.result for rank in each]) for each in (ranks, wider)]
    require(losses[0] != losses[1], f"the loss in bfloat16 is that in float32, {losses[0]}: train.precision is ignored")
    before, after = (whole([getattr(rank, when) for rank in ranks])["master"] for when in ("before", "after"))
    moved = sum(int((after[name] != was).sum()) for name, was in before.items())
    number = sum(was.size for was in before.values())
    require(
        moved > 0.9 * number,
        f"5 steps at a learning rate of 1e-6 moved {moved} of {number} masters, expected nearly all: masters in "
        "bfloat16 lose such steps, keep them in float32",
    )


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
    for rank in ranks:
        found = (rank.result.applied, rank.result.grad_norm)
        require_equal("the list of applied and grad_norm of a step whose tokens all weigh 0", found, (True, 0.0))
    wanted = subject.runs.of_plain(training.train_on_nothing, "qwen3")
    after, plain = (whole([rank.after for rank in each])["master"] for each in (ranks, wanted))
    for name, values in plain.items():
        require_near(f"{name} after a step of decay alone", after[name], values, DECAYED)


@check("C79", level=1, needs=[Capability.ADAM], builds_on=["C41", "C61"], variants={})
def test_a_step_takes_its_own_settings_of_adam(subject: Subject) -> None:
    found = together(subject.run(training.train_with, subject.setup("qwen3"), training.SETTINGS))
    wanted = together(subject.runs.of_plain(training.train_with, "qwen3", training.SETTINGS))
    assert_follows(found, wanted)


@check("C79", level=1, needs=[Capability.ADAM], builds_on=["C41", "C61"])
def test_weights_decay_in_one_step_where_the_config_has_none(subject: Subject) -> None:
    def without(setup: Setup) -> Setup:
        return evolve(setup, train=evolve(setup.train, optimizer=evolve(setup.train.optimizer, weight_decay=0.0)))

    settings = (None, AdamSettings(weight_decay=20.0))
    found = together(subject.run(training.train_with, without(subject.setup("qwen3")), settings))
    plain = without(subject.runs.setup(PLAIN, "qwen3"))
    assert_follows(found, together(subject.runs.rank_sets[1].run(training.train_with, plain, settings)))


@check("C81", level=1, needs=[Capability.TARGETS], builds_on=["C41", "C51", "C61"], variants={})
def test_steps_on_several_targets_of_each_token_follow_the_plain_backend(subject: Subject) -> None:
    found = together(subject.run(training.train_on_targets, subject.setup("qwen3"), 3))
    assert_follows(found, together(subject.runs.of_plain(training.train_on_targets, "qwen3", 3)))


@check("C82", level=1, needs=[Capability.SHARED_PREFIXES], builds_on=["C41", "C51", "C61"], variants={"kind": "qwen3"})
@pytest.mark.parametrize("kind", ["qwen3", "qwen3-moe"])
def test_samples_that_begin_alike_train_as_they_do_apart(subject: Subject, kind: str) -> None:
    steps = (None,) * 2
    found = together(subject.run(training.train_with, subject.setup(kind).with_prefixes, steps, make_branches))
    apart = together(subject.runs.of_plain(training.train_with, kind, steps, make_branches))
    assert_follows(found, apart)
    if subject.world_size == 1:
        passed, tokens = (sum(results[0].tokens for results in each.results) for each in (found, apart))
        require(
            passed < tokens,
            f"{passed} tokens went through the model, as many as without train.share_prefixes: prefixes are not "
            "shared, or GradientResult.tokens counts tokens that were not computed",
        )


@check("C63", level=1, needs=[Capability.WHOLE], builds_on=["C41", "C61"])
def test_training_on_padded_rows_follows_the_plain_backend(subject: Subject) -> None:
    fields = {**tiny_fields("llama"), "model_type": "mistral", "sliding_window": 8}
    setup = Setup(backend=subject.backend, model="", fields=fields).packed_by(80)  # a few rows at once
    found = subject.train(subject.of(evolve(setup, train=evolve(setup.train, layout="whole"))), range(3))
    plain = subject.runs.trained_as(1, evolve(setup, backend=PLAIN), 3)
    assert_follows(found, plain)
    assert_same_metrics(found, plain)


@check("C12", level=1, builds_on=["C11"])
def test_a_step_moves_every_weight_and_reports_finite_metrics(subject: Subject) -> None:
    found = subject.trained("qwen3-tied")
    require_equal(f"Backend.adam_step after {STEPS} steps", found.adam_step, STEPS)
    unmoved = [name for name, was in found.at_start["master"].items() if same_bits(was, found.state["master"][name])]
    require(
        not unmoved,
        f"{STEPS} steps left {len(unmoved)} of {len(found.state['master'])} weights as they were, such as "
        f"{unmoved[:1]}; local_state('master') must give what the optimizer updates",
    )
    for step, (norm, results) in enumerate(zip(found.grad_norms, found.results, strict=True)):
        require(math.isfinite(norm) and norm > 0, f"grad_norm of step {step} is {norm}, expected a number above 0")
        metrics, first = metrics_of(results), metrics_of(found.results[0])
        names = (dict.fromkeys(sorted(each)) for each in (metrics, {**first, "loss": 0.0}))
        require_equal(f"the set of metrics of step {step}", *names)
        for name, value in metrics.items():
            require(math.isfinite(value), f"the metric {name!r} of step {step} is {value}, expected a finite number")
        tokens, given = sum(result.tokens for result in results), len(samples_at(step).tokens)
        require(
            tokens >= given,
            f"GradientResult.tokens of step {step} is {tokens} over all ranks, but its samples have {given}",
        )
    require_equal("the number of different losses", len(set(found.losses)), STEPS)


@check("C13", level=1, builds_on=["C14", "C51"], ranks=[1])
def test_twenty_steps_with_a_user_defined_loss_memorize_one_batch(subject: Subject) -> None:
    samples = make_samples(21, samples=4)
    ranks = subject.run(training.overfit, subject.setup("qwen3", WHOLE), samples, 20, 2e-2)
    before, after = (
        in_order([getattr(rank, when) for rank in ranks], samples, Output.LOGPROBS) for when in ("before", "after")
    )
    chosen = samples.columns["loss_mask"]
    losses = [sum(rank.losses[step] for rank in ranks) for step in range(20)]
    mean = -before[chosen].mean()
    require_near("the first loss against -mean(log-probs) of a forward pass before it", losses[0], mean, FROM_LOGPROBS)
    mean = -after[chosen].mean()
    require(mean < 0.5 * losses[0], f"after 20 steps -mean(log-probs) is {mean}, expected at most half of {losses[0]}")
    require(
        losses[-1] < losses[10] < losses[0],
        f"the losses of steps 0, 10 and 19 are {losses[0]}, {losses[10]} and {losses[-1]}, expected each to be lower",
    )


@check("C14", level=1, builds_on=["C12"])
def test_the_same_seed_gives_the_same_run(subject: Subject) -> None:
    first, second = subject.trained("qwen3-tied"), subject.train(subject.setup("qwen3-tied"), range(STEPS))
    require_equal("the list of losses of the second run", second.losses, first.losses)
    require_equal("the list of gradient norms of the second run", second.grad_norms, first.grad_norms)
    metrics = ([metrics_of(each) for each in run.results] for run in (second, first))
    require_equal("the list of metrics of the second run", *metrics)
    require_same_state("the states of two runs of one seed", second.state, first.state)


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
    for what, found in (
        ("other numbers at masked tokens", subject.run(training.train_on, setup, samples.with_columns(**garbage))),
        ("other tokens and numbers in padding", subject.run(training.train_on_garbage, setup, samples)),
    ):
        require_near(f"the loss with {what}", loss_of(found), loss_of(wanted), LOSS)
        require_near(f"the gradient norm with {what}", grad_norm_of(found), grad_norm_of(wanted), GRAD_NORM)


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
    assert_near_float32(found, wanted)


@check("C57", level=1, needs=[Capability.RECOMPUTE], builds_on=["C41"])
def test_recomputing_activations_keeps_few_of_them_and_changes_no_number(subject: Subject) -> None:
    setup = subject.setup("qwen3")
    less = evolve(setup, train=evolve(setup.train, recompute="full"))
    wanted, found = (subject.run(training.saved_for_backward, each, 0) for each in (setup, less))
    mine, others = ([result for result, _ in each] for each in (found, wanted))
    require_near("the loss with train.recompute = 'full'", loss_of(mine), loss_of(others), RECOMPUTED)
    norms = (grad_norm_of(mine), grad_norm_of(others))
    require_near("the gradient norm with train.recompute = 'full'", *norms, GRAD_NORM)
    for (_, few), (_, many) in zip(found, wanted, strict=True):
        require(
            0 < 2 * few < many,
            f"with train.recompute = 'full' {few} bytes are saved for the backward pass, without {many}, expected less "
            "than half",
        )
