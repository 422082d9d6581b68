"""A model with a value head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from safetensors.torch import save_file
from transformers import AutoModel

from corerl.models import VALUE_HEAD_WEIGHT
from corerl.plugin import Capability
from corerl.types import FloatArray, Output, SampleBatch
from corerl_testing.compare import (
    assert_follows,
    assert_outputs,
    assert_resumes,
    files_of,
    in_order,
    reference,
    require_same_state,
    together,
    whole,
)
from corerl_testing.harness import LONG, Setup, make_branches, make_samples
from corerl_testing.marks import check
from corerl_testing.models import tiny_fields
from corerl_testing.require import require, require_equal
from corerl_testing.scenarios import training
from corerl_testing.subject import PACKINGS, PLAIN, WHOLE, Subject, steps_of


def critic(subject: Subject, kind: str, packing: str = "packed") -> Setup:
    return evolve(subject.setup(kind, PACKINGS[packing]), value_head=True)


@reference
def transformers_values(directory: Path, head: FloatArray, samples: SampleBatch) -> FloatArray:
    """[N] values by transformers' trunk and one multiplication, each sample by itself."""
    trunk: Any = AutoModel.from_pretrained(directory, dtype=torch.float32).eval()
    values = np.zeros(len(samples.tokens), np.float32)
    for start, end in zip(samples.offsets[:-1], samples.offsets[1:], strict=True):
        with torch.no_grad():
            hidden = trunk(input_ids=torch.tensor(samples.tokens[None, start:end])).last_hidden_state[0]
        values[start + 1 : end] = hidden[:-1].numpy() @ head[0]
    return values


@check("C82", level=1, needs=[Capability.CRITIC, Capability.SHARED_PREFIXES], builds_on=["C53"])
def test_a_critic_trains_on_samples_that_begin_alike(subject: Subject) -> None:
    steps = (None,) * 2
    found = together(subject.run(training.train_with, critic(subject, "qwen3").with_prefixes, steps, make_branches))
    plain = evolve(subject.runs.setup(PLAIN, "qwen3"), value_head=True)
    assert_follows(found, together(subject.runs.rank_sets[1].run(training.train_with, plain, steps, make_branches)))


@check("C53", level=1, needs=[Capability.CRITIC], builds_on=["C41", "C52"])
@pytest.mark.parametrize(
    ("kind", "packing"),
    [("qwen3", "packed"), ("qwen3-tied", "packed"), ("qwen3", "padded"), ("qwen3", "one by one")],
)
def test_a_critic_trains_as_the_plain_one_does(subject: Subject, kind: str, packing: str) -> None:
    setup = critic(subject, kind, packing)
    plain = evolve(subject.runs.setup(PLAIN, kind, WHOLE), value_head=True)
    found = subject.train(setup, range(steps_of(packing)))
    assert_follows(found, subject.runs.trained_as(1, plain, steps_of(packing)))
    require_equal("the number of different losses", len(set(found.losses)), steps_of(packing))


@check("C52", level=1, needs=[Capability.CRITIC], builds_on=["C51"])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3-tied"])
def test_values_are_the_head_times_what_transformers_gives(subject: Subject, kind: str) -> None:
    assert_values_as_transformers(subject, kind, critic(subject, kind), make_samples(7, samples=13))


@check("C52", level=1, needs=[Capability.CRITIC], builds_on=["C51"])
def test_long_sequences_of_a_critic_do_not_see_each_other(subject: Subject) -> None:
    setup = evolve(subject.setup("qwen3", WHOLE), value_head=True)
    assert_values_as_transformers(subject, "qwen3", setup, make_samples(7, lengths=LONG))


def assert_values_as_transformers(subject: Subject, kind: str, setup: Setup, samples: SampleBatch) -> None:
    found = in_order(subject.run(training.forward_only, setup, samples), samples, Output.VALUES)
    head = subject.train(setup, []).at_start["master"][VALUE_HEAD_WEIGHT]
    wanted = transformers_values(subject.model(kind), head, samples)
    assert_outputs(found, wanted, samples, Output.VALUES)
    require(
        np.abs(wanted).max() > 0.01, f"the head's weights are at most {np.abs(head).max()}, as if it were not drawn"
    )
    first = found[samples.offsets[:-1]]
    require(
        not first.any(), f"the values of samples' first tokens are {first}, expected 0: nothing is computed of them"
    )


