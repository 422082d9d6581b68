"""From rewards to advantages: what is read and left alone, what is masked, the order of samples, equal rewards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from corerl.algorithms import Advantages
from corerl.algorithms.advantages import without_truncated
from corerl.types import Array, Output, rows_at
from corerl_testing.marks import algorithm_check as check
from corerl_testing.tolerances import ADVANTAGES
from corerl_testing.trial import Trial, copied, loss_inputs, other_numbers

SOMETIMES = {"ref_logprobs", Output.ROUTED_EXPERTS.value}  # columns of some runs alone
EQUAL = {2: 0.1, 3: 0.7, 5: 1 / 3, 6: -0.3, 7: 123.4}  # samples of a prompt -> the reward of each


class Asked(Mapping[str, Any]):
    """A mapping that remembers the names it was asked for."""

    def __init__(self, of: Mapping[str, Any]) -> None:
        self.of = of
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.names.add(name)
        return self.of[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.of)

    def __len__(self) -> int:
        return len(self.of)

    def about(self, of: Mapping[str, Any]) -> Asked:
        self.of = of
        return self

    def plainly(self, of: Mapping[str, Any]) -> dict[str, Any]:
        """A dictionary to write into, and to look into afterwards."""
        self.of = plain = dict(of)
        return plain

    def unwritten(self) -> list[str]:
        """What was asked for and no run has."""
        return sorted(self.names - self.of.keys() - SOMETIMES)

    def assert_written(self, by: str, what: str, instead: str) -> None:
        names = self.unwritten()
        assert not names, (
            f"{by} asks for the {what} {', '.join(map(repr, names))}, which is never written; there are "
            f"{', '.join(sorted(self.of))}; {instead}"
        )


@check("A06", level=1, builds_on=["A05"])
def test_only_existing_columns_and_rows_are_requested(trial: Trial) -> None:
    samples = trial.samples()
    columns, rows = Asked(samples.columns), Asked(samples.row_columns)
    seen = evolve(samples, columns=columns, row_columns=rows)
    try:
        trial.plan.estimate(seen, trial.rewards(samples), trial.token_rewards(samples))
    except Exception:  # of one that is missing, which may be any
        if not columns.unwritten() and not rows.unwritten():
            raise
    columns.assert_written("advantages", "columns", "add a pass to forwards() that fills it")
    rows.assert_written("advantages", "rows", "use these")

    for role in trial.plan.objectives:
        asked = Asked({})
        try:
            trial.evaluate(role, trial.whole(role), asked.about)
        except Exception:
            if not asked.unwritten():
                raise
        asked.assert_written(
            f"the loss of the {role}", "columns", "return others in Advantages.columns, or fill them in a pass"
        )


@check("A07", level=1, builds_on=["A06"])
def test_nothing_that_is_given_is_changed(trial: Trial) -> None:
    samples = trial.samples()
    given, rewards, token_rewards = copied(samples), trial.rewards(samples), trial.token_rewards(samples)
    columns, rows = dict(given.columns), dict(given.row_columns)
    trial.plan.estimate(evolve(given, columns=columns, row_columns=rows), rewards, token_rewards)
    assert_unchanged("advantages", samples.columns, columns)
    assert_unchanged("advantages", samples.row_columns, rows)
    before: dict[str, Array] = {"tokens": samples.tokens, "offsets": samples.offsets}
    assert_unchanged("advantages", before, {"tokens": given.tokens, "offsets": given.offsets})
    before = {"rewards": trial.rewards(samples), "token_rewards": trial.token_rewards(samples)}
    assert_unchanged("advantages", before, {"rewards": rewards, "token_rewards": token_rewards})

    for role in trial.plan.objectives:
        micro, seen = trial.whole(role), Asked({})
        trial.evaluate(role, micro, seen.plainly)
        before = {name: each.numpy() for name, each in loss_inputs(micro).columns.items()}
        after = {name: each.detach().numpy() for name, each in seen.of.items()}
        assert_unchanged(f"the loss of the {role}", before, after)


def assert_unchanged(by: str, before: Mapping[str, Array], after: Mapping[str, Array]) -> None:
    assert after.keys() == before.keys(), (
        f"{by} leaves {sorted(after)} of {sorted(before)}: it adds or removes some; return what is new instead"
    )
    for name, array in before.items():
        assert same(array, after[name]), f"{by} writes into {name!r}; make a copy, others read it too"


@check("A08", level=1, builds_on=["A06"])
def test_advantages_are_finite_and_deterministic(trial: Trial) -> None:
    cases = {
        "ragged samples": trial.samples(),
        "groups of one": trial.samples((1, 1, 1)),
        "one sample": trial.samples((1,)),
        "samples without a loss token": trial.samples(unanswered=True),
    }
    for case, samples in cases.items():
        mask, rewards = samples.columns["loss_mask"], trial.rewards(samples)
        for token_rewards in (np.zeros(len(mask), np.float32), trial.token_rewards(samples)):
            found = trial.estimate(samples, rewards, token_rewards)
            for name, column in columns_of(found).items():
                assert isinstance(column, np.ndarray) and column.dtype == np.float32 and column.shape == mask.shape, (
                    f"{case}: {name} is {kind_of(column)}, expected float32 {list(mask.shape)}, a number for each token"
                )
                assert np.isfinite(column[mask]).all(), (
                    f"{case}: {name} has {column[mask][~np.isfinite(column[mask])][0]}, expected finite numbers; guard "
                    "divisions against groups of one, and means against no token at all"
                )
            outside = found.advantages[~mask]
            assert not outside.any(), (
                f"{case}: outside loss tokens an advantage is {outside[outside != 0][0]}, expected 0; use broadcast()"
            )
            for name, value in found.metrics.items():
                assert np.isfinite(value), (
                    f"{case}: the metric {name!r} is {value}; leave it out if there is nothing to measure"
                )
            assert_same(found, trial.estimate(samples, rewards, token_rewards), mask, f"{case}, the same twice")


@check("A09", level=1, builds_on=["A08"])
def test_what_is_masked_does_not_change_advantages(trial: Trial) -> None:
    samples = trial.samples()
    mask, rewards, token_rewards = samples.columns["loss_mask"], trial.rewards(samples), trial.token_rewards(samples)
    wanted = trial.estimate(samples, rewards, token_rewards)
    for name in sorted(samples.columns.keys() - {"loss_mask"}):
        for seed in (1, 2):
            other = samples.with_columns(**{name: other_numbers(samples.columns[name], ~mask, seed=seed)})
            with np.errstate(all="ignore"):  # of what is then left out
                found = trial.estimate(other, rewards, token_rewards)
            assert_same(found, wanted, mask, f"other numbers in the column {name!r} outside loss tokens")


@check("A10", level=1, builds_on=["A08"])
def test_neither_the_order_of_samples_nor_prompt_numbers_matter(trial: Trial) -> None:
    samples = trial.samples()
    rewards, token_rewards = trial.rewards(samples), trial.token_rewards(samples)
    wanted = trial.estimate(samples, rewards, token_rewards)
    draw = np.random.default_rng(4)
    groups = samples.row_columns["group"]
    orders = {
        "with samples in another order": (draw.permutation(len(samples)), groups),
        "with the last prompt first": (np.argsort(-groups, kind="stable"), groups),
        "with other numbers for prompts": (np.arange(len(samples)), draw.permutation(100)[groups]),
    }
    for how, (order, numbers) in orders.items():
        place, _ = rows_at(samples.offsets, order)
        moved = samples.with_row_columns(group=numbers).take_rows(order)
        found = trial.estimate(moved, rewards[order], token_rewards[place])
        for name, column in columns_of(found).items():
            expected = columns_of(wanted)[name][place]
            near = np.isclose(column, expected, rtol=ADVANTAGES.relative, atol=ADVANTAGES.absolute)
            assert near.all(), (
                f"{how}, {name} of the same token change from {expected[~near][0]} to {column[~near][0]}; compare "
                "samples by row_columns['group'], never by place"
            )
        for name, value in found.metrics.items():
            assert np.isclose(value, wanted.metrics[name], rtol=ADVANTAGES.relative), (
                f"{how}, the metric {name!r} changes from {wanted.metrics[name]} to {value}"
            )


@check("A11", level=1, builds_on=["A08"])
def test_a_group_of_equal_rewards_has_advantages_of_exactly_0(trial: Trial) -> None:
    if not trial.spec.compares:
        pytest.skip("its spec says that it does not compare the samples of a prompt")
    samples = trial.samples((*EQUAL, 4))
    rewards = trial.rewards(samples)
    for group, reward in enumerate(EQUAL.values()):
        rewards[samples.row_columns["group"] == group] = reward
    mask = samples.columns["loss_mask"]
    found = trial.estimate(samples, rewards, np.zeros(len(mask), np.float32)).advantages
    group_of = samples.row_columns["group"][samples.row_of]
    for group, (size, reward) in enumerate(EQUAL.items()):
        advantages = found[group_of == group]
        assert not advantages.any(), (
            f"{size} samples of reward {reward:g} each get the advantage {advantages[advantages != 0][0]}, expected "
            "exactly 0; test whether a group's rewards are equal, since their mean is rounded, or set compares=False"
        )


@check("A18", level=1, builds_on=["A10"])
def test_by_prompt_means_that_other_prompts_do_not_matter(trial: Trial) -> None:
    if not trial.spec.by_prompt:
        pytest.skip("its spec does not say that a prompt's advantages depend on its own samples alone")
    samples = trial.samples()
    rewards, token_rewards = trial.rewards(samples), trial.token_rewards(samples)
    wanted = columns_of(trial.estimate(samples, rewards, token_rewards))
    for group in np.unique(samples.row_columns["group"]):
        members = np.flatnonzero(samples.row_columns["group"] == group)
        place, _ = rows_at(samples.offsets, members)
        alone = samples.take_rows(members).with_row_columns(group=np.zeros(len(members), np.int64))
        for name, column in columns_of(trial.estimate(alone, rewards[members], token_rewards[place])).items():
            expected = wanted[name][place]
            near = np.isclose(column, expected, rtol=ADVANTAGES.relative, atol=ADVANTAGES.absolute)
            assert near.all(), (
                f"without the batch's other prompts, {name} change from {expected[~near][0]} to {column[~near][0]}; "
                "set by_prompt=False in the spec, since rollout.source='streamed' would train on other numbers"
            )


@check("A17", level=1, builds_on=["A09", "A10", "A11"])
def test_an_episode_counts_once_however_many_samples_it_is(trial: Trial) -> None:
    samples = trial.samples()
    mask, rewards, token_rewards = samples.columns["loss_mask"], trial.rewards(samples), trial.token_rewards(samples)
    wanted = trial.estimate(samples, rewards, token_rewards)
    # Every third one has two more of the same, of which nothing is trained on.
    order = np.concatenate([np.arange(len(samples)), *[np.arange(0, len(samples), 3)] * 2])
    place, _ = rows_at(samples.offsets, order)
    more = samples.take_rows(order)
    more = without_truncated(more.with_row_columns(truncated=np.arange(len(order)) >= len(samples)))
    found = trial.estimate(more, rewards[order], np.where(more.columns["loss_mask"], token_rewards[place], 0.0))
    for name, column in columns_of(found).items():
        expected, given = columns_of(wanted)[name][mask], column[: len(mask)][mask]
        near = np.isclose(given, expected, rtol=ADVANTAGES.relative, atol=ADVANTAGES.absolute)
        assert near.all(), (
            f"with more samples of an episode, {name} change from {expected[~near][0]} to {given[~near][0]}; compare "
            "rewards through compared(), which counts each of SampleBatch.episodes once"
        )


# ---- what is compared ------------------------------------------------------------------------------------------------


def same(left: Array, right: Array) -> bool:
    """Bit for bit."""
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()


def assert_same(found: Advantages, wanted: Advantages, mask: Array, what: str) -> None:
    """Bit for bit: advantages, and at loss tokens the other columns, and metrics."""
    assert found.columns.keys() == wanted.columns.keys() and found.metrics.keys() == wanted.metrics.keys(), (
        f"{what}: columns are {sorted(found.columns)} and metrics {sorted(found.metrics)}, before they were "
        f"{sorted(wanted.columns)} and {sorted(wanted.metrics)}"
    )
    columns = {"advantages": (found.advantages, wanted.advantages)}
    columns |= {name: (column[mask], wanted.columns[name][mask]) for name, column in found.columns.items()}
    for name, (column, expected) in columns.items():
        if not same(column, expected):
            place = np.flatnonzero(~np.equal(column, expected))[:1]
            raise AssertionError(
                f"{what}: {name} change from {expected[place]} to {column[place]} at token {place}, expected the same"
            )
    for name, value in found.metrics.items():
        assert value == wanted.metrics[name], (
            f"{what}: the metric {name!r} changes from {wanted.metrics[name]} to {value}, expected the same bits"
        )


def columns_of(found: Advantages) -> dict[str, Array]:
    return {"advantages": found.advantages, **found.columns}


def kind_of(column: object) -> str:
    return f"{column.dtype} {list(column.shape)}" if isinstance(column, np.ndarray) else type(column).__name__
