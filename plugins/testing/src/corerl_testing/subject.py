"""The backend under test as checks get it: on a number of ranks, with models and trajectories at hand."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
from attrs import evolve, field, frozen

from corerl.checkpoint import begin
from corerl.checkpoint.commit import commit
from corerl.config import ClusterInfo, structure
from corerl.plugin import BackendSpec, Kind, load
from corerl_testing.compare import Trajectory, together
from corerl_testing.harness import Setup
from corerl_testing.models import write_tiny_model
from corerl_testing.pool import Ranks
from corerl_testing.scenarios import states, training

T = TypeVar("T")

PLAIN = "plain"
STEPS = 6  # each temperature twice
FEW_STEPS = 2  # of other packings, and of variants: what is wrong with one is so in its first step
WHOLE = (10**6, 1)  # (tokens per micro-batch, sequence multiple): everything in one micro-batch
PACKINGS = {"packed": (32, 1), "one by one": (1, 1), "padded": (32, 4)}
CASES = [
    *((kind, packing) for kind in ("qwen3", "qwen3-tied", "qwen3-moe") for packing in PACKINGS),
    ("qwen2", "packed"),
    ("llama", "packed"),
]


def steps_of(packing: str) -> int:
    """How many steps a trajectory with it has."""
    return STEPS if packing == "packed" else FEW_STEPS


class Runs:
    """Processes for ranks, models, and trajectories that several checks share, each trained once."""

    def __init__(self, rank_sets: Mapping[int, Ranks], models: Mapping[str, Path]) -> None:
        self.rank_sets = rank_sets
        self.models = models
        self._trained: dict[tuple[int, int, str], Trajectory] = {}
        self._of_plain: dict[bytes, list[Any]] = {}

    def beside(self, rank_sets: Mapping[int, Ranks], models: Mapping[str, Path] | None = None) -> Runs:
        """With these processes, or models, besides its own; what either has trained, it shares with the other."""
        other = Runs({**self.rank_sets, **rank_sets}, {**self.models, **(models or {})})
        other._trained, other._of_plain = self._trained, self._of_plain
        return other

    def trained(
        self, backend: str, world_size: int, kind: str, packing: tuple[int, int], steps: int = STEPS
    ) -> Trajectory:
        """A trajectory from the model's weights."""
        return self.trained_as(world_size, self.setup(backend, kind, packing), steps)

    def trained_as(self, world_size: int, setup: Setup, steps: int = STEPS) -> Trajectory:
        key = (world_size, steps, repr(setup))
        if key not in self._trained:
            self._trained[key] = self.train(world_size, setup, range(steps))
        return self._trained[key]

    def losses(self, world_size: int, setup: Setup, steps: int) -> list[float]:
        """Of the first steps of any trajectory that has as many, trained if no trajectory has."""
        known = (
            trajectory
            for (ranks, number, text), trajectory in self._trained.items()
            if ranks == world_size and number >= steps and text == repr(setup)
        )
        return (next(known, None) or self.trained_as(world_size, setup, steps)).losses[:steps]

    def of_plain(self, scenario: Callable[..., T], kind: str, *arguments: Any) -> list[T]:
        """What the plain backend reports of a scenario, which it goes through once for all others."""
        setup = self.setup(PLAIN, kind)
        asked = pickle.dumps((scenario, setup, arguments))
        if asked not in self._of_plain:
            self._of_plain[asked] = self.rank_sets[1].run(scenario, setup, *arguments)
        return self._of_plain[asked]

    def other(self, kind: str) -> Path:
        """The model of this kind with other weights."""
        directory = self.models[kind].with_name(f"{self.models[kind].name}-other")
        return directory if directory.exists() else write_tiny_model(kind, directory, seed=1)

    def train(self, world_size: int, setup: Setup, numbers: Sequence[int], **saving: Any) -> Trajectory:
        arguments = {"resume": "", "save_after": -1, "save_to": "", **saving}
        return together(self.rank_sets[world_size].run(training.train_steps, setup, list(numbers), *arguments.values()))

    def setup(self, backend: str, kind: str, packing: tuple[int, int] = PACKINGS["packed"]) -> Setup:
        tokens, multiple = packing
        return Setup(backend=backend, model=str(self.models[kind])).packed_by(tokens, sequence_multiple=multiple)


