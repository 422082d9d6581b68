from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from attrs import define, evolve

from corerl.checkpoint.commit import read_state
from corerl.config.load import recorded
from corerl.config.schema import CheckpointConfig, Config, DataConfig, DataSource, RunConfig
from corerl.config.toml_text import to_plain
from corerl.data.prompts import PromptSource, PromptStream
from corerl.data.rows import load_prompts
from corerl.driver.export import export
from corerl.errors import CheckpointError, ConfigError, NothingLeft, UserError
from corerl.messages import install_hint
from corerl.plan.make import make_plan
from corerl.plan.plan import Plan
from corerl.plan.resume import checkpoint_to_resume, require_writable
from corerl_data.changed import resume_data
from tests.data.files import load, write
from tests.driver.saved import config_in, make_config, make_model, save
from tests.in_process import execute_here, small


def test_which_checkpoint_a_run_goes_on_from(tmp_path: Path) -> None:
    config = make_config()
    model = make_model(config, seed=1)
    run, empty = tmp_path / "run", tmp_path / "empty"
    older, newest = (save(run, config, model, step=step) for step in (2, 4))
    assert checkpoint_to_resume(config_in(empty), empty, starting=True) == (None, {})
    assert checkpoint_to_resume(config_in(empty, "auto"), empty, starting=True) == (None, {})
    assert checkpoint_to_resume(config_in(run, "auto"), run, starting=True) == (newest, {})
    assert checkpoint_to_resume(config_in(empty, str(older)), empty, starting=True) == (older, {})
    assert checkpoint_to_resume(config_in(empty, str(run)), empty, starting=True) == (newest, {})  # of another run
    assert checkpoint_to_resume(config_in(run, str(run)), run, starting=True) == (newest, {})
    assert checkpoint_to_resume(config_in(run, str(newest)), run, starting=True) == (newest, {})
    for resume in ("never", str(older)):
        with pytest.raises(ConfigError, match=r"already holds a run \(step-00000004\)"):
            checkpoint_to_resume(config_in(run, resume), run, starting=True)
    assert checkpoint_to_resume(config_in(run), run, starting=False) == (None, {})


def test_a_resumed_run_tells_which_checkpoints_it_passes_over(tmp_path: Path) -> None:
    config = make_config()
    older, newest = (save(tmp_path, config, make_model(config, seed=1), step=step) for step in (2, 4))
    (newest / "actor/rank-00001.json").unlink()
    resume, skipped = checkpoint_to_resume(config_in(tmp_path, "auto"), tmp_path, starting=True)
    assert resume == older and skipped.keys() == {newest}
    assert skipped[newest].startswith(f"{newest}/actor/rank-00001.json is missing")
    assert checkpoint_to_resume(config_in(tmp_path, str(older)), tmp_path, starting=False) == (
        older,
        {},
    )  # chosen by hand
    elsewhere = tmp_path / "elsewhere"
    assert checkpoint_to_resume(config_in(elsewhere, str(tmp_path)), elsewhere, starting=True) == (older, skipped)
    (line,) = make_plan(config_in(tmp_path, "auto")).start.lost
    found = "checkpoint.resume: skipping step-00000004, the run falls back to an older checkpoint: "
    assert line.startswith(f"{found}{newest}/actor/rank-00001.json is missing")
    shutil.rmtree(older)
    with pytest.raises(ConfigError) as caught:
        checkpoint_to_resume(config_in(elsewhere, str(tmp_path)), elsewhere, starting=True)
    assert caught.value.message == (
        f"checkpoint.resume: {tmp_path} is a run without an intact checkpoint: {newest}/actor/rank-00001.json is "
        "missing; the checkpoint is damaged; set the path of another run or checkpoint"
    )
    shutil.rmtree(newest)
    with pytest.raises(ConfigError, match="^checkpoint.resume: .* is a run without a complete checkpoint; set the"):
        checkpoint_to_resume(config_in(elsewhere, str(tmp_path)), elsewhere, starting=True)


