from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import attrs
import numpy as np
import pytest
from attrs import evolve

from corerl.algorithms.base import REFERENCE
from corerl.config.schema import CheckpointConfig, Config
from corerl.data.prompts import Prompt
from corerl.driver import run as driver
from corerl.driver import sampling as of_driver
from corerl.driver.advantages import TrainBatch
from corerl.driver.checkpoints import DriverPart, Saves
from corerl.driver.metrics import StepNotices, StepReports
from corerl.driver.progress import Progress
from corerl.driver.rank_recovery import RestartPoint
from corerl.driver.roles import ReferencePolicy, Role
from corerl.driver.run import Run
from corerl.driver.sampling import Evaluations, answers_in
from corerl.engines.base import SamplingParams
from corerl.engines.fleet import EngineFleet
from corerl.errors import DataError, ResizeFailed, SaveFailed
from corerl.pictures import Picture
from corerl.plan.residency import SAMPLE, save_stage
from corerl.plugin.events import Evaluated, Notice, RunRewound, SampleShown
from corerl.rollout.evaluation import EvalSet, Evaluation
from corerl.rollout.recorded import ROLLOUTS, read_rollout, saved_rollouts
from corerl.rollout.sampler import Rollout
from corerl.rollout.scored import ScoredRollout
from corerl.rollout.source import Policies
from corerl.types import Metric, Output, SampleBatch, TrainResult
from tests.driver.fakes import (
    CHOSEN,
    EXPERTS,
    Ears,
    Group,
    Source,
    colocated,
    make_engines,
    plan_of,
    progress,
    role,
    staying,
    told,
)
from tests.driver.saved import TEACHER, make_config
from tests.marked import marked
from tests.rollout import sampling
from tests.rollout.engines import Engines
from tests.rollout.listed import Listed

TRAIN = {"mini_batches": 2, "epochs": 3, "optimizer": {"lr": 1.0}, "schedule": {"decay": "linear", "final_ratio": 0.0}}


@pytest.fixture
def make_run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    monkeypatch.setattr(driver, "require_there", lambda run_dir: None)  # no directory

    def make(
        config: Config,
        *,
        actor: Group | None = None,
        ears: Ears | None = None,
        rollout_step: int = 0,
        run_dir: Path = Path(),
        **parts: Any,
    ) -> Run:
        plan, group, now = plan_of(config, run_dir), actor or Group(), progress(ears, step=rollout_step)
        reference: Any = ReferencePolicy(
            group=group,  # type: ignore[arg-type]  # the part of a TrainGroup that is used
            asked="reference" in plan.algorithm.snapshots("actor"),
            settings=plan.algorithm.settings,
            progress=now,
        )
        sampling = {
            "loop": SimpleNamespace(run=asyncio.run),
            "source": Source(),
            "sampler": "a sampler",
            "eval_sets": [],
        }
        sampling |= {name: parts.pop(name) for name in [*sampling] if name in parts}
        sampled: Any = SimpleNamespace(**sampling, restart=lambda state, checkpoint: None)
        stop = parts.pop("stop", Stop(False))
        roles = parts.pop("roles", None) or {"actor": role("actor", group, config)}
        residency, before = parts.pop("residency", staying()), {"before": parts.pop("before", ())}
        disk, memory = parts.pop("checkpoints", Files(-1)), parts.pop("memory", None)
        for saves in (disk, memory):
            if saves is not None:
                saves.progress, saves.config, saves.roles, saves.residency = now, config.checkpoint, roles, residency
        needed = [each.name for each in attrs.fields(Run) if each.default is attrs.NOTHING]
        return Run(
            **{
                **dict.fromkeys(needed),
                "plan": plan,
                "reference": reference,
                "progress": now,
                "reports": StepReports(
                    recomputes=config.algorithm.old_logprobs == "recompute",
                    roles=roles,
                    fleet=None,
                    residency=staying(),
                    progress=now,
                    notices=StepNotices(),
                ),
                "sampling": sampled,
                "evaluations": Evaluations(plan=plan, sampling=sampled, progress=now, **before),
                "saves": Saves(disk=disk, memory=memory),
                "roles": roles,
                "residency": residency,
                "groups": SimpleNamespace(plan=plan, failed=lambda message, ranks: None, stop=stop),
                "recovery": SimpleNamespace(step_done=lambda: None, around=lambda rewind: nullcontext([])),
                **parts,
            }
        )

    return make


