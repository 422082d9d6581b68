"""A role's ranks as one object: with prepared answers, to disagree at will; and once over real Ray."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
from attrs import evolve

from corerl.calls import Future, wait_all
from corerl.cluster.heartbeat import Member, Pending, Watching
from corerl.cluster.runtime import ray_session
from corerl.config.schema import Config
from corerl.data.packing import StepPlan, pack, plan_steps
from corerl.errors import ConfigError, ContractError, CorerlError, HookFailed, SaveFailed, WorkerDied
from corerl.plan.resolve import plugins_of
from corerl.plan.roles import RolePlan, plan_role
from corerl.plugin import FULL, Capability
from corerl.trainer import group as group_module
from corerl.trainer.group import StoredBatch, TrainGroup
from corerl.types import (
    AdamSettings,
    ForwardResult,
    GradientResult,
    InitResult,
    LossSpec,
    MemoryKind,
    Metric,
    Output,
    ParallelLayout,
    Reduction,
    SampleBatch,
    SaveResult,
    SleepResult,
    Step,
    TrainResult,
    UpdateResult,
    WakeResult,
)
from corerl.weights.manifest import build_manifest
from corerl.weights.transport import Address
from tests.driver.saved import DATA
from tests.machine import paced
from tests.trainer.configs import config_for
from tests.trainer.fakes import MANIFEST
from tests.trainer.outputs import LOGPROBS, batch_of, result_of


def planned(config: Config) -> RolePlan:
    return plan_role("actor", config, plugins_of(config), device="cpu")


PLAN = planned(config_for())
LOSS = LossSpec(name="clipped")
STEP = Step(optimizer_step=2, rollout_step=1, lr=0.25)
ADDRESS = Address(transport="disk", engines=("engine-0",), path="nowhere")
ALONE = {"backend": {"name": "plain"}, "model": {"config": DATA["model"]["config"]}, "cluster": {"device": "cpu"}}
NOTHING = ForwardResult(rows=np.array([], np.int64), offsets=np.array([0]), outputs={})


class Answers:
    """In the place of processes: what each verb is answered with, one a rank, is prepared."""

    def __init__(self, **answers: Sequence[Any]) -> None:
        self.answers = answers
        self.calls: list[tuple[Any, ...]] = []
        self.waited_for: list[str] = []  # as a rank that dies in it is told to have been in
        self.killed = False
        self.nodes = ["here"] * len(self)

    def __len__(self) -> int:
        return len(self.answers["init"])

    def construct(self, arguments: Sequence[tuple[Any, ...]]) -> Pending:
        return self._pending("start", "construct")

    def _pending(self, method: str, verb: str) -> Pending:
        return Pending(method, 0, {rank: Member(f"actor rank {rank}") for rank in range(2)}, (verb,))

    def listen(self, member: int) -> tuple[str, int, int]:
        return "host", 1234, 5

    def start_each(self, method: str, arguments: Sequence[tuple[Any, ...]], *, at: str = "") -> Pending:
        self.calls.append((method, *arguments))
        return self._pending(f"{method} at {at}" if at else method, method)

    def start(self, method: str, *args: Any, at: str = "") -> Pending:
        if self.killed:
            raise WorkerDied("the ranks have ended")
        self.calls.append((method, *args))
        return self._pending(f"{method} at {at}" if at else method, method)

    def wait(self, pending: Pending) -> list[Any]:
        self.waited_for.append(pending.method)
        answers = self.answers.get(pending.refs[0], [None, None])
        if isinstance(answers[0], CorerlError):
            self.killed = self.killed or not answers[0].harmless
            raise answers[0]
        return list(answers)

    def ready(self, pending: Pending, timeout: float) -> bool:
        return True

    def call(self, method: str, *args: Any) -> list[Any]:
        return self.wait(self.start(method, *args))

    def kill(self) -> None:
        self.killed = True

    @property
    def ended(self) -> bool:
        return self.killed


def layout(rank: int, **changes: Any) -> ParallelLayout:
    return evolve(ParallelLayout(rank=rank, world_size=2, dp_rank=rank, dp_size=2), **changes)


def group_with(*layouts: ParallelLayout, **answers: Sequence[Any]) -> tuple[TrainGroup, Answers]:
    """A group that is initialized; of two data-parallel ranks where nothing else is said."""
    layouts = layouts or (layout(0), layout(1))
    processes = Answers(init=[InitResult(layout=each) for each in layouts], **answers)
    plan = evolve(PLAN, data_parallel=layouts[0].dp_size)
    group = TrainGroup(processes, plan)  # type: ignore[arg-type]  # all that a group asks of its processes
    group.init().result()
    processes.calls.clear()
    return group, processes


@pytest.fixture
def given_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is put into an object store."""
    monkeypatch.setattr(group_module, "put", lambda value: value)


