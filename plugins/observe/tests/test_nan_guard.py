from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve

from corerl.errors import CorerlError
from corerl.pictures import Picture
from corerl.types import Metric, Output, PackedBatch, StepResult
from corerl_observe.nan_guard import NanGuard, in_columns, in_metrics, in_norm
from corerl_observe.specs import NanGuardOptions
from corerl_testing import PluginHost
from plugins.observe.tests.hosts import LOSS, batch, failing, host, step, train

NAN, INF = math.nan, math.inf


def guarded(run_dir: Path, *, inner: object | None = None, **options: Any) -> PluginHost:
    guard = NanGuard(options=NanGuardOptions(**options), run_dir=str(run_dir))
    return host(run_dir, **{"nan-guard": guard}, **({"inner": inner} if inner else {}))


def written(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "nan-guard/actor-0.jsonl").read_text().splitlines()]


def test_a_column_is_told_with_sample_token_and_step(tmp_path: Path) -> None:
    run = guarded(tmp_path)
    assert train(run, batch(), step(6)).metrics["nonfinite"].value == 0.0
    # Tokens 9 to 14 are those of sample 2, which is packed behind sample 0.
    with pytest.raises(CorerlError) as caught:
        train(run, batch(advantages={12: NAN, 13: INF}, old_logprobs={4: -INF}), step(7))
    assert caught.value.message.startswith(
        "actor rank 0: optimizer_step at optimizer step 7: extension:nan-guard found a non-finite number: column "
        "advantages: nan at sample 2, token 3, and at 1 more tokens; "
    )
    told = written(tmp_path)
    assert {(each["optimizer_step"], each["rollout_step"]) for each in told} == {(7, 3)}
    assert told[1]["found"] == "column old_logprobs: -inf at sample 1, token 0"
    assert any(each["found"].startswith("gradient norm: nan; the step was skipped") for each in told)


def test_the_backend_is_entered_before_anything_is_raised(tmp_path: Path) -> None:
    entered = []

    class Enters:
        def forward_backward(self) -> Iterator[None]:
            entered.append("forward_backward")
            return (yield)

        def optimizer_step(self) -> Iterator[None]:
            entered.append("optimizer_step")
            return (yield)

    with pytest.raises(CorerlError, match="column advantages"):
        train(guarded(tmp_path, inner=Enters()), batch(advantages={3: NAN}), step(0))
    assert entered == ["forward_backward", "optimizer_step"]


def test_what_a_call_found_is_told_at_the_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = guarded(tmp_path, action="log")
    run.forward_backward(batch(advantages={3: NAN}), LOSS, (), False)
    run.forward_backward(batch(), LOSS, (), True)
    assert not (tmp_path / "nan-guard").exists()
    counted = run.optimizer_step(step(4), 1.0).metrics["nonfinite"].value
    told = written(tmp_path)
    assert counted == len(told) >= 3
    assert {(each["hook"], each["optimizer_step"]) for each in told} == {("optimizer_step", 4)}
    assert told[0]["found"] == "column advantages: nan at sample 0, token 3"
    assert f"nan-guard: actor-0: optimizer_step: {told[0]['found']}\n" in capsys.readouterr().err
    assert told[1]["found"].startswith("metric ") and told[-1]["found"].startswith("gradient norm: nan")
    assert train(run, batch(), step(5)).metrics["nonfinite"].value == 0.0  # nothing is told twice


@pytest.mark.parametrize("hook", ["forward_backward", "optimizer_step"])
def test_what_was_found_before_the_backend_failed_is_written_down(tmp_path: Path, hook: str) -> None:
    with pytest.raises(CorerlError, match="out of luck"):
        train(guarded(tmp_path, inner=failing(hook)), batch(advantages={3: NAN}), step(0))
    first, *_ = written(tmp_path)
    assert (first["hook"], first["found"]) == (hook, "column advantages: nan at sample 0, token 3")