@pytest.mark.parametrize("resume", ["never", "auto", "elsewhere"])
def test_a_run_with_only_damaged_checkpoints_is_not_restarted(tmp_path: Path, resume: str) -> None:
    config = make_config()
    elsewhere, only = (save(tmp_path / name, config, make_model(config, seed=1), step=4) for name in ("other", "run"))
    (only / "actor/rank-00001.json").unlink()
    chosen = config_in(tmp_path / "run", str(elsewhere) if resume == "elsewhere" else resume)
    with pytest.raises(ConfigError) as caught:
        checkpoint_to_resume(chosen, tmp_path / "run", starting=True)
    if resume == "auto":  # a check refuses what the run would
        with pytest.raises(ConfigError, match="none of its checkpoints can be resumed"):
            checkpoint_to_resume(chosen, tmp_path / "run", starting=False)
    else:
        begun, _ = checkpoint_to_resume(chosen, tmp_path / "run", starting=False)
        assert begun == (elsewhere if resume == "elsewhere" else None)
    line = f"run.dir: {tmp_path}/run already holds a run, but none of its checkpoints can be resumed: "
    assert caught.value.message.startswith(f"{line}{only}/actor/rank-00001.json is missing")
    assert caught.value.message.endswith(f"to start over here, remove {only.parent}")


@pytest.mark.parametrize("resume", ["never", "auto", "newest"])
@pytest.mark.parametrize(
    ("mode", "advice"), [("eval", "set another run.dir, or use: corerl eval "), ("rollout-only", "set another run.dir")]
)
def test_sampling_and_scoring_do_not_overwrite_a_trained_run(
    tmp_path: Path, mode: Any, advice: str, resume: str
) -> None:
    config = make_config()
    checkpoint = save(tmp_path, config, make_model(config, seed=1), step=4)
    config = config_in(tmp_path, str(checkpoint) if resume == "newest" else resume)
    config = evolve(config, run=evolve(config.run, mode=mode))
    with pytest.raises(ConfigError) as caught:
        make_plan(config)
    line = f"run.dir: {tmp_path} already holds a run (step-00000004), whose results run.mode={mode!r} would overwrite"
    assert caught.value.message.startswith(f"{line}; {advice}")
    assert make_plan(config, starting=False).first_step == (0 if resume == "never" or mode == "rollout-only" else 4)


@pytest.mark.parametrize("kept", [{"run": {"mode": "rollout-only"}}, {"rollout": {"save": True}}])
def test_rollouts_of_two_runs_are_not_mixed(kept: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "run/rollouts").mkdir(parents=True)
    config = make_config(**kept)
    config = evolve(config, run=evolve(config.run, dir=str(tmp_path / "run")))
    checkpoint = save(tmp_path / "other", config, make_model(config, seed=1), step=4)
    for resume in ("never", "auto", str(checkpoint)):
        with pytest.raises(ConfigError, match=r"^run.dir: .* already holds rollouts, which would be mixed with new"):
            make_plan(evolve(config, checkpoint=CheckpointConfig(resume=resume)))


def test_a_resumed_run_continues_intact_metrics_of_its_directory(tmp_path: Path) -> None:
    config = make_config()
    own, other = (save(tmp_path / name, config, make_model(config, seed=1), step=4) for name in ("own", "other"))
    assert make_plan(config_in(tmp_path / "own", str(own))).start.same_run
    assert not make_plan(config_in(tmp_path / "new", str(other))).start.same_run
    assert not make_plan(config_in(tmp_path, str(other))).start.same_run  # of a run in a directory below
    (tmp_path / "own/metrics.jsonl").write_text('{"step": 0}\n{"step": 1, "a"\n{"step": 2}\n')
    with pytest.raises(ConfigError) as caught:
        make_plan(config_in(tmp_path / "own", "auto"))
    where = f"{tmp_path}/own/metrics.jsonl:2"
    assert (
        caught.value.message
        == f'run.dir: {where}: \'{{"step": 1, "a"\' is not an object with a step; fix or delete the line'
    )