@pytest.fixture
def engines() -> Iterator[Engines]:
    made = Engines(2)
    yield made
    made.close()


def batch() -> SampleBatch:
    """Two samples of one prompt: a token of prompt, then one and two of response."""
    rows = {"group": [0, 0], "sample": [0, 1], "response_length": [1, 2], "truncated": [False, False]}
    logprobs = [0.0, -0.5, 0.0, -0.25, -0.125]
    return marked(".x", ".xx", of_rows=rows, rollout_logprobs=logprobs, versions=[0, 3, 0, 2, 3])


def scored() -> ScoredRollout:
    rollout = Rollout(batch=batch(), prompts=(Prompt(index=0, text="a", answer="b"),), texts=["b", "bb"])
    rewards = np.array([1.0, 0.0], np.float32)
    return ScoredRollout(step=4, rollout=rollout, rewards=rewards, exact_match=None, seconds={"rollout": 1.0})


# ---- learning rate ---------------------------------------------------------------------------------------------------


def test_the_reported_learning_rate_is_the_last_one_used(make_run: Callable[..., Run]) -> None:
    ears = Ears()
    config = make_config(run={"steps": 5}, train=TRAIN)  # 5 x 2 mini-batches x 3 epochs: steps 0 to 29
    run = make_run(config, ears=ears, rollout_step=5)
    result = TrainResult(applied=True, metrics={"loss": Metric(1.0, 1.0)}, grad_norm=1.0, tokens=5)
    samples = batch().with_columns(advantages=np.ones(5, np.float32))
    trained_on = TrainBatch(samples=samples, metrics={"correction/mean": 0.75})
    run.actor.next_optimizer_step = 30
    run.report_step(scored(), trained_on, {"actor": [result] * 6})
    (event,) = ears.steps
    assert event.step == 4
    assert (event.metrics["train/lr"], event.metrics["time/rollout"]) == (0.0, 1.0)
    assert event.metrics["correction/mean"] == 0.75
    run.actor.next_optimizer_step = 1
    run.report_step(scored(), trained_on, {"actor": [result]})
    assert ears.steps[1].metrics["train/lr"] == 1.0


# ---- samples ---------------------------------------------------------------------------------------------------------


def with_experts() -> ScoredRollout:
    rollout = scored().rollout
    return evolve(scored(), rollout=evolve(rollout, batch=batch().with_columns(**{EXPERTS: CHOSEN + 100})))


OF_REFERENCE = ((Output.LOGPROBS,), REFERENCE, False)


@pytest.mark.parametrize(
    ("replay", "passed", "experts"),
    [
        ("recompute", ((Output.LOGPROBS, EXPERTS), "", False), CHOSEN),  # in one pass, and not the engine's
        ("engine", ((Output.LOGPROBS,), "", True), CHOSEN + 100),
    ],
)
def test_old_logprobs_use_the_experts_that_training_does(
    make_run: Callable[..., Run], replay: str, passed: Any, experts: Any
) -> None:
    actor = Group()
    algorithm = {"old_logprobs": "recompute", "routing_replay": replay, "kl_coef": 0.1}
    run = make_run(make_config(algorithm=algorithm), actor=actor)
    columns = run.prepare(with_experts()).samples.columns
    assert actor.passes == [passed, OF_REFERENCE]
    np.testing.assert_array_equal(columns["routed_experts"], experts)
    assert columns["routed_experts"].dtype == np.int16
    assert columns["old_logprobs"].tolist() == [0.0, -1.0, 0.0, -1.0, -1.0]


def test_missing_experts_end_the_run(make_run: Callable[..., Run]) -> None:
    run = make_run(make_config(algorithm={"routing_replay": "engine"}))
    with pytest.raises(DataError, match="'engine', and the engine 'fake' came without 'routed_experts'; set it to"):
        run.prepare(scored())