def trained_by(group: TrainGroup) -> TrainResult:
    batch = batch_of(5, 2, 7, 3, 1)
    return group.train(batch, training_plan(batch, group.layouts[0].dp_size), LOSS, STEP).result()


def disagreement(*results: InitResult) -> str:
    processes = Answers(init=results)
    with pytest.raises(ContractError) as caught:
        TrainGroup(processes, PLAN).init().result()  # type: ignore[arg-type]
    assert processes.killed
    return caught.value.message


# ---- what ranks must agree on ----------------------------------------------------------------------------------------


FIRST = InitResult(layout=layout(0))
ALIKE = [layout(rank, dp_rank=0, dp_size=1, outputs=not rank) for rank in range(2)]


@pytest.mark.parametrize(
    ("results", "said"),
    [
        ([evolve(FIRST, optimizer_step=4), InitResult(layout=layout(1), optimizer_step=6)],
         "ranks disagree on optimizer_step: rank 0 reports 4, rank 1 reports 6"),
        ([FIRST, InitResult(layout=layout(1), weights_version=1)],
         "ranks disagree on weights_version: rank 0 reports 0, rank 1 reports 1"),
        ([FIRST, FIRST], "the layout of rank 1 has rank 0 and dp_size 2, expected rank 1 and the dp_size 2 of rank 0"),
        ([FIRST, InitResult(layout=layout(1, dp_size=1))],
         "the layout of rank 1 has rank 1 and dp_size 1, expected rank 1 and the dp_size 2 of rank 0"),
        ([InitResult(layout=each) for each in ALIKE],
         "the ranks form 1 data-parallel groups, but the backend's spec announced 2"),
        ([FIRST, InitResult(layout=layout(1, dp_rank=0))], "dp rank 0 has output ranks [0, 1], expected exactly one"),
        ([FIRST, InitResult(layout=layout(1, outputs=False))], "dp rank 1 has output ranks [], expected exactly one"),
        ([FIRST, InitResult(layout=layout(1, sequence_multiple=4))], "ranks disagree on sequence_multiple: [1, 4]"),
        ([FIRST, InitResult(layout=layout(1, rectangular=True))], "ranks disagree on rectangular: [False, True]"),
        ([FIRST, InitResult(layout=layout(1, shares_prefixes=True))], "ranks disagree on shares_prefixes"),
    ],
)  # fmt: skip
def test_ranks_whose_states_or_layouts_differ_are_an_error(results: list[InitResult], said: str) -> None:
    assert disagreement(*results).startswith(f"actor: {said}")


ONE = TrainResult(applied=True, metrics={}, grad_norm=1.0, tokens=1)
SKIPPED = TrainResult(applied=False, metrics={}, grad_norm=math.nan, tokens=1)


@pytest.mark.usefixtures("given_by_value")
@pytest.mark.parametrize(
    ("results", "said"),
    [
        ([ONE, evolve(ONE, grad_norm=7.0)], r"ranks disagree on the gradient norm: \[1.0, 7.0\]; "),
        ([evolve(ONE, grad_norm=math.nan)] * 2, "a step with gradient norm nan was applied; "),
        ([SKIPPED, ONE], r"ranks \[1\] applied the step, but the others did not$"),
    ],
)
def test_ranks_that_disagree_on_a_step_are_an_error(results: list[TrainResult], said: str) -> None:
    for verb, step in (("train", trained_by), ("optimizer_step", lambda group: group.optimizer_step(STEP).result())):
        group, processes = group_with(**{verb: results})
        with pytest.raises(ContractError, match=f"^actor: {said}"):
            step(group)
        assert processes.killed
    found = trained_by(group_with(train=[SKIPPED, SKIPPED])[0])
    assert not found.applied and math.isnan(found.grad_norm)