def test_an_export_does_not_replace_a_foreign_model(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(
        ConfigError, match=r"^run.dir: .*/model already exists, and the run would replace it with its export"
    ):
        make_plan(config_in(tmp_path))
    config = config_in(tmp_path)
    assert make_plan(config, starting=False).start.run_dir == tmp_path
    assert make_plan(evolve(config, checkpoint=CheckpointConfig(export=False))).start.run_dir == tmp_path
    save(tmp_path, config, make_model(config, seed=1), step=4)  # then it is its own
    assert make_plan(config_in(tmp_path, "auto")).first_step == 4


def test_a_run_whose_steps_are_done_does_not_start_again(tmp_path: Path) -> None:
    config = make_config()
    run = tmp_path / "run"
    checkpoint = save(run, config, make_model(config, seed=1), step=4)

    def resumed(directory: Path, resume: str, *, steps: int, export: bool = True) -> Config:
        return evolve(
            config,
            run=RunConfig(dir=str(directory), steps=steps),
            checkpoint=CheckpointConfig(resume=resume, export=export),
        )

    def refused(resumed: Config, error: type[UserError] = ConfigError) -> str:
        with pytest.raises(UserError) as caught:
            make_plan(resumed)
        assert type(caught.value) is error
        return caught.value.message

    before = f"run.steps: 3, but the checkpoint {checkpoint} has already done 4; raise run.steps to continue"
    assert refused(resumed(run, "auto", steps=3)) == before
    assert make_plan(resumed(run, "auto", steps=3), starting=False).first_step == 4  # what only looks at it may
    others = f"run.steps: 4, but the checkpoint {checkpoint} has already done 4; raise run.steps to continue"
    assert refused(resumed(tmp_path / "new", str(checkpoint), steps=4)) == others
    done = f"run.steps: 4, which {run} has already done: nothing is left to do; raise run.steps to continue"
    assert refused(resumed(run, "auto", steps=4, export=False), NothingLeft) == done

    # It was killed before it had exported its last checkpoint: that is left to do, also over an earlier export.
    assert make_plan(resumed(run, "auto", steps=4)).first_step == 4
    written = export(checkpoint, run / "model")
    exported = (
        f"run.steps: 4, which {run} has already done and {run}/model is its export: nothing is left to do; raise "
    )
    assert refused(resumed(run, "auto", steps=4), NothingLeft) == f"{exported}run.steps to continue"
    os.utime(written / "config.json", (0, 0))
    assert make_plan(resumed(run, "auto", steps=4)).first_step == 4


# ---- secrets ---------------------------------------------------------------------------------------------------------


def test_no_file_of_a_run_holds_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "t0ken-of-the-user")
    given = [
        *("cluster.environment.API_KEY=k3y-of-a-service", 'cluster.secrets=["HF_TOKEN"]', "checkpoint.keep=0"),
        *("extensions=[{name='jsonl'}, {name='trace'}, {name='tensorboard'}]", "rollout.save=true"),
    ]
    assert execute_here(small(tmp_path, *given, "run.steps=1")).reason == "finished"
    other = [*given, "cluster.environment.API_KEY=an0ther-k3y", "checkpoint.resume=auto", "run.steps=2"]
    assert execute_here(small(tmp_path, *other)).reason == "finished"
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {"config.toml", "config-1.toml", "checkpoint.json", "metrics.jsonl"} <= {path.name for path in files}
    for path in files:
        content = path.read_bytes()
        assert not any(word in content for word in (b"t0ken", b"k3y-of", b"an0ther")), path
    (state,) = (read_state(path)["config"] for path in (tmp_path / "run" / "checkpoints").glob("step-*2"))
    assert (state["cluster"]["environment"], state["cluster"]["secrets"]) == ({}, ["HF_TOKEN", "API_KEY"])
    before, now = to_plain(recorded(small(tmp_path, *given))), to_plain(recorded(small(tmp_path, *other)))
    assert before["cluster"] == now["cluster"]


def test_a_directory_without_write_access_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_writable(tmp_path / "not/there/yet")
    assert not (tmp_path / "not").exists()
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)  # root may write anywhere
    with pytest.raises(
        ConfigError, match=rf"^run.dir: .*/run \({tmp_path}: Permission denied\); set another directory$"
    ):
        require_writable(tmp_path / "run")