def test_a_step_without_a_loss_token_is_passed_over(make_run: Callable[..., Run]) -> None:
    ears, actor = Ears(), Group()
    run = make_run(make_config(algorithm={"overlong": "mask"}), actor=actor, ears=ears)
    cut = batch().with_row_columns(truncated=np.array([True, True]))
    trained_on = run.prepare(evolve(scored(), rollout=evolve(scored().rollout, batch=cut)))
    assert run.optimize(trained_on) == {} and actor.losses == []
    assert told(ears) == ["step 0 is skipped: none of its samples has a loss token"]


@pytest.mark.parametrize("aggregation", ["token-mean", "constant-length"])
def test_a_mini_batch_without_a_loss_token_is_skipped(aggregation: str, make_run: Callable[..., Run]) -> None:
    ears, config = Ears(), make_config(algorithm={"overlong": "mask"}, train={"mini_batches": 2, "epochs": 3})
    actor = role("actor", config=config)
    actor.group.role_plan.objective = evolve(actor.group.role_plan.objective, aggregation=aggregation)
    run = make_run(config, roles={"actor": actor}, ears=ears)
    cut = batch().with_row_columns(truncated=np.array([False, True]), group=np.array([0, 1]))
    results = run.optimize(run.prepare(evolve(scored(), rollout=evolve(scored().rollout, batch=cut))))
    assert [each.grad_norm for each in results["actor"]] == [0.0, 1.0, 2.0]  # the numbers of the steps that were done
    assert actor.next_optimizer_step == 3
    assert told(ears) == ["step 0: 3 optimizer steps of actor are skipped: their samples have no loss tokens"]


# ---- optimizer steps -------------------------------------------------------------------------------------------------


def test_a_frozen_role_takes_no_step(make_run: Callable[..., Run]) -> None:
    ears, teacher = Ears(), Group()
    roles = {"actor": role("actor"), "teacher": role("teacher", teacher, loss=None)}
    run = make_run(make_config(**TEACHER), roles=roles, ears=ears)
    trained_on = run.prepare(scored())
    assert list(run.optimize(trained_on)) == ["actor"]
    assert teacher.passes == [((Output.LOGPROBS,), "", False)] and teacher.log == []
    for _ in range(3):
        run.report_step(evolve(scored(), rewards=np.array([0.25, 0.25], np.float32)), None, {})
    assert told(ears) == []


# ---- batches ---------------------------------------------------------------------------------------------------------


class Two:
    """A source of two steps."""

    def __init__(self) -> None:
        self.steps = [evolve(scored(), step=0), evolve(scored(), step=1)]

    async def arrived(self) -> None:
        return None

    async def next(self) -> ScoredRollout | None:
        return self.steps.pop(0) if self.steps else None


def halve(batch: ScoredRollout) -> ScoredRollout:
    return evolve(batch, rewards=batch.rewards / 2)


@pytest.mark.parametrize(
    ("table", "kept"), [({"rollout": {"save": True}}, 2), ({"run": {"mode": "rollout-only"}}, 2), ({}, 0)], ids=str
)
def test_saved_batches_are_not_postprocessed(
    make_run: Callable[..., Run], tmp_path: Path, table: Any, kept: int
) -> None:
    plan = plan_of(make_config(**table), tmp_path)
    plan = evolve(plan, rollout=evolve(plan.rollout, postprocess=halve))
    batches = make_run(make_config(), plan=plan, source=Two()).rollouts()
    for step in range(2):
        batch, _ = next(batches)
        assert (batch.step, batch.rewards.tolist()) == (step, [0.5, 0.0])
        files = saved_rollouts(tmp_path) if kept else []
        assert len(files) == min(kept, step + 1)  # written before anything is made of it
        assert [read_rollout(file).rewards.tolist() for file in files] == [[1.0, 0.0]] * len(files)
    assert next(batches, None) is None
    assert not kept or [file.parent for file in saved_rollouts(tmp_path)] == [tmp_path / ROLLOUTS] * 2


