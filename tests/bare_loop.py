"""A backend's training steps against those of `tests.reference`."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from corerl_testing.compare import Tensors, Trajectory, weights_apart
from corerl_testing.harness import samples_at, step_at
from corerl_testing.subject import PACKINGS, Runs, steps_of
from corerl_testing.tolerances import GRAD_NORM, LOSS, WEIGHTS_L2
from tests import reference


@cache
def bare_run(directory: Path, steps: int, settings: tuple[reference.Settings, ...] = ()) -> reference.BareRun:
    batches = [samples_at(number) for number in range(steps)]
    return reference.train(
        directory,
        [list(reference.sequences(batch.tokens, batch.offsets, batch.columns)) for batch in batches],
        [step_at(number).lr for number in range(steps)],
        [batch.temperature for batch in batches],
        settings,
    )


def module_tensors(found: Tensors) -> Tensors:
    """Tensors of a file, by the names of transformers' modules: a layer's experts lie in two of them."""
    together: Tensors = {name: value for name, value in found.items() if ".experts." not in name}
    for prefix in {name.partition(".experts.")[0] for name in found.keys() - together.keys()}:
        experts = range(sum(name.startswith(f"{prefix}.experts.") for name in found) // 3)

        def stacked(projection: str, prefix: str = prefix, experts: range = experts) -> np.ndarray:
            return np.stack([found[f"{prefix}.experts.{expert}.{projection}.weight"] for expert in experts])

        gate_up = np.concatenate([stacked("gate_proj"), stacked("up_proj")], axis=1)
        together[f"{prefix}.experts.gate_up_proj"] = gate_up
        together[f"{prefix}.experts.down_proj"] = stacked("down_proj")
    return together


def assert_follows_a_bare_loop(runs: Runs, backend: str, world_size: int, kind: str, packing: str) -> None:
    """The steps that the suite trains too: the backend's trajectory is the same object."""
    steps = steps_of(packing)
    assert_same_steps(
        runs.trained(backend, world_size, kind, PACKINGS[packing], steps), bare_run(runs.models[kind], steps)
    )


def assert_same_steps(found: Trajectory, wanted: reference.BareRun) -> None:
    assert found.losses == pytest.approx(wanted.losses, rel=LOSS.relative, abs=LOSS.absolute)
    assert found.grad_norms == pytest.approx(wanted.grad_norms, rel=GRAD_NORM.relative)
    assert weights_apart(module_tensors(found.state["master"]), wanted.weights) < WEIGHTS_L2