BATCH = batch_of(3)
FROZEN = "on the actor was refused: the role is frozen"
OWN = evolve(STEP, adam=AdamSettings(clip_norm=0.5))
NO_SETTINGS = (
    f"with Step.adam requires 'adam', which the backend {PLAN.backend.name!r} does not support yet: its spec does not "
    "declare it"
)


NO_TARGETS = NO_SETTINGS.replace("Step.adam requires 'adam'", "the column 'targets' requires 'targets'")
OUTSIDE = "forward: column 'targets' has 10 at [1, 1] of row 0, expected ids from 0 to 9; as padding any of them "


def targets_of(targets: Sequence[Any]) -> SampleBatch:
    return BATCH.with_columns(targets=np.array(targets))


NAMED = targets_of([1, 2, 3])


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda group: frozen(group).train(BATCH, training_plan(BATCH), LOSS, STEP), f"train {FROZEN}"),
        (lambda group: frozen(group).forward_backward(BATCH, PART, LOSS), f"forward_backward {FROZEN}"),
        (lambda group: frozen(group).optimizer_step(STEP), f"optimizer_step {FROZEN}"),
        (lambda group: group.train(BATCH, training_plan(BATCH), LOSS, OWN), f"train {NO_SETTINGS}"),
        (lambda group: group.optimizer_step(OWN), f"optimizer_step {NO_SETTINGS}"),
        (lambda group: group.train(NAMED, training_plan(NAMED), LOSS, STEP), f"train {NO_TARGETS}"),
        (lambda group: group.forward_backward(NAMED, PART, LOSS), f"forward_backward {NO_TARGETS}"),
        (lambda group: group.forward(NAMED, Output.LOGPROBS), f"forward {NO_TARGETS}"),
        (lambda group: scoring(group).forward(targets_of([[0, 9], [1, 10], [2, 3]]), Output.LOGPROBS), OUTSIDE),
        (
            lambda group: scoring(group).forward(targets_of([0, -2, 3]), Output.LOGPROBS),
            "forward: column 'targets' has -2 at [1] of row 0, expected ids from 0 to 9; ",
        ),
        (lambda group: frozen(group).save("p", STEP), f"save {FROZEN}"),
        (lambda group: frozen(group).update_weights(ADDRESS, 1), f"update_weights {FROZEN}"),
        (lambda group: frozen(group).plan_steps(BATCH, seed=0), f"plan_steps {FROZEN}"),
    ],
)
def test_wrong_calls_are_refused_before_any_rank_is_called(call: Callable[[TrainGroup], Any], said: str) -> None:
    group, processes = group_with()
    with pytest.raises(CorerlError, match=re.escape(said)):
        call(group)
    assert (processes.calls, processes.killed) == ([], False)


def scoring(group: TrainGroup) -> TrainGroup:
    """With a backend that takes targets, and ten words."""
    backend = evolve(PLAN.backend, spec=evolve(PLAN.backend.spec, capabilities={Capability.TARGETS: FULL}))
    group.role_plan = evolve(group.role_plan, backend=backend, cluster=evolve(PLAN.cluster, model={"vocab_size": 10}))
    return group


@pytest.mark.usefixtures("given_by_value")
def test_logprobs_of_targets_come_back_in_their_shape() -> None:
    batch = evolve(targets_of([[0, 9], [1, 8], [2, 3]]), offsets=np.array([0, 1, 3]), row_columns={})
    scored = -batch.columns["targets"].astype(np.float32)
    ranks = [
        ForwardResult(rows=np.array([1]), offsets=np.array([0, 2]), outputs={Output.LOGPROBS: scored[1:]}),
        ForwardResult(rows=np.array([0]), offsets=np.array([0, 1]), outputs={Output.LOGPROBS: scored[:1]}),
    ]
    group, processes = group_with(forward=ranks)
    found = scoring(group).forward(batch, Output.LOGPROBS).result()[Output.LOGPROBS]
    assert found.tolist() == scored.tolist()
    ((_, (sent, *_), _),) = processes.calls
    assert set(sent.columns) == {"loss_mask", "targets"}
    group.forward(batch, Output.ENTROPY)
    assert set(processes.calls[-1][1][0].columns) == {"loss_mask"}