def test_new_engines_get_the_weights_when_all_have_died(make_run: Callable[..., Run], engines: Engines) -> None:
    actor, ears, source = Group(), Ears(), sampling.source(engines, steps=1)
    updates = make_engines(make_config(), actor, engines.fleet, ears)
    run = make_run(make_config(), actor=actor, engines=updates, loop=engines.fleet.loop, source=source)
    run.push_weights()
    engines.die()
    ((batch, _),) = run.rollouts()
    columns = batch.rollout.batch.columns
    assert set(columns["versions"][columns["loss_mask"]]) == {1}
    assert actor.log == ["send 0", "send 1"]
    assert sorted(told(ears)) == [f"engine-{n} is replaced: engine-{n}: its process died" for n in (0, 1)]


@pytest.mark.parametrize(("mode", "goes_on"), [("train", 40), ("rollout-only", 2)])
def test_only_what_is_trained_goes_back_to_a_checkpoints_step(
    make_run: Callable[..., Run], mode: str, goes_on: int
) -> None:
    """A run that only samples has but the weights of a checkpoint, whose step and prompts are another run's."""
    ears, source, restarted = Ears(), Source(), list[Any]()
    run = make_run(make_config(run={"mode": mode}), ears=ears, source=source, rollout_step=2)
    run.sampling.restart = lambda state, checkpoint: restarted.append((state["source"], checkpoint))  # type: ignore[method-assign]
    checkpoint = Path("/run/checkpoints/step-00000040")
    run._restore(RestartPoint(checkpoint=checkpoint, state={"rollout_step": 40, "source": "the checkpoint's"}))
    assert restarted == [("the checkpoint's", checkpoint) if mode == "train" else (source.position, None)]
    assert [event.step for event in ears.of(RunRewound)] == [run.progress.steps_done] == [goes_on]


# ---- weights ---------------------------------------------------------------------------------------------------------


def test_weights_are_pushed_on_schedule_and_before_an_evaluation(make_run: Callable[..., Run]) -> None:
    actor = Group()
    config = make_config(weights={"every": 3}, run={"steps": 7})
    for eval_sets, expected in (([a_set(every=4)], [1, 3, 4, 6, 7]), ([], [1, 3, 6])):
        updates = make_engines(config, actor, Group())
        run = make_run(config, actor=actor, engines=updates, rollout_step=1, eval_sets=eval_sets)  # empty engines
        pushed = []
        for run.progress.steps_done in range(1, 8):
            before = len(actor.log)
            run.push_weights()
            pushed += [run.progress.steps_done] if len(actor.log) > before else []
            actor.changes += 1
        assert pushed == expected


def test_dead_engines_are_replaced_where_no_update_is_due(make_run: Callable[..., Run]) -> None:
    actor, fleet = Group(), Group()
    run = make_run(make_config(), actor=actor, engines=make_engines(make_config(), actor, fleet))
    run.push_weights()
    fleet.log.clear()
    run.push_weights_and_sleep()
    assert fleet.log == []
    fleet.any_dead = True
    run.push_weights_and_sleep()
    assert fleet.log == ["replace engine-1: WorkerDied: its process died", "receive 1"]


def test_each_verb_of_a_step_finds_its_memory_resident(make_run: Callable[..., Run]) -> None:
    both = Group()  # one log of ranks and engines, so that the order between the two shows
    config = make_config(algorithm={"old_logprobs": "recompute"}, checkpoint={"every": 1})
    residency = colocated({"actor": both}, passed=["actor"], fleet=both)
    updates = make_engines(config, both, both, residency=residency, version=4)
    saves = Files(-1)
    run = make_run(
        config, actor=both, engines=updates, residency=residency, checkpoints=saves, source=Source(), run_dir=Path()
    )
    residency.enter(SAMPLE)
    both.log.clear()
    trained_on = run.prepare(scored())
    run.optimize(trained_on)
    run.push_weights()
    run.save()
    run.sleep_ranks()
    assert both.log == [
        "sleep",  # the engines
        "wake param",
        "wake grad master optimizer",
        "train at 0 of 0",
        "sleep grad master optimizer",
        "wake",
        "send 4",
        "receive 4",
        "wake master optimizer",
        "sleep master optimizer param",
    ]
    assert saves.log[1] == ("start 0", True)


# ---- do trainer and engines agree? -----------------------------------------------------------------------------------