# ---- data that are not the checkpoint's ------------------------------------------------------------------------------

HELD_OUT = "data.held_out: 20 (was 16); rows that were trained on and are held out now: 4"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    config = make_config()
    return save(tmp_path / "run", config, make_model(config, seed=1), step=2)


def plan_with(checkpoint: Path, *, mode: str = "train", starting: bool = True, **data: Any) -> Plan:
    config = config_in(checkpoint.parents[2] / "other", str(checkpoint), data={"held_out": 16, **data})
    return make_plan(evolve(config, run=evolve(config.run, mode=mode)), starting=starting)


@pytest.mark.parametrize("starting", [True, False])
def test_other_data_are_refused_by_run_and_check(checkpoint: Path, starting: bool) -> None:
    with pytest.raises(CheckpointError) as caught:
        plan_with(checkpoint, starting=starting, held_out=20)
    assert caught.value.message == (
        f"checkpoint.resume: the data are not the checkpoint's: {HELD_OUT}; use the same [data] and run.seed, or set "
        "data.restart=true to begin these at their first prompt, with the checkpoint's weights, optimizer and step"
    )


def test_without_a_wheel_that_compares_rows_only_the_same_are_trained_on_further(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("corerl.plan.resume.formats_here", list)
    assert plan_with(checkpoint).first_step == 2
    other = f"the data are not the checkpoint's: other rows, another order .*{re.escape(install_hint('data'))}"
    with pytest.raises(CheckpointError, match=f"{other}.* or set data.restart=true"):
        plan_with(checkpoint, held_out=20)
    for plan in (plan_with(checkpoint, held_out=20, restart=True), plan_with(checkpoint, mode="eval", held_out=20)):
        assert any("not the checkpoint's: other rows" in each for each in plan.notices)


OLD = [f"p{n}" for n in range(20)]
NEW = [f"q{n}" for n in range(8)]


def rows(path: Path, texts: Sequence[str]) -> Path:
    return write(path, *(json.dumps({"prompt": text}) for text in texts))


@define
class Drawing:
    """A run, as far as it draws prompts."""

    source: PromptSource
    stream: PromptStream
    lines: list[str]
    differs: str

    def draw(self, count: int) -> list[str]:
        return [prompt.text for prompt in self.stream.take(count)]

    @property
    def held_out(self) -> list[str]:
        return [prompt.text for prompt in self.source.held_out_prompts()]

    @property
    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"data": self.source.record, "source": {"prompts": self.stream.position}}
        return json.loads(json.dumps(state))


def begun(source: PromptSource, state: dict[str, Any] | None = None, *, seed: int = 0) -> Drawing:
    """A run, fresh or from a checkpoint's `state`."""
    lines, differs = resume_data(source, state, seed=seed) if state else ([], "")
    stream = PromptStream(source, seed=seed)
    if state:
        assert stream.restore(state["source"]["prompts"]) is not bool(differs)
    return Drawing(source=source, stream=stream, lines=lines, differs=differs)


@pytest.fixture
def first(tmp_path: Path) -> Drawing:
    """A run on the old rows, of which it has drawn 6 of 16."""
    run = begun(load(rows(tmp_path / "old.jsonl", OLD), held_out=4))
    run.draw(6)
    return run


@pytest.fixture
def resumed(tmp_path: Path, first: Drawing) -> Any:
    def resume(texts: Sequence[str], *, held_out: int = 4, seed: int = 0) -> Drawing:
        return begun(load(rows(tmp_path / "now.jsonl", texts), held_out=held_out), first.state, seed=seed)

    return resume