@frozen(kw_only=True)
class Subject:
    """The backend under test, on a number of ranks."""

    backend: str
    world_size: int
    runs: Runs
    directory: Path  # empty, for this check alone
    options: Mapping[str, Any] = field(factory=dict)  # the backend's own
    device: str = "cpu"
    varied: bool = False  # whether the options are a variant's
    lifted: bool = False  # let the backend try what it declares that it lacks

    def setup(self, kind: str, packing: tuple[int, int] = PACKINGS["packed"]) -> Setup:
        return self.of(self.runs.setup(self.backend, kind, packing))

    def of(self, setup: Setup) -> Setup:
        """The same setup, for this backend and its options."""
        return evolve(setup, backend=self.backend, options=self.options, device=self.device, lifted=self.lifted)

    def run(self, scenario: Callable[..., T], *arguments: Any) -> list[T]:
        """Run a scenario on every rank; returns the reports in rank order."""
        return self.runs.rank_sets[self.world_size].run(scenario, *arguments)

    def train(self, setup: Setup, numbers: Sequence[int], **saving: Any) -> Trajectory:
        return self.runs.train(self.world_size, setup, numbers, **saving)

    def trained(self, kind: str, packing: str = "packed") -> Trajectory:
        """A trajectory from the model's weights, trained once for all checks."""
        return self.runs.trained_as(self.world_size, self.setup(kind, PACKINGS[packing]), steps_of(packing))

    def steps_against_plain(self, packing: str) -> int:
        """How many steps are compared with the plain backend's."""
        return FEW_STEPS if self.varied else steps_of(packing)

    def undisturbed(self, setup: Setup, steps: int) -> Trajectory:
        """The first steps without interruption, trained once for all checks that interrupt them."""
        return self.runs.trained_as(self.world_size, setup, steps)

    def losses(self, setup: Setup, steps: int) -> list[float]:
        """Those of the first steps without interruption, also of more steps that are trained already."""
        return self.runs.losses(self.world_size, setup, steps)

    def model(self, kind: str) -> Path:
        return self.runs.models[kind]

    def require_ranks(self, number: int) -> None:
        """Skip the check if the backend's spec refuses its options on so many ranks."""
        require_ranks(load(Kind.BACKENDS, self.backend).spec, self.options, number, device=self.device)

    def refusal_of_two_ranks(self) -> str:
        """The error if both of two ranks refuse to start; "" if one does not."""
        setup = evolve(self.setup("qwen3"), lifted=False)
        errors = self.runs.rank_sets[2].run(states.start_refused, setup)
        return errors[0] if all(error.startswith("Unsupported: ") for error in errors) else ""

    def checkpoint(self, step: int) -> Checkpoint:
        return Checkpoint(begin(self.directory, step), self.world_size)


def require_ranks(spec: BackendSpec, given: Mapping[str, Any], number: int, *, device: str = "cpu") -> None:
    """Skip the check if the spec refuses these options on so many ranks, as it does those of a layout that takes more.
    Defaults are for any number."""
    if not given:
        return
    options: Any = structure(given, spec.config, path="")
    for problem in spec.check(options, ClusterInfo(device=device, ranks=number)):
        pytest.skip(f"the spec refuses these options on {number} rank(s): {problem.path} = {problem.text}")


@frozen
class Checkpoint:
    """A checkpoint that ranks write and the driver completes."""

    partial: Path
    world_size: int

    @property
    def role(self) -> str:
        """The directory that ranks write to."""
        return str(self.partial / "actor")

    def complete(self) -> str:
        """Complete it; returns the directory that ranks read. Fails unless all ranks' boxes are exactly the model."""
        return str(commit(self.partial, {}, ranks={"actor": self.world_size}) / "actor")