class Judging:
    """A check that is due, and what it is given."""

    due = True

    def __init__(self) -> None:
        self.sampled = batch().with_row_columns(group=np.array([7, 7]))
        self.judged: list[SampleBatch] = []

    async def sample(self) -> SampleBatch:
        return self.sampled

    def judge(self, samples: SampleBatch, trainer: Any) -> None:
        np.testing.assert_array_equal(trainer, np.where(samples.columns["loss_mask"], -1.0, 0.0))
        self.judged.append(samples)


def engines_with(policies: Policies) -> Any:
    parts = {"fleet": Mock(spec=EngineFleet), "serve": lambda work, update: asyncio.run(work)}
    return SimpleNamespace(policies=policies, up_to_date=True, **parts)


def test_samples_of_the_current_weights_are_compared(make_run: Callable[..., Run]) -> None:
    for policies, groups in ((Policies(version=3, repeats=(3,)), [0, 0]), (Policies(version=4), [7, 7])):
        check, engines = Judging(), engines_with(policies)
        make_run(make_config(), logprob_check=check, engines=engines).prepare(scored())
        (judged,) = check.judged
        assert judged.row_columns["group"].tolist() == groups  # those of the batch, or others if all are older
        assert engines.fleet.forget_prefixes.called is (groups == [7, 7])  # what engines sampled for the check alone
        engines.up_to_date = False  # engines hold other weights
        make_run(make_config(), logprob_check=check, engines=engines).prepare(scored())
        assert len(check.judged) == 1


def test_samples_are_compared_by_the_experts_that_training_replays(make_run: Callable[..., Run]) -> None:
    actor, given = Group(), with_experts()
    check, config = Judging(), make_config(algorithm={"routing_replay": "engine"})
    make_run(config, actor=actor, logprob_check=check, engines=engines_with(Policies(version=3))).prepare(given)
    assert actor.passes == [((Output.LOGPROBS,), "", True)] and len(check.judged) == 1


# ---- evaluation ------------------------------------------------------------------------------------------------------


def a_set(name: str = "", *, every: int = 25) -> tuple[EvalSet, Any, Any]:
    """A prompt, and neither sampler nor reward: what evaluates it is a test's own."""
    prompts = [Prompt(index=0, text="a", answer="b")]
    return EvalSet(name=name, every=every, source=Listed(prompts), params=SamplingParams()), None, None


@pytest.mark.parametrize("at_start", [True, False])
def test_each_set_is_evaluated_at_its_own_steps(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, at_start: bool
) -> None:
    async def evaluate(sampler: Any, eval_set: EvalSet, reward: Any) -> Evaluation:
        name, step = eval_set.name, run.progress.steps_done
        shown = (SampleShown(prompt=name, response="", answer="", reward=0.0),)
        told: Any = {"failures": {"raised": 2}, "first_failure": "why"}
        return Evaluation(metrics={f"eval/{name}": float(step)}, shown=shown, samples=shown, **told)

    monkeypatch.setattr(of_driver, "evaluate", evaluate)
    heard = list[Any]()
    monkeypatch.setattr(Progress, "emit", lambda self, event: heard.append(event))
    sets = [a_set("a", every=2), a_set("b", every=3), a_set("c", every=0), a_set("d", every=10)]
    run = make_run(make_config(run={"steps": 7}, eval={"at_start": at_start}), eval_sets=sets)
    for run.progress.steps_done in range(8):
        run.evaluate()
    evaluated = [event for event in heard if isinstance(event, Evaluated)]
    wanted = {**({0: "abd"} if at_start else {}), 2: "a", 3: "b", 4: "a", 6: "ab", 7: "abd"}
    assert {event.step: "".join(shown.prompt for shown in event.samples) for event in evaluated} == wanted
    assert all(event.metrics == {f"eval/{name}": event.step for name in wanted[event.step]} for event in evaluated)
    notices = {event.text for event in heard if isinstance(event, Notice)}
    assert notices == {f"evaluation of '{name}': 2 samples failed; the first: why" for name in "abd"}
    run.evaluate(always=True)
    assert [shown.prompt for shown in heard[-2].samples] == ["a", "b", "c", "d"]


