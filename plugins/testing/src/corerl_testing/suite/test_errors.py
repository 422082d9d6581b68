"""Calls that are refused, errors that are raised, and how a worker ends."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from corerl.checkpoint import begin
from corerl.plugin import Capability
from corerl.plugin.registry import Loaded
from corerl_testing.compare import loss_of
from corerl_testing.marks import check
from corerl_testing.models import BUFFERS
from corerl_testing.pool import RankFailed
from corerl_testing.require import require, require_equal
from corerl_testing.scenarios import states
from corerl_testing.subject import PACKINGS, Checkpoint, Runs, Subject, require_ranks


def require_error(what: str, error: str, start: str, *parts: str) -> None:
    """The error, as text, begins with `start` and contains `parts`; "" is no error."""
    holds = error.startswith(start) and all(part in error for part in parts)
    wanted = " ... ".join([*filter(None, [start]), *parts])
    require(error and holds, f"{what} gave {error or 'no error'!r}, expected {wanted!r}")


@check("C23", level=1, builds_on=["C14"])
def test_a_verb_in_the_wrong_state_changes_nothing(subject: Subject) -> None:
    setup = subject.setup("qwen3")
    ranks = subject.run(states.go_through_states, setup, str(subject.directory / "actor"))
    for rank in ranks:
        for verb, error in {**rank.before_init, **rank.after_shutdown, "init": rank.init_again}.items():
            require_error(f"{verb} in the wrong state", error, f"WrongState: {verb} on actor rank ")
    steps = list(zip(*(rank.results for rank in ranks), strict=True))
    found = [loss_of(results) for results in steps]
    require_equal("the list of losses of steps between refused calls", found, subject.losses(setup, 3))


@check("C24", level=1, builds_on=["C14"])
def test_training_continues_after_an_error_in_forward(subject: Subject) -> None:
    setup = subject.setup("qwen3", PACKINGS["one by one"])
    ranks = subject.run(states.raise_in_forward, setup)
    for rank in ranks:
        what = "forward, whose second micro-batch raises Fault('no such batch'),"
        require_error(what, rank.message, "HookFailed: backend:", "forward failed: Fault: no such batch")
        require_error(f"{what} in its details", rank.details, "", "Traceback", "Fault: no such batch")
    found = loss_of([rank.result for rank in ranks if rank.result is not None])
    require_equal("the loss of the step after a failed forward", found, subject.losses(setup, 2)[1])


@check("C24", level=1, builds_on=["C14"])
@pytest.mark.parametrize("exits", [False, True], ids=["raises", "exits"])
def test_an_error_in_training_leaves_only_shutdown(subject: Subject, exits: bool) -> None:
    name = "SystemExit" if exits else "Fault"
    for rank in subject.run(states.raise_in_train, subject.setup("qwen3", PACKINGS["one by one"]), exits):
        what = f"forward_backward, whose second micro-batch raises {name}('no such batch'),"
        message = f"forward_backward failed at optimizer step 1: {name}: no such batch"
        require_error(what, rank.message, "", message)
        require_error(f"{what} in its details", rank.details, "", "Traceback", "no such batch")
        later = "forward_backward after a failed one"
        require_error(later, rank.then, "WrongState: forward_backward on actor rank ", "only shutdown is allowed")


@check("C25", level=1, builds_on=["C14"], ranks=[1])
def test_a_worker_can_follow_another_one_in_the_same_process(subject: Subject, loaded: Loaded) -> None:
    setup = subject.setup("qwen3")
    background = loaded.spec.support(Capability.SAVE_BACKGROUND).full
    lives = states.live_twice(setup, str(subject.directory), background)
    require_equal("the list of what shutdown has left behind", lives.left, [])
    require_equal("the error of a second shutdown", lives.shutdown_again, "")
    for life, results in zip(("first", "second"), lives.results, strict=True):
        found = [loss_of([result]) for result in results]
        require_equal(f"the list of losses of the {life} worker in a process", found, subject.losses(setup, 2))


@check("C28", level=2, builds_on=["C24"], ranks=[2])
def test_a_rank_that_raises_ends_the_group_with_its_error(subject: Subject) -> None:
    with pytest.raises(
        RankFailed, match=r"rank 1 raised .*forward_backward failed at optimizer step 1: Fault: no such batch"
    ):
        subject.run(states.raise_on_the_last_rank, subject.setup("qwen3", PACKINGS["one by one"]))
    after = subject.train(subject.setup("qwen3"), range(1)).losses  # on new ranks
    require_equal("the number of steps on new ranks after that", len(after), 1)


@check("C59", level=1, builds_on=["C11", "C44"])
def test_one_process_refuses_what_the_backend_lacks_with_its_reason(
    loaded: Loaded, runs: Runs, backend_name: str, options: Mapping[str, Any], tmp_path: Path
) -> None:
    require_ranks(loaded.spec, options, 1)
    setup = evolve(runs.setup(backend_name, "qwen3"), options=options)
    lacks = {name: each for name, each in loaded.spec.capabilities.items() if not each.full}
    starts = {
        Capability.CPU: setup,
        Capability.CRITIC: evolve(setup, value_head=True),
        Capability.FROZEN: evolve(setup, frozen=True),
        Capability.BFLOAT16: evolve(setup, train=evolve(setup.train, precision="bfloat16")),
        Capability.FLOAT16: evolve(setup, train=evolve(setup.train, precision="float16")),
        Capability.WHOLE: evolve(setup, train=evolve(setup.train, layout="whole")),
        Capability.RECOMPUTE: evolve(setup, train=evolve(setup.train, recompute="full")),
        Capability.MOE: evolve(setup, model=str(runs.models["qwen3-moe"])),
        Capability.BUFFERS: evolve(setup, model=str(runs.models[BUFFERS])),
    }
    if Capability.CPU in lacks:  # there is no other device here, so nothing else can be tried
        starts = {Capability.CPU: setup}
    one = runs.rank_sets[1]
    errors: dict[str, list[str]] = {
        name: one.run(states.start_refused, starts[name]) for name in lacks.keys() & starts.keys()
    }
    if Capability.CPU not in lacks:
        (verbs,) = one.run(states.refusals, setup, list(lacks), str(tmp_path))
        errors |= verbs
    if not any(errors.values()):
        pytest.skip(f"{backend_name} declares no missing capability that a single process could need")
    for name, found in errors.items():
        for error in found:
            what = f"asking for {name!r}, which the spec declares missing,"
            require_error(what, error, "Unsupported: ", lacks[Capability(name)].reason)


@check("C59", level=2, builds_on=["C11", "C44"])
def test_two_ranks_refuse_what_the_backend_lacks_with_its_reason(
    loaded: Loaded, runs: Runs, backend_name: str, options: Mapping[str, Any], tmp_path: Path
) -> None:
    setup = evolve(runs.setup(backend_name, "qwen3"), options=options)
    several, reshard = (loaded.spec.support(each) for each in (Capability.MULTI_RANK, Capability.RESHARD))
    if not loaded.spec.support(Capability.CPU).full:
        pytest.skip(f"{backend_name} does not run on a CPU, on which this check runs")
    if not several.full:
        for error in runs.rank_sets[2].run(states.start_refused, setup):
            require_error("starting on two ranks", error, "Unsupported: ", several.reason)
    elif not reshard.full:
        require_ranks(loaded.spec, options, 1)
        saved = Checkpoint(begin(tmp_path, 1), 1)
        runs.train(1, setup, range(1), save_after=0, save_to=saved.role)
        for error in runs.rank_sets[2].run(states.start_refused, setup, saved.complete()):
            require_error("resuming a checkpoint of one rank on two", error, "Unsupported: ", reshard.reason)
    else:
        pytest.skip(f"{backend_name} runs on several ranks and resumes on a different number")