def frozen(group: TrainGroup) -> TrainGroup:
    group.role_plan = evolve(group.role_plan, objective=None)
    return group


def test_ranks_that_disagree_on_the_manifest_are_an_error() -> None:
    other = build_manifest([("b", (3,)), ("w", (2, 3))], dtype="float32", bucket_bytes=24)
    assert group_with(manifest=[MANIFEST, MANIFEST])[0].manifest().result() == MANIFEST
    group, processes = group_with(manifest=[MANIFEST, other])
    with pytest.raises(ContractError, match=r"^actor: ranks disagree on the manifest; "):
        group.manifest().result()
    assert processes.killed


# ---- how ranks' answers become one -----------------------------------------------------------------------------------


# Samples 2 and 0 on dp rank 0, sample 3 on dp rank 1, which is filled up; 1 and 4 are of another call.
PART = StepPlan(
    micro_batches=((np.array([2]), np.array([0])), (np.array([3]), np.array([0]))),
    filler=((False, False), (False, True)),
    scales=np.array([0.5, 0.0, 0.5, 0.5, 0.0], dtype=np.float32),
)


@pytest.mark.usefixtures("given_by_value")
def test_gradients_are_summed_and_outputs_are_columns() -> None:
    batch = batch_of(5, 2, 7, 3, 1)
    results = [
        GradientResult(metrics={"loss": Metric(1.0, 4.0)}, tokens=12, outputs=result_of(batch, 2, 0)),
        GradientResult(metrics={"loss": Metric(5.0, 8.0)}, tokens=8, outputs=result_of(batch, 3)),
    ]
    group, processes = group_with(forward_backward=results)
    found = group.forward_backward(batch, PART, LOSS, outputs=Output.LOGPROBS).result()
    assert (found.metrics, found.tokens) == ({"loss": Metric(6.0, 12.0)}, 20)
    passed = np.isin(batch.row_of, [0, 2, 3])
    assert found.outputs[Output.LOGPROBS].tolist() == np.where(passed, batch.tokens, 0).tolist()
    ((verb, *given),) = processes.calls
    assert verb == "forward_backward" and [each[2:] for each in given] == [(LOSS, LOGPROBS, False)] * 2
    assert [read_by(each) for each in given] == [read_by((batch, PART.shard_of(rank))) for rank in range(2)]

    group, processes = group_with(forward_backward=[evolve(each, outputs=None) for each in results])
    assert group.forward_backward(batch, PART, LOSS, last=True).result().outputs == {}
    assert [each[2:] for each in processes.calls[0][1:]] == [(LOSS, (), True)] * 2


def of_four(dp_ranks: Sequence[int], outputs: Sequence[bool]) -> list[ParallelLayout]:
    return [
        ParallelLayout(rank=rank, world_size=4, dp_rank=dp_rank, dp_size=max(dp_ranks) + 1, outputs=output)
        for rank, (dp_rank, output) in enumerate(zip(dp_ranks, outputs, strict=True))
    ]


# Four ranks, by how they share models: pairs of tensor-parallel neighbors, the first of which outputs; two stages of a
# pipeline, the last of which outputs; one model of four ranks.
SHARED = {
    "dp 2 x tp 2": of_four([0, 0, 1, 1], [True, False, True, False]),
    "pp 2 x dp 2": of_four([0, 1, 0, 1], [False, False, True, True]),
    "tp 2 x pp 2": of_four([0, 0, 0, 0], [False, False, True, False]),
}