# ---- the end ---------------------------------------------------------------------------------------------------------


class Files:
    """Checkpoints of a run: the newest one begun, and what more was asked."""

    progress: Progress
    config: CheckpointConfig
    roles: Mapping[str, Role]
    residency: Any

    def __init__(self, last_step: int) -> None:
        self.last_step = last_step
        self.newest: Path | None = Path("/run/checkpoints/newest")
        self.log: list[tuple[str, bool]] = []
        self.states: list[dict[str, Any]] = []

    def start(self, driver: DriverPart, *, background: bool) -> None:
        step = self.progress.steps_done
        driver.write(Path("/run/checkpoints/partial"))
        self.residency.enter(save_stage("actor"))
        assert driver.state["rollout_step"] == step
        self.states.append(dict(driver.state))
        self.log.append((f"start {step}", background))

    def due(self, step: int) -> bool:
        return True

    def complete(self, *, wait: bool) -> None:
        self.log.append(("complete", wait))


class Stop:
    def __init__(self, requested: bool) -> None:
        self.requested = requested


@pytest.mark.parametrize(("mode", "stops_at"), [("train", [3, 6]), ("rollout-only", [1, 2, 3, 4, 5, 6])])
def test_only_runs_that_can_resume_go_on_until_they_can(
    make_run: Callable[..., Run], mode: str, stops_at: list[int]
) -> None:
    run = make_run(make_config(run={"mode": mode}, weights={"every": 3}), stop=Stop(True))
    found = []
    for run.progress.steps_done in range(1, 7):
        found += [run.progress.steps_done] if run.stopping else []
    assert found == stops_at


def test_the_end_saves_and_waits_for_background_saves(make_run: Callable[..., Run]) -> None:
    for last_step, log in ((4, [("start 5", False), ("complete", True)]), (5, [("complete", True)])):
        saves, source = Files(last_step), Source()
        run = make_run(
            make_config(), checkpoints=saves, rollout_step=5, stop=Stop(True), source=source, run_dir=Path("/run")
        )
        summary = run.finish()
        assert saves.log == log
        assert len(source.saved) == (last_step == 4)  # beside the roles' files
        # Interrupted, so nothing is exported.
        assert (summary.reason, summary.steps_done, summary.run_dir) == ("interrupted", 5, Path("/run"))


@pytest.mark.parametrize("pictures", [(), (Picture(np.zeros((2, 3, 3), np.uint8)),)])
def test_a_resumed_run_shows_the_answers_from_before_training(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pictures: tuple[Picture, ...]
) -> None:
    names = tuple(each.id[:16] for each in pictures)

    def answers(response: str, prompt: str = "a") -> tuple[SampleShown, ...]:
        return (SampleShown(prompt=prompt, response=response, answer="b", reward=0.5, pictures=names),)

    def evaluating(response: str, **parts: Any) -> tuple[Run, Files, Ears]:
        async def evaluate(*_: Any, **__: Any) -> Evaluation:
            return Evaluation(metrics={}, shown=answers(response), pictures=pictures)

        monkeypatch.setattr(of_driver, "evaluate", evaluate)
        saves, ears = Files(-1), Ears()
        common = {"eval_sets": [a_set()], "source": Source(), "stop": Stop(True), "run_dir": tmp_path}
        run = make_run(make_config(), checkpoints=saves, ears=ears, **common, **parts)
        run.evaluate()
        run.finish()
        return run, saves, ears

    _, saves, _ = evaluating("at first")
    (state,) = saves.states
    restored = answers_in(json.loads(json.dumps(state)))
    _, saves, ears = evaluating("at the resume", before=restored, rollout_step=25)
    assert (ears.finished[0].before, ears.finished[0].after) == (answers("at first"), answers("at the resume"))
    assert answers_in(saves.states[0]) == answers("at first")
    assert ears.finished[0].artifacts.get("pictures") == (str(tmp_path / "pictures") if pictures else None)
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.png")] == [
        f"pictures/{name}.png" for name in names
    ]
    # Those of other data say nothing of these: they were answers to other prompts.
    _, _, ears = evaluating("at the resume", before=answers("of other data", prompt="c"), rollout_step=25)
    assert (ears.finished[0].before, ears.finished[0].after) == (answers("at the resume"),) * 2