@pytest.mark.parametrize("drawn", [0, 4, 10, 13, 18, 30, 70])
def test_a_run_with_added_rows_is_resumed_where_it_stood(
    first: Drawing, resumed: Any, tmp_path: Path, drawn: int
) -> None:
    more = resumed(OLD + NEW)
    more.draw(drawn)
    later = begun(load(rows(tmp_path / "later.jsonl", (OLD + NEW)[::-1]), held_out=4), more.state)
    assert not later.differs and later.source.record == more.source.record
    assert later.draw(60) == more.draw(60)
    # And once more, with further rows in the same epoch.
    last = ["r0", "r1"]
    further = begun(load(rows(tmp_path / "further.jsonl", [*OLD, *NEW, *last]), held_out=4), later.state)
    following, expected = further.draw(90), later.draw(90)
    rest = next(n for n, text in enumerate(following) if text in last)
    assert following[:rest] == expected[:rest]
    assert sorted(following[rest : rest + 2]) == last


def test_further_rows_are_held_out_of_untrained_ones(first: Drawing, resumed: Any) -> None:
    more = resumed(OLD + NEW, held_out=9)
    assert not more.differs and "data: new rows that are held out: 5" in more.lines
    assert more.held_out[:4] == first.held_out and {*more.held_out[4:]} < {*NEW}
    assert more.draw(10) == first.draw(10)
    assert not {*more.draw(60)} & {*more.held_out}


@pytest.mark.parametrize(
    ("texts", "held_out", "said"),
    [
        (NEW, 4, ["8 of 8 rows are new, 20 of 20 are gone"]),
        (OLD[:15], 4, ["0 of 15 rows are new, 5 of 20 are gone"]),
        ([*OLD[1:], "p0, edited"], 4, ["1 of 20 rows are new, 1 of 20 are gone"]),
        (OLD, 6, ["data.held_out: 6 (was 4)", "rows that were trained on and are held out now: 2"]),
        (OLD, 1, ["data.held_out: 1 (was 4)"]),
        (
            OLD + NEW,
            14,
            [
                "data.held_out: 14 (was 4)",
                "8 of 28 rows are new, 0 of 20 are gone",
                "rows that were trained on and are held out now: 2",
            ],
        ),
    ],
)
def test_other_rows_are_told_and_begin_at_their_first_prompt(
    first: Drawing, resumed: Any, texts: list[str], held_out: int, said: list[str]
) -> None:
    other = resumed(texts, held_out=held_out)
    assert other.lines == [] and other.differs.split("; ")[: len(said)] == said
    assert {*other.held_out} >= {*first.held_out[:held_out]} & {*texts}
    train = {*texts} - {*other.held_out}
    epochs = [other.draw(len(train)) for _ in range(2)]
    assert {*epochs[0]} == {*epochs[1]} == train
    assert epochs[0] != epochs[1]


def test_another_seed_is_another_order(first: Drawing, resumed: Any) -> None:
    other = resumed(OLD, seed=3)
    assert other.differs == "run.seed: 3 (was 0)"
    assert other.held_out == first.held_out


# ---- several sources -------------------------------------------------------------------------------------------------


def mixed(directory: Path, *, held_out: int = 2, weights: Sequence[float] = (3, 1), **texts: Sequence[str]) -> Any:
    sources = tuple(
        DataSource(source=str(rows(directory / f"{name}.jsonl", each)), weight=weight)
        for (name, each), weight in zip(texts.items(), weights, strict=False)
    )
    return load_prompts(DataConfig(sources=sources, held_out=held_out), seed=0)


A, B = [f"a{n}" for n in range(12)], [f"b{n}" for n in range(7)]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"b": B, "a": A}, "data.sources: b 3, a 1 (was a 3, b 1)"),
        ({"a": A}, "data.sources: a 3 (was a 3, b 1); data.held_out: 2 (was 2, 2); 0 of 12 rows are new, 7 of 19"),
        ({"a": A, "b": B, "weights": (1, 1)}, "data.sources: a 1, b 1 (was a 3, b 1)"),
    ],
)
def test_another_mix_is_told(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    one = begun(mixed(tmp_path, a=A, b=B))
    one.draw(14)
    (tmp_path / "now").mkdir()
    other = begun(mixed(tmp_path / "now", **changed), one.state)
    assert other.differs.startswith(said)
    assert not {*other.draw(60)} & {*one.held_out}