@pytest.mark.usefixtures("given_by_value")
@pytest.mark.parametrize("layouts", SHARED.values(), ids=SHARED.keys())
def test_metrics_count_each_sample_once_in_every_layout(layouts: list[ParallelLayout]) -> None:
    tokens = [100, 200]  # of each dp rank's samples

    def trained(rank: int) -> TrainResult:
        at = layouts[rank]
        # The backend's own where it outputs; and what an extension has measured, on every rank.
        own = {"loss": Metric(1.0 + at.dp_rank, 4.0)} if at.outputs else {}
        measured = {"peak": Metric(10.0 - rank, reduction=Reduction.MAX), "found": Metric(1.0, 1.0, Reduction.SUM)}
        counted = tokens[at.dp_rank] if at.outputs else 0
        return TrainResult(applied=True, metrics={**own, **measured}, grad_norm=1.5, tokens=counted)

    results = [trained(rank) for rank in range(4)]
    found = trained_by(group_with(*layouts, train=results)[0])
    dp_size = layouts[0].dp_size
    assert found.tokens == sum(tokens[:dp_size])
    assert found.metrics == {
        "loss": Metric({1: 1.0, 2: 3.0}[dp_size], 4.0 * dp_size),
        "peak": Metric(10.0, reduction=Reduction.MAX),
        "found": Metric(4.0, 4.0, Reduction.SUM),
    }
    added = [
        GradientResult(metrics=each.metrics, tokens=each.tokens, outputs=NOTHING if at.outputs else None)
        for at, each in zip(layouts, results, strict=True)
    ]
    group, _ = group_with(*layouts, forward_backward=added)
    nothing = StepPlan(micro_batches=((),) * dp_size, filler=((),) * dp_size, scales=np.zeros(1, np.float32))
    once = group.forward_backward(batch_of(3), nothing, LOSS, outputs=LOGPROBS).result()
    assert (once.metrics, once.tokens) == (found.metrics, found.tokens)
    assert once.outputs[Output.LOGPROBS].tolist() == [0.0] * 3


@pytest.mark.parametrize("layouts", SHARED.values(), ids=SHARED.keys())
@pytest.mark.usefixtures("given_by_value")
def test_outputs_come_from_output_ranks_in_every_layout(layouts: list[ParallelLayout]) -> None:
    batch = batch_of(3, 1, 4, 2)
    shares = [(2, 0), (3, 1)] if layouts[0].dp_size == 2 else [(2, 0, 3, 1)]
    results = [result_of(batch, *shares[at.dp_rank]) if at.outputs else NOTHING for at in layouts]
    group, _ = group_with(*layouts, forward=results)
    assert group.forward(batch, LOGPROBS).result()[Output.LOGPROBS].tolist() == batch.tokens.tolist()


# ---- what each node is given -----------------------------------------------------------------------------------------


def read_by(given: tuple[Any, ...]) -> list[tuple[list[int], list[int], list[float]]]:
    """What a rank makes of its arguments: the samples, tokens and weights of each micro-batch."""
    samples, share_of_plan, *_ = given
    return [
        (micro.rows.tolist(), micro.tokens.tolist(), micro.columns["weights"].tolist())
        for micro in pack(samples, share_of_plan, sequence_multiple=2).micro_batches
    ]


@pytest.mark.usefixtures("given_by_value")
@pytest.mark.parametrize("layouts", SHARED.values(), ids=SHARED.keys())
@pytest.mark.parametrize("nodes", [list("aaaa"), list("aabb"), list("abab"), list("abcd")], ids="".join)
def test_a_node_gets_the_samples_of_its_dp_ranks(layouts: list[ParallelLayout], nodes: list[str]) -> None:
    batch = batch_of(5, 2, 7, 3, 1, 4, 6, 2).with_columns(ones=np.ones(30, np.float32))
    dp_size = layouts[0].dp_size
    group, processes = group_with(*layouts, train=[TrainResult(applied=True, metrics={}, grad_norm=1.0, tokens=1)] * 4)
    processes.nodes = nodes
    both, plan = StoredBatch(batch), training_plan(batch, dp_size)
    group.train(both, plan, LOSS, STEP).result()
    group.train(both, plan, LOSS, STEP).result()
    (_, *first), (_, *second) = processes.calls
    for at, node, given, again in zip(layouts, nodes, first, second, strict=True):
        assert read_by(given) == read_by((batch, plan.shard_of(at.dp_rank)))
        assert again[0] is given[0]  # put once
        beside = {other.dp_rank for other, where in zip(layouts, nodes, strict=True) if where == node}
        wanted = range(8) if len(set(nodes)) == 1 else plan.rows(beside).tolist()
        assert given[0].offsets.tolist() == batch.take_rows(np.array(wanted)).offsets.tolist()
        assert given[2:] == (LOSS, STEP)
    # Nodes with the same dp ranks are given the same object, and a rank no other rank's share of the plan.
    read = {frozenset(at.dp_rank for at, where in zip(layouts, nodes, strict=True) if where == node) for node in nodes}
    assert len({id(given[0]) for given in first}) == len(read)