@check("C52", level=1, needs=[Capability.CRITIC], builds_on=["C51"])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3-tied"])
def test_value_heads_start_by_name_and_replace_language_heads(subject: Subject, kind: str) -> None:
    found = subject.train(critic(subject, kind), []).at_start["master"]
    plain = evolve(subject.runs.setup(PLAIN, kind), value_head=True)
    wanted = subject.runs.trained_as(1, plain, 0).at_start["master"]
    names = (files_of(subject.model(kind)).keys() - {"lm_head.weight"}) | {VALUE_HEAD_WEIGHT}
    require_equal("the critic's set of weights", dict.fromkeys(found), dict.fromkeys(sorted(names)))
    require_same_state("the critic's initial weights and plain's", {"master": found}, {"master": wanted}, ["master"])
    hidden = tiny_fields(kind)["hidden_size"]
    require_equal(f"the shape of {VALUE_HEAD_WEIGHT}", found[VALUE_HEAD_WEIGHT].shape, (1, hidden))
    spread = found[VALUE_HEAD_WEIGHT].std()
    require(0 < spread < 0.1, f"the standard deviation of {VALUE_HEAD_WEIGHT} is {spread}, expected 0 to 0.1")


@check("C52", level=1, needs=[Capability.CRITIC], builds_on=["C51"])
def test_a_head_that_the_model_has_is_loaded(subject: Subject, tmp_path: Path) -> None:
    setup = critic(subject, "qwen3")
    directory = tmp_path / "critic"
    trunk: Any = AutoModel.from_pretrained(subject.model("qwen3"), dtype=torch.float32)
    head = torch.linspace(-1.0, 1.0, trunk.config.hidden_size)[None]
    trunk.config.save_pretrained(directory)
    tensors = {f"model.{name}": param.detach().contiguous() for name, param in trunk.named_parameters()}
    save_file({**tensors, VALUE_HEAD_WEIGHT: head}, directory / "model.safetensors")
    found = subject.train(evolve(setup, model=str(directory)), []).at_start["master"]
    stored = {"master": {VALUE_HEAD_WEIGHT: head.numpy()}}
    loaded = {"master": {VALUE_HEAD_WEIGHT: found[VALUE_HEAD_WEIGHT]}}
    require_same_state("the head as loaded and the one in the model's files", loaded, stored, ["master"])


@check("C54", level=1, needs=[Capability.CRITIC], builds_on=["C18", "C53"])
def test_a_critic_resumes_to_the_last_bit_with_its_head(subject: Subject) -> None:
    setup, checkpoint = critic(subject, "qwen3"), subject.checkpoint(2)
    uninterrupted = subject.train(setup, range(4), save_after=1, save_to=checkpoint.role)
    resumed = subject.train(setup, range(2, 4), resume=checkpoint.complete())
    assert_resumes(resumed, uninterrupted, saved=2)
    moved = resumed.state["master"][VALUE_HEAD_WEIGHT] - uninterrupted.at_start["master"][VALUE_HEAD_WEIGHT]
    require(np.abs(moved).max() > 0, f"{VALUE_HEAD_WEIGHT} moved by 0 in four steps, expected more: it is not trained")


@check("C52", level=1, needs=[Capability.CRITIC], builds_on=["C51"])
def test_random_critics_do_not_depend_on_the_number_of_ranks(subject: Subject) -> None:
    random = Setup(backend=PLAIN, model="", fields=tiny_fields("qwen3"), value_head=True)
    ranks = subject.run(training.train_steps, subject.of(random), [])
    wanted = subject.runs.trained_as(1, random, 0).at_start
    found = whole([rank.at_start for rank in ranks])
    what = f"random weights on {subject.world_size} rank(s) and on one"
    require_same_state(what, found, wanted, ["master"])