class Full(Files):
    """In-memory checkpoints without room."""

    def start(self, driver: DriverPart, *, background: bool) -> None:
        raise SaveFailed("no space left in memory")

    def give_up(self) -> None:
        self.newest = None
        self.log.append(("give up", True))


def test_in_memory_saves_are_resumable_and_end_no_run(make_run: Callable[..., Run]) -> None:
    ears, config = Ears(), make_config(weights={"every": 2}, checkpoint={"every": 2})
    saved: dict[str, Any] = {"source": Source(), "ears": ears}
    memory = Files(0)
    for step in (1, 2):
        make_run(config, checkpoints=Files(0), memory=memory, rollout_step=step, **saved).save()
    assert memory.log == [("start 2", True), ("complete", False)]
    run = make_run(config, checkpoints=Files(0), memory=(full := Full(0)), rollout_step=2, **saved)
    run.save()
    assert run.saves.memory is None and full.log == [("give up", True)]
    assert told(ears) == ["no more in-memory checkpoints: no space left in memory"]


class Asking:
    """Extensions that are asked; these groups are changed."""

    plan = SimpleNamespace(record={})

    def __init__(self, changed: set[str]) -> None:
        self.changed, self.saved, self.stop = changed, list[Path](), Stop(False)

    def between_steps(self, save: Callable[[], Path]) -> set[str]:
        self.saved.append(save())
        return self.changed


@pytest.mark.parametrize("changed", [[], ["engines"], ["actor", "engines"]], ids=str)
def test_extensions_are_asked_after_each_step_but_the_last(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, changed: list[str]
) -> None:
    done: list[tuple[str, int]] = []
    monkeypatch.setattr(Run, "push_weights", lambda run: done.append(("push", run.progress.steps_done)))
    monkeypatch.setattr(ReferencePolicy, "begin", lambda policies, *, resumed: done.append(("snapshots", resumed)))
    asking = Asking(set(changed))
    every = {"algorithm": {"reference_every": 2, "kl_coef": 0.1}, "run": {"steps": 9}}
    engines = SimpleNamespace(
        new_rendezvous=lambda: done.append(("rendezvous", run.progress.steps_done)),
        mark_current=lambda: done.append(("current", run.progress.steps_done)),
    )
    run = make_run(make_config(**every), groups=asking, checkpoints=Files(-1), source=Source(), engines=engines)
    for step in (1, 2, 4, 9):  # at 1 the reference policy is one that no checkpoint has
        run.progress.steps_done = step
        run.between_steps()
    assert len(asking.saved) == 2
    after = {0: [], 1: ["rendezvous", "push"], 2: ["snapshots", "current", "rendezvous", "push"]}[len(changed)]
    assert done == [(what, step if what != "snapshots" else True) for step in (2, 4) for what in after]
    asking.stop = Stop(True)
    run = make_run(make_config(run={"steps": 9}), groups=asking, rollout_step=3)
    run.between_steps()
    assert len(asking.saved) == 2


def test_a_checkpoint_to_restart_from_is_in_memory_if_possible(make_run: Callable[..., Run]) -> None:
    def saved(*, memory: Files | None, disk: Files) -> Path:
        run = make_run(make_config(), checkpoints=disk, memory=memory, rollout_step=4, source=Source())
        return run.saves.for_restart(run._driver_part)

    disk, memory = Files(2), Files(4)
    memory.newest = Path("/dev/shm/newest")
    assert saved(memory=memory, disk=disk) == memory.newest
    assert (memory.log, disk.log) == ([("complete", True)], [("complete", True)])  # both are written by then
    assert saved(memory=Full(3), disk=disk) == disk.newest
    assert disk.log[-1] == ("start 4", False)
    disk = Files(4)
    assert saved(memory=None, disk=disk) == disk.newest and disk.log == [("complete", True)]
    with pytest.raises(ResizeFailed, match="^no checkpoint to restart from: no space left in memory$"):
        saved(memory=None, disk=Full(3))