@pytest.mark.usefixtures("given_by_value")
def test_a_forward_pass_gets_only_columns_it_reads() -> None:
    batch = batch_of(3, 1, 4, 2)
    batch = batch.with_columns(advantages=np.ones(10, np.float32), routed_experts=np.zeros((10, 1, 1), np.int16))
    for replay, columns in ((False, {"loss_mask"}), (True, {"loss_mask", "routed_experts"})):
        group, processes = group_with(forward=[result_of(batch, 2, 0), result_of(batch, 3, 1)])
        group.forward(batch, LOGPROBS, replay=replay).result()
        ((_, (given, *_), _),) = processes.calls
        assert (given.columns.keys(), given.tokens.tolist()) == (columns, batch.tokens.tolist())


def test_an_engine_has_weights_if_every_sender_says_so() -> None:
    results = [
        UpdateResult(bytes=10, seconds=0.5, engines={"engine-0": "", "engine-1": ""}),
        UpdateResult(bytes=20, seconds=0.25, engines={"engine-0": "", "engine-1": "gone"}),
    ]
    for answers in (results, results[::-1]):
        update = group_with(update_weights=answers)[0].update_weights(ADDRESS, 3).result()
        assert update == UpdateResult(bytes=30, seconds=0.5, engines={"engine-0": "", "engine-1": "gone"})


def test_a_save_is_done_when_every_rank_is() -> None:
    group, processes = group_with(
        save=[SaveResult(path="p", bytes=1, complete=False), SaveResult(path="p", bytes=2, complete=False)],
        saved=[True, False],
        sleep=[SleepResult(freed_bytes=1, residual_bytes=10), SleepResult(freed_bytes=2, residual_bytes=20)],
        wake_up=[WakeResult(restored_bytes=3), WakeResult(restored_bytes=4)],
    )
    assert group.save("p", STEP, background=True).result() == 3
    assert group.saved(wait=True).result() is False
    assert group.saved(memory=True).result() is False
    assert [rank.freed_bytes for rank in group.sleep([MemoryKind.PARAM]).result()] == [1, 2]
    assert group.wake_up().result() == 7
    assert processes.calls == [
        ("save", "p", STEP, True),
        ("saved", True, False),
        ("saved", False, True),
        ("sleep", {MemoryKind.PARAM}),
        ("wake_up", set(MemoryKind)),
    ]


def test_snapshot_verbs_pass_the_name() -> None:
    group, processes = group_with()
    snapshot = group.snapshot("reference")
    snapshot.create().result()
    snapshot.load().result()
    snapshot.load("models/m").result()
    snapshot.drop().result()
    assert processes.calls == [
        ("create_snapshot", "reference"),
        ("load_snapshot", "reference", ""),
        ("load_snapshot", "reference", "models/m"),
        ("drop_snapshot", "reference"),
    ]


def test_processes_end_even_where_a_rank_cannot_shut_down() -> None:
    group, processes = group_with(shutdown=[HookFailed("disk full")])
    with pytest.raises(HookFailed, match=r"^disk full$"):
        group.shutdown("finished")
    assert processes.killed
    group.shutdown("finished")
    assert processes.calls == [("shutdown", "finished")]


def test_an_unread_save_failure_is_raised_at_shutdown() -> None:
    group, processes = group_with(saved=[SaveFailed("disk full")], manifest=[MANIFEST, MANIFEST])
    group.saved()
    assert group.manifest().result() == MANIFEST
    with pytest.raises(SaveFailed, match=r"^disk full$"):
        group.shutdown()
    assert (processes.calls[2:], processes.killed) == ([("shutdown", "finished")], True)
    group, processes = group_with(saved=[SaveFailed("disk full")])
    with pytest.raises(SaveFailed, match=r"^disk full$"):
        group.saved().result()
    group.shutdown()
    assert processes.calls[1:] == [("shutdown", "finished")]