def test_an_output_is_told_with_sample_and_token(tmp_path: Path) -> None:
    class Spoils:
        def forward(self) -> Iterator[None]:
            result: Any = yield
            values = result.outputs[Output.LOGPROBS].copy()
            values[10 + 2] = INF  # samples come in the order given: 0, 2, 1
            return evolve(result, outputs={Output.LOGPROBS: values})

    run = guarded(tmp_path, inner=Spoils())
    with pytest.raises(CorerlError, match="output logprobs: inf at sample 1, token 2"):
        run.forward(batch(), (Output.LOGPROBS,), "")
    assert run.state == "ready"


def test_the_first_parameter_that_is_not_finite_is_named(tmp_path: Path) -> None:
    tower = torch.nn.Linear(1, 1)

    class Breaks:
        def forward_backward(self) -> Iterator[None]:
            tower(torch.ones(1))  # a model of its own before the one that is trained
            return (yield)

        def optimizer_step(self) -> Iterator[None]:
            result = yield
            with torch.no_grad():
                backend.params["model.layers.1.mlp.up_proj.weight"][0, :3] = NAN
            return result

    run = guarded(tmp_path, inner=Breaks(), parameters=True)
    backend: Any = run.backend
    with pytest.raises(CorerlError, match="parameter model.layers.1.mlp.up_proj.weight: 3 of the 2048 values"):
        train(run, batch(), step(0))
    assert not torch.nn.modules.module._global_forward_pre_hooks  # modules are watched in one step alone


def test_a_tower_is_checked_from_the_first_step_with_pictures(tmp_path: Path) -> None:
    tower = torch.nn.Linear(1, 1)
    watched: list[bool] = []

    class Shows:
        def forward_backward(self, batch: PackedBatch) -> Iterator[None]:
            watched.append(bool(torch.nn.modules.module._global_forward_pre_hooks))
            if batch.pictures:
                tower(torch.ones(1))
            return (yield)

    run = guarded(tmp_path, inner=Shows(), parameters=True)
    shown = evolve(batch(), pictures={0: Picture(pixels=np.zeros((28, 28, 3), np.uint8))})
    for number, each in enumerate([batch(), batch(), shown, shown, batch()]):
        assert train(run, each, step(number)).metrics["nonfinite"].value == 0.0
    assert watched == [True, False, True, False, False]
    with torch.no_grad():
        tower.weight[0] = NAN
    with pytest.raises(CorerlError, match="parameter weight: 1 of the 1 values"):
        train(run, batch(), step(5))


def test_a_step_that_finds_the_loss_scale_is_no_finding() -> None:
    skipped = StepResult(applied=False, grad_norm=INF)
    assert in_norm(skipped, scales_loss=True) == []
    assert in_norm(skipped, scales_loss=False) == ["gradient norm: inf; the step was skipped"]
    broken = evolve(skipped, applied=True)
    assert in_norm(broken, scales_loss=True) == ["gradient norm: inf; the step was applied anyway"]
    assert in_norm(evolve(broken, grad_norm=1.0), scales_loss=False) == []
    assert in_metrics({"loss": Metric(NAN, 2.0), "value": Metric(1.0, 0.0)}) == ["metric loss: nan"]


def test_a_batch_of_one_use_is_left_for_the_backend() -> None:
    spoiled = batch(advantages={3: NAN})
    once = iter(spoiled.micro_batches)
    assert in_columns(evolve(spoiled, micro_batches=once)) == []
    assert len(list(once)) == 2
    assert in_columns(spoiled) == ["column advantages: nan at sample 0, token 3"]


def test_columns_of_integers_and_of_vectors_are_looked_at_too() -> None:
    (first, second) = batch().micro_batches
    routed = np.zeros((len(second.tokens), 2), dtype=np.float32)
    routed[4, 1] = NAN
    both = [first, evolve(second, columns={"routed": routed, "versions": np.ones(5, dtype=np.int64)})]
    assert in_columns(evolve(batch(), micro_batches=both)) == ["column routed: nan at sample 1, token 4"]