def cancelled(future: Future[Any]) -> None:
    """Await it in a task that is cancelled, and wait until the call has ended."""

    async def cancel() -> None:
        awaiting = asyncio.ensure_future(future)
        await asyncio.sleep(0)
        awaiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await awaiting

    asyncio.run(cancel())
    assert future.ready(paced(60.0))


@pytest.mark.parametrize(
    "ask",
    [
        lambda group, ending, later: ending.result(),
        lambda group, ending, later: later.result(),
        lambda group, ending, later: group.manifest(),
        lambda group, ending, later: group.shutdown(),
    ],
    ids=["its own result", "a later call's", "the next verb", "shutdown"],
)
def test_the_cause_of_an_end_is_raised_once(ask: Any) -> None:
    group, processes = group_with(clear_memory=[HookFailed("no luck")])
    ending, later = group.clear_memory(), group.manifest()
    cancelled(ending)
    assert processes.killed
    with pytest.raises(HookFailed, match=r"^no luck$"):
        ask(group, ending, later)
    with pytest.raises(WorkerDied, match=r"^the ranks have ended$"):
        group.manifest()
    group.shutdown()
    assert processes.calls == [("clear_memory",), ("manifest", False)]


# ---- other ranks in the place of these -------------------------------------------------------------------------------


INIT = [InitResult(layout=layout(rank), optimizer_step=2) for rank in range(2)]
SLOTS: Any = ["slot 0", "slot 1"]
AFTER = evolve(PLAN, environment={"OF": "the new ones"})


class Starting(Answers):
    """Ranks that note what they resume from."""

    resumed: Sequence[str] = ()
    moments: Sequence[bool] = ()
    slots: Any = ()
    watching: Watching | None = None

    def construct(self, arguments: Sequence[tuple[Any, ...]]) -> Pending:
        self.resumed = [assignment.config.resume for (assignment,) in arguments]
        self.moments = [assignment.config.resume_moments for (assignment,) in arguments]
        return super().construct(arguments)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[RolePlan, Any, Starting]]:
    """The plan, slots and processes of each start of ranks."""
    found: list[tuple[RolePlan, Any, Starting]] = []

    def start(plan: RolePlan, slots: Any, watching: Watching | None) -> Starting:
        new = Starting(init=INIT)
        new.slots = slots
        found.append((plan, slots, new))
        return new

    monkeypatch.setattr(group_module, "_processes", start)
    return found


def test_a_restart_ends_the_ranks_and_loads_by_another_plan(started: list[tuple[RolePlan, Any, Starting]]) -> None:
    group = TrainGroup.launch(PLAN, ["old slot"])  # type: ignore[list-item]
    assert group.restart("a part", AFTER, SLOTS).result() == INIT[0]
    (_, _, old), (plan, slots, new) = started
    assert old.killed and not new.killed and group.processes is new  # type: ignore[comparison-overlap]
    assert (new.resumed, dict(plan.environment), slots) == (["a part"] * 2, {"OF": "the new ones"}, SLOTS)
    group.restart().result()
    assert started[2][2].resumed == ["a part"] * 2 and started[2][1] is SLOTS
    group.restart("").result()
    assert started[3][2].resumed == [""] * 2


def test_a_restart_without_moments_holds_until_the_next_directory(
    started: list[tuple[RolePlan, Any, Starting]],
) -> None:
    group = TrainGroup.launch(PLAN, SLOTS)
    for again in ({"resume": "a part", "moments": False}, {}, {"resume": "other"}, {"moments": False}):
        group.restart(**again).result()  # type: ignore[arg-type]  # of several types
    found = [(new.resumed[0], new.moments) for *_, new in started[1:]]
    weights_alone, all_of_it = [False] * 2, [True] * 2
    assert found == [
        ("a part", weights_alone),
        ("a part", weights_alone),
        ("other", all_of_it),
        ("other", weights_alone),
    ]


def test_a_resize_plans_before_it_ends_a_rank(
    started: list[tuple[RolePlan, Any, Starting]], monkeypatch: pytest.MonkeyPatch
) -> None:
    group = TrainGroup.launch(PLAN, SLOTS)
    with pytest.raises(CorerlError, match=r"^actor: resize needs a group of TrainGroup.start; use restart$"):
        group.resize("a part", ranks=4)
    asked: list[dict[str, Any]] = []
    taken: list[Any] = []

    def with_sizes(config: Any, role: str, **sizes: Any) -> str:
        asked.append(sizes)
        if sizes["ranks"] == 4:
            raise ConfigError("roles.actor.ranks: 4 do not fit")
        return "resized"

    monkeypatch.setattr("corerl.plan.settle.with_sizes", with_sizes)

    def plan_group(config: Any, role: str, resume: str) -> Any:
        assert not started[0][2].killed  # what cannot be resumed from is refused before
        [assignment, *_] = AFTER.assignments
        others = [evolve(assignment, config=evolve(assignment.config, resume=resume))] * 2
        processes = SimpleNamespace(placement="a placement")
        return SimpleNamespace(processes=processes, role=evolve(AFTER, assignments=tuple(others)))

    monkeypatch.setattr("corerl.plan.group.plan_group", plan_group)
    found = {"actor": SLOTS}
    pool: Any = SimpleNamespace(arrange=lambda placement: found, take=taken.append)
    group._config, group._pool = config_for(), pool
    with pytest.raises(ConfigError):
        group.resize("a part", ranks=4)
    assert not started[0][2].killed
    assert group.resize("a part", backend="other", options={"shards": 2}) == INIT[0]
    assert asked[1] == {"ranks": 0, "backend": "other", "options": {"shards": 2}}
    assert (taken, group._config) == ([found], "resized")  # type: ignore[comparison-overlap]
    assert started[0][2].killed and started[1][2].resumed == ["a part"] * 2


# ---- over real processes ---------------------------------------------------------------------------------------------


def training_plan(batch: SampleBatch, dp_size: int = 2) -> StepPlan:
    (plan,) = plan_steps(
        batch,
        ParallelLayout.data_parallel(rank=0, world_size=dp_size),
        tokens_per_micro_batch=8,
        aggregation="token-mean",
        max_tokens=8,
        seed=0,
    )
    return plan


def test_groups_share_the_ray_of_their_process(shared_ray: None, tmp_path: Path) -> None:
    heard: list[str] = []
    begin, after = (evolve(STEP, optimizer_step=number) for number in (0, 1))
    batch = batch_of(3, 2).with_columns(loss_mask=np.array([False, True, True, False, True]))
    with ray_session(address="", cpus=2):
        with TrainGroup.start(ALONE, notify=heard.append) as one, TrainGroup.start(ALONE, notify=heard.append) as other:
            found = wait_all({name: each.forward(batch, Output.LOGPROBS) for name, each in (("a", one), ("b", other))})
            first, second = (columns[Output.LOGPROBS] for columns in found.values())
            assert first.tolist() == second.tolist() and first[1] < 0.0
            (plan,) = one.plan_steps(batch, seed=0)
            columns = dict.fromkeys(("advantages", "old_logprobs", "rollout_logprobs"), np.ones(5, np.float32))
            trained = one.train(batch.with_columns(**columns), plan, one.role_plan.objective.loss, begin).result()
            assert trained.applied
            one.save(str(tmp_path / "part"), after).result()
            with TrainGroup.start(ALONE, resume=str(tmp_path / "part")) as again:
                both = [
                    each.forward(batch, Output.LOGPROBS).result()[Output.LOGPROBS].tolist() for each in (one, again)
                ]
            assert both[0] == both[1] != first.tolist()
            with TrainGroup.start(ALONE, resume=str(tmp_path / "part"), moments=False) as anew:
                assert anew.forward(batch, Output.LOGPROBS).result()[Output.LOGPROBS].tolist() == both[0]
            with pytest.raises(ContractError, match="returned a Tensor, wanted a corerl.algorithms.LossResult"):
                one.train(batch, plan, LossSpec(name="tests.trainer.fakes:no_result"), after).result()
            with pytest.raises(WorkerDied, match=r"have ended \(.*wanted a corerl.algorithms.LossResult"):
                one.forward(batch, Output.LOGPROBS)
        assert ray.is_initialized()
    assert heard == []
