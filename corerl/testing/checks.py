"""What every backend must do, written once: a backend's test file is a subclass that says its name.

    class TestMine(BackendChecks):
        backend_name = "mine"

The fixtures are those of `corerl.testing.fixtures`. Each check runs on one rank in this process and, where the backend
has several, on two ranks of a pool; what it compares with is the plain backend, transformers, or the backend itself.
A check that needs a capability is skipped, with the declared reason, where the backend does not have it.
"""

from __future__ import annotations

import json
import math
import shutil
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import pytest
import torch
from attrs import evolve, frozen
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from corerl.checkpoint.commit import begin, commit
from corerl.checkpoint.reader import CheckpointSource
from corerl.config.schema import WeightsConfig
from corerl.plugin.capabilities import FULL, Capability, Grade
from corerl.plugin.registry import Kind, load
from corerl.testing import scenarios
from corerl.testing.harness import Setup, State, make_samples
from corerl.testing.models import tiny_fields, write_tiny_model
from corerl.testing.pool import Ranks
from corerl.testing.tolerances import BFLOAT16_GRAD_NORM, BFLOAT16_LOSS, GRAD_NORM, LOGPROBS, LOSS, WEIGHTS_L2
from corerl.types import Array, FloatArray, ForwardResult, MemoryKind, Output, SampleBatch, TrainResult

T = TypeVar("T")
Tensors = dict[str, Array]  # whole tensors by HF name

PLAIN = "plain"
STEPS = 10
WHOLE = (10**6, 1)  # tokens of a micro-batch, and what sequences are padded to: everything at once
PACKINGS = {"packed": (48, 1), "one by one": (1, 1), "padded": (48, 4)}
CASES = [
    *((kind, packing) for kind in ("qwen3", "qwen3-tied", "qwen3-moe") for packing in PACKINGS),
    ("qwen2", "packed"),
    ("llama", "packed"),
]
SAVED = ("master", "exp_avg", "exp_avg_sq")
ENDS = list(MemoryKind)


# ---- all ranks' reports together -------------------------------------------------------------------------------------


@frozen(kw_only=True, eq=False)
class Trajectory:
    """Some optimizer steps as the driver sees them."""

    losses: list[float]
    grad_norms: list[float]
    at_start: dict[str, Tensors]
    state: dict[str, Tensors]  # "master", "exp_avg", ... -> whole tensors, at the end
    adam_step: int
    optimizer_step: int  # of InitResult


def together(reports: Sequence[scenarios.Trained]) -> Trajectory:
    steps = list(zip(*(report.results for report in reports), strict=True))
    for results in steps:
        assert [result.applied for result in results] == [True] * len(reports)
    assert len({report.adam_step for report in reports}) == 1
    assert len({report.init.optimizer_step for report in reports}) == 1
    return Trajectory(
        losses=[loss_of(results) for results in steps],
        grad_norms=[grad_norm_of(results) for results in steps],
        at_start=whole([report.at_start for report in reports]),
        state=whole([report.state for report in reports]),
        adam_step=reports[0].adam_step,
        optimizer_step=reports[0].init.optimizer_step,
    )


def loss_of(results: Sequence[TrainResult]) -> float:
    """Summed over the ranks, as the driver does."""
    return sum(result.metrics["loss"].value for result in results if "loss" in result.metrics)


def grad_norm_of(results: Sequence[TrainResult]) -> float:
    norms = [result.grad_norm for result in results]
    assert all(norm == norms[0] for norm in norms), f"the ranks disagree on the norm: {norms}"
    return norms[0]


def whole(states: Sequence[State]) -> dict[str, Tensors]:
    """Tensors put together from all ranks' boxes, each element from exactly one."""
    found: dict[str, Tensors] = {}
    for key in states[0]:
        tensors: Tensors = {}
        times: Tensors = {}
        for box in (box for state in states for box in state[key]):
            tensor = tensors.setdefault(box.name, np.zeros(box.shape, box.values.dtype))
            seen = times.setdefault(box.name, np.zeros(box.shape, np.int64))
            where = tuple(slice(at, at + n) for at, n in zip(box.offsets, box.values.shape, strict=True))
            tensor[where] = box.values
            seen[where] += 1
        assert {name for name, seen in times.items() if (seen != 1).any()} == set()
        found[key] = tensors
    return found


def in_order(results: Sequence[ForwardResult], samples: SampleBatch, output: Output) -> FloatArray:
    """[N] in the batch's order, each sample from exactly one rank."""
    column = np.full(len(samples.tokens), np.nan, np.float32)
    for result in results:
        for index, sample in enumerate(result.samples):
            start, end = samples.offsets[sample : sample + 2]
            values = result.outputs[output][result.offsets[index] : result.offsets[index + 1]]
            assert np.isnan(column[start:end]).all() and len(values) == end - start
            column[start:end] = values
    assert not np.isnan(column).any()
    return column


# ---- what is compared ------------------------------------------------------------------------------------------------


def assert_follows(found: Trajectory, wanted: Trajectory) -> None:
    """Loss and grad norm of each step, and the weights at the end, within the tolerances of float32."""
    assert found.losses == pytest.approx(wanted.losses, rel=LOSS.relative, abs=LOSS.absolute)
    assert found.grad_norms == pytest.approx(wanted.grad_norms, rel=GRAD_NORM.relative)
    assert weights_apart(found.state["master"], wanted.state["master"]) < WEIGHTS_L2


def weights_apart(found: Tensors, wanted: Tensors) -> float:
    """L2 norm of the difference over that of the weights."""
    assert found.keys() == wanted.keys()
    apart = math.fsum(float(((found[name] - wanted[name]).astype(np.float64) ** 2).sum()) for name in wanted)
    size = math.fsum(float((wanted[name].astype(np.float64) ** 2).sum()) for name in wanted)
    return math.sqrt(apart / size)


def different(found: Mapping[str, Tensors], wanted: Mapping[str, Tensors], keys: Collection[str] = SAVED) -> list[str]:
    """What is not equal to the last bit."""
    assert all(found[key].keys() == wanted[key].keys() for key in keys)
    return [
        f"{key} of {name}"
        for key in keys
        for name in wanted[key]
        if not _same_bits(found[key][name], wanted[key][name])
    ]


def _same_bits(a: Array, b: Array) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def transformers_outputs(directory: Path, samples: SampleBatch) -> dict[Output, FloatArray]:
    """Log-probs and entropy [N] by transformers alone: each sample by itself, all of its logits."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    columns = {output: np.zeros(len(samples.tokens), np.float32) for output in (Output.LOGPROBS, Output.ENTROPY)}
    for start, end in zip(samples.offsets[:-1], samples.offsets[1:], strict=True):
        tokens = torch.tensor(samples.tokens[start:end])
        with torch.no_grad():
            logits = model(input_ids=tokens[None]).logits[0, :-1] / samples.temperature
        distribution = torch.distributions.Categorical(logits=logits)
        columns[Output.LOGPROBS][start + 1 : end] = distribution.log_prob(tokens[1:]).numpy()
        columns[Output.ENTROPY][start + 1 : end] = distribution.entropy().numpy()
    return columns


def files_of(directory: Path) -> dict[str, tuple[int, ...]]:
    """Tensor -> shape, from the headers of a Hugging Face directory's files."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in directory.glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        shapes |= {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    return shapes


def largest_parameter(directory: Path) -> int:
    """Elements of the model's largest parameter, as modules hold it: a layer's experts together."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory))
    return max(param.numel() for param in model.parameters())


# ---- what is checked -------------------------------------------------------------------------------------------------


class Runs:
    """Where ranks run, the models they are given, and trajectories that several checks look at, each trained once."""

    def __init__(self, rank_sets: Mapping[int, Ranks], models: Mapping[str, Path]) -> None:
        self.rank_sets = rank_sets
        self.models = models
        self._trained: dict[tuple[str, int, str, tuple[int, int]], Trajectory] = {}

    def trained(self, backend: str, world_size: int, kind: str, packing: tuple[int, int]) -> Trajectory:
        """STEPS steps from the model's directory on."""
        key = (backend, world_size, kind, packing)
        if key not in self._trained:
            self._trained[key] = self.train(world_size, self.setup(backend, kind, packing), range(STEPS))
        return self._trained[key]

    def train(self, world_size: int, setup: Setup, numbers: Sequence[int], **saving: Any) -> Trajectory:
        arguments = {"resume": "", "save_after": -1, "save_to": "", **saving}
        return together(
            self.rank_sets[world_size].run(scenarios.train_steps, setup, list(numbers), *arguments.values())
        )

    def setup(self, backend: str, kind: str, packing: tuple[int, int] = PACKINGS["packed"]) -> Setup:
        tokens, multiple = packing
        return Setup(backend=backend, model=str(self.models[kind])).packed_by(tokens, sequence_multiple=multiple)


@frozen(kw_only=True)
class Subject:
    """A backend on a number of ranks."""

    backend: str
    world_size: int
    runs: Runs
    directory: Path  # empty, for this check alone

    def setup(self, kind: str, packing: tuple[int, int] = PACKINGS["packed"]) -> Setup:
        return self.runs.setup(self.backend, kind, packing)

    def run(self, scenario: Callable[..., T], *arguments: Any) -> list[T]:
        """On every rank; the reports in rank order."""
        return self.runs.rank_sets[self.world_size].run(scenario, *arguments)

    def train(self, setup: Setup, numbers: Sequence[int], **saving: Any) -> Trajectory:
        return self.runs.train(self.world_size, setup, numbers, **saving)

    def model(self, kind: str) -> Path:
        return self.runs.models[kind]

    def require(self, *capabilities: Capability) -> None:
        """Skips the check where the backend does not declare them all."""
        for capability in capabilities:
            support = load(Kind.BACKENDS, self.backend).spec.capabilities.get(capability, FULL)
            if support.grade is not Grade.FULL:
                pytest.skip(f"{self.backend} declares {capability} {support.grade}: {support.reason}")

    def checkpoint(self, step: int) -> Checkpoint:
        return Checkpoint(begin(self.directory, step), self.world_size)


@frozen
class Checkpoint:
    """One that ranks write to, and the driver completes."""

    partial: Path
    world_size: int

    @property
    def role(self) -> str:
        """Where the ranks write."""
        return str(self.partial / "actor")

    def complete(self) -> str:
        """Where ranks read. Fails where the boxes of all ranks are not exactly the model."""
        return str(commit(self.partial, {}, ranks={"actor": self.world_size}) / "actor")


class OnRanks:
    """Checks with an argument `world_size`, directly or by way of `subject`: 1, and 2 where the backend has several."""

    backend_name: ClassVar[str]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        assert metafunc.cls is not None
        spec = load(Kind.BACKENDS, metafunc.cls.backend_name).spec
        several = spec.capabilities.get(Capability.MULTI_RANK, FULL).grade is Grade.FULL
        metafunc.parametrize("world_size", [1, 2] if several else [1], ids="on {} rank(s)".format)


class BackendChecks(OnRanks):
    """The first checks. Subclass it and set `backend_name`."""

    # ---- init ------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("kind", ["qwen3-tied", "qwen3-moe"])
    def test_loading_reads_each_ranks_share_once_and_never_holds_the_model(self, subject: Subject, kind: str) -> None:
        directory = subject.model(kind)
        total = 4 * sum(math.prod(shape) for shape in files_of(directory).values())
        ranks = subject.run(scenarios.load_watched, subject.setup(kind))
        assert [rank.read for rank in ranks] == [rank.held for rank in ranks]
        assert sum(rank.owned for rank in ranks) == total
        slack = 3 * 4 * largest_parameter(directory)
        for rank in ranks:
            assert rank.held <= rank.peak < rank.held + slack
            # So that a rank that holds the model for a moment is seen.
            assert subject.world_size == 1 or rank.held + slack < total
        loaded = whole([rank.state for rank in ranks])["master"]
        wanted: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        assert loaded.keys() == files_of(directory).keys()
        for name, param in wanted.named_parameters():
            if name in loaded:  # experts have other names in files
                assert _same_bits(loaded[name], param.detach().numpy())

    def test_resuming_and_snapshots_hold_no_more_than_each_ranks_share(self, subject: Subject) -> None:
        subject.require(Capability.SNAPSHOTS)
        setup, checkpoint = subject.setup("qwen3-moe"), subject.checkpoint(1)
        subject.train(setup, [0], save_after=0, save_to=checkpoint.role)
        slack = 3 * 4 * largest_parameter(subject.model("qwen3-moe"))
        for rank in subject.run(scenarios.load_watched, setup, checkpoint.complete()):
            assert 3 * rank.held <= rank.peak < 3 * rank.held + slack  # weights and two moments
            assert rank.held <= rank.snapshot_peak < rank.held + slack

    def test_random_weights_do_not_depend_on_the_number_of_ranks(self, subject: Subject) -> None:
        random = Setup(backend=subject.backend, model="", fields=tiny_fields("qwen3-moe"))
        found = subject.train(random, [])
        wanted = subject.runs.train(1, evolve(random, backend=PLAIN), [])
        assert different(found.at_start, wanted.at_start, ["master"]) == []
        assert found.at_start["master"]["model.layers.0.mlp.gate.weight"].std() == pytest.approx(0.02, rel=0.2)

    # ---- train and forward -----------------------------------------------------------------------------------------

    @pytest.mark.parametrize(("kind", "packing"), CASES)
    def test_training_follows_the_plain_backend(self, subject: Subject, kind: str, packing: str) -> None:
        if kind == "qwen3-moe":
            subject.require(Capability.MOE)
        found = subject.runs.trained(subject.backend, subject.world_size, kind, PACKINGS[packing])
        assert_follows(found, subject.runs.trained(PLAIN, 1, kind, WHOLE))
        assert found.adam_step == STEPS

    def test_many_micro_batches_train_like_one(self, subject: Subject) -> None:
        one, many = (
            subject.run(scenarios.train_on, subject.setup("qwen3", packing), make_samples(3, samples=24))
            for packing in (WHOLE, (1, 1))
        )
        assert loss_of(many) == pytest.approx(loss_of(one), rel=LOSS.relative, abs=LOSS.absolute)
        assert grad_norm_of(many) == pytest.approx(grad_norm_of(one), rel=GRAD_NORM.relative)
        assert sum(result.tokens for result in many) == sum(result.tokens for result in one)

    def test_ranks_without_samples_keep_in_step(self, subject: Subject) -> None:
        samples = make_samples(5, samples=1)
        found = subject.run(scenarios.train_on, subject.setup("qwen3-moe"), samples)
        wanted = subject.runs.rank_sets[1].run(scenarios.train_on, subject.runs.setup(PLAIN, "qwen3-moe"), samples)
        assert loss_of(found) == pytest.approx(loss_of(wanted), rel=LOSS.relative, abs=LOSS.absolute)
        assert grad_norm_of(found) == pytest.approx(grad_norm_of(wanted), rel=GRAD_NORM.relative)
        assert [result.applied for result in found] == [True] * subject.world_size

    @pytest.mark.parametrize(
        ("kind", "packing"),
        [*((kind, "packed") for kind in ("qwen3", "qwen3-tied", "qwen2", "llama", "qwen3-moe")), ("qwen3", "padded")],
    )
    def test_forward_gives_what_transformers_gives_in_the_samples_order(
        self, subject: Subject, kind: str, packing: str
    ) -> None:
        samples = make_samples(7, samples=13)
        results = subject.run(scenarios.forward_only, subject.setup(kind, PACKINGS[packing]), samples)
        wanted = transformers_outputs(subject.model(kind), samples)
        for output in (Output.LOGPROBS, Output.ENTROPY):
            found = in_order(results, samples, output)
            np.testing.assert_allclose(found, wanted[output], rtol=LOGPROBS.relative, atol=LOGPROBS.absolute)
            assert (found[samples.offsets[:-1]] == 0).all()  # nothing predicts the first token

    def test_a_step_that_is_not_finite_is_skipped_on_all_ranks_and_the_next_one_trains(self, subject: Subject) -> None:
        setup = subject.setup("qwen3")
        ranks = subject.run(scenarios.skip_a_step, setup)
        assert [rank.result.applied for rank in ranks] == [False] * subject.world_size
        assert not any(math.isfinite(rank.result.grad_norm) for rank in ranks)
        assert [(rank.steps_before, rank.steps_after) for rank in ranks] == [(2, 2)] * subject.world_size
        assert different(whole([rank.after for rank in ranks]), whole([rank.before for rank in ranks])) == []
        undisturbed = subject.train(setup, [0, 1, 2])
        assert loss_of([rank.then for rank in ranks]) == undisturbed.losses[2]
        assert grad_norm_of([rank.then for rank in ranks]) == undisturbed.grad_norms[2]
        assert different(whole([rank.end for rank in ranks]), undisturbed.state) == []

    def test_batches_are_left_as_they_were_given(self, subject: Subject) -> None:
        changed = subject.run(scenarios.changed_in_batches, subject.setup("qwen3", PACKINGS["padded"]))
        assert changed == [[]] * subject.world_size

    def test_bfloat16_stays_near_float32(self, subject: Subject) -> None:
        subject.require(Capability.BFLOAT16)
        setup = subject.setup("qwen3")
        half = evolve(setup, train=evolve(setup.train, precision="bfloat16"))
        found, wanted = subject.train(half, range(STEPS)), subject.train(setup, range(STEPS))
        assert mean_apart(found.losses, wanted.losses) < BFLOAT16_LOSS
        assert mean_apart(found.grad_norms, wanted.grad_norms) < BFLOAT16_GRAD_NORM
        assert weights_apart(found.state["master"], wanted.state["master"]) > 0  # it was another precision

    # ---- snapshots -------------------------------------------------------------------------------------------------

    def test_snapshots_answer_for_the_weights_they_were_made_of_and_leave_the_current_ones_alone(
        self, subject: Subject, tmp_path: Path
    ) -> None:
        subject.require(Capability.SNAPSHOTS)
        samples, setup = make_samples(11), subject.setup("qwen3-moe")
        other = write_tiny_model("qwen3-moe", tmp_path / "other", seed=1)
        ranks = subject.run(scenarios.use_snapshots, setup, samples, str(other))

        def logprobs(part: str) -> FloatArray:
            return in_order([getattr(rank, part) for rank in ranks], samples, Output.LOGPROBS)

        assert np.array_equal(logprobs("kept"), logprobs("first"))
        assert np.array_equal(logprobs("started_from"), logprobs("first"))
        wanted = transformers_outputs(other, samples)[Output.LOGPROBS]
        np.testing.assert_allclose(logprobs("other"), wanted, rtol=LOGPROBS.relative, atol=LOGPROBS.absolute)
        assert np.abs(logprobs("current") - logprobs("first")).max() > 1e-2
        after, before = whole([rank.after for rank in ranks]), whole([rank.before for rank in ranks])
        assert different(after, before, [*SAVED, "param"]) == []
        undisturbed = subject.train(setup, range(4))
        assert loss_of([rank.then for rank in ranks]) == undisturbed.losses[3]
        for rank in ranks:  # which rank and hook it was stands in between
            kind, _, message = rank.dropped.partition(": ")
            assert kind == "WrongState"
            assert message.endswith("no snapshot 'reference'; known: other, start; create or load it first")

    # ---- save and resume -------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("kind", ["qwen3-tied", "qwen3-moe"])
    def test_a_resumed_run_equals_the_uninterrupted_one_to_the_last_bit(self, subject: Subject, kind: str) -> None:
        setup, checkpoint = subject.setup(kind), subject.checkpoint(3)
        uninterrupted = subject.train(setup, range(6), save_after=2, save_to=checkpoint.role)
        resumed = subject.train(setup, range(3, 6), resume=checkpoint.complete())
        assert resumed.optimizer_step == 3 and resumed.adam_step == 6
        assert resumed.losses == uninterrupted.losses[3:]
        assert resumed.grad_norms == uninterrupted.grad_norms[3:]
        assert different(resumed.state, uninterrupted.state) == []

    @pytest.mark.parametrize("kind", ["qwen3-tied", "qwen3-moe"])
    def test_a_run_resumes_on_another_number_of_ranks(self, subject: Subject, kind: str) -> None:
        subject.require(Capability.RESHARD, Capability.MULTI_RANK)
        (other,) = subject.runs.rank_sets.keys() - {subject.world_size}
        setup, checkpoint = subject.setup(kind), subject.checkpoint(3)
        at_save = subject.train(setup, range(3), save_after=2, save_to=checkpoint.role)
        resumed = subject.runs.train(other, setup, range(3, STEPS), resume=checkpoint.complete())
        assert different(resumed.at_start, at_save.state) == []
        uninterrupted = subject.runs.trained(PLAIN, 1, kind, WHOLE)
        joined = at_save.losses + resumed.losses
        assert joined == pytest.approx(uninterrupted.losses, rel=LOSS.relative, abs=LOSS.absolute)
        assert weights_apart(resumed.state["master"], uninterrupted.state["master"]) < WEIGHTS_L2

    @pytest.mark.parametrize("kind", ["qwen3-tied", "qwen3-moe"])
    def test_the_checkpoint_goes_on_in_the_plain_backend_and_back(self, subject: Subject, kind: str) -> None:
        setup, first, second = subject.setup(kind), subject.checkpoint(3), Checkpoint(begin(subject.directory, 6), 1)
        start = subject.train(setup, range(3), save_after=2, save_to=first.role)
        middle = subject.runs.train(
            1,
            subject.runs.setup(PLAIN, kind),
            range(3, 6),
            resume=first.complete(),
            save_after=5,
            save_to=second.role,
        )
        end = subject.train(setup, range(6, STEPS), resume=second.complete())
        assert different(middle.at_start, start.state) == []
        assert different(end.at_start, middle.state) == []
        assert (middle.optimizer_step, end.optimizer_step, end.adam_step) == (3, 6, STEPS)
        uninterrupted = subject.runs.trained(PLAIN, 1, kind, WHOLE)
        joined = start.losses + middle.losses + end.losses
        assert joined == pytest.approx(uninterrupted.losses, rel=LOSS.relative, abs=LOSS.absolute)
        assert weights_apart(end.state["master"], uninterrupted.state["master"]) < WEIGHTS_L2

    def test_a_background_save_holds_what_was_there_when_it_began(self, subject: Subject) -> None:
        subject.require(Capability.SAVE_BACKGROUND)
        checkpoint = subject.checkpoint(1)
        ranks = subject.run(scenarios.save_in_background, subject.setup("qwen3"), checkpoint.role)
        for rank in ranks:
            assert (rank.complete, rank.while_held, rank.when_released) == (False, False, True)
            assert rank.files_while_held == []
        at_save = whole([rank.at_save for rank in ranks])
        directory = checkpoint.complete()
        saved = {key: _read(CheckpointSource(directory, key)) for key in SAVED}
        assert different(saved, at_save) == []
        after = different(whole([rank.after_step for rank in ranks]), at_save)
        assert len(after) == sum(len(at_save[key]) for key in SAVED)  # all of it had changed before it was written

    def test_a_background_save_that_fails_says_so_once_and_the_next_one_is_written(self, subject: Subject) -> None:
        subject.require(Capability.SAVE_BACKGROUND)
        blocked = subject.directory / "blocked"
        blocked.write_text("a file where a directory is needed")
        ranks = subject.run(scenarios.fail_to_save_in_background, subject.setup("qwen3"), str(blocked))
        for failure, next_save in ranks:
            assert (
                failure.startswith("SaveFailed: the background save failed: cannot write") and str(blocked) in failure
            )
            assert next_save == ""

    # ---- weights to engines ----------------------------------------------------------------------------------------

    @pytest.mark.parametrize("kind", ["qwen3", "qwen3-tied", "qwen3-moe"])
    def test_an_update_delivers_every_tensor_once_and_bit_for_bit(
        self, subject: Subject, kind: str, tmp_path: Path
    ) -> None:
        ranks = subject.run(scenarios.push_weights, subject.setup(kind), False)
        trained = whole([rank.state for rank in ranks])["master"]
        root, *others = ranks
        assert sorted(root.names) == sorted(files_of(subject.model(kind)))
        assert different({"master": root.tensors}, {"master": trained}, ["master"]) == []
        assert root.result.version == 1 and root.result.engines == {"engine-0": ""}
        assert root.result.bytes == sum(4 * tensor.size for tensor in trained.values())
        assert [(other.names, other.result.bytes) for other in others] == [([], 0)] * len(others)

        shutil.copy(subject.model(kind) / "config.json", tmp_path)
        save_file({name: torch.tensor(value) for name, value in root.tensors.items()}, tmp_path / "model.safetensors")
        from_pretrained: Any = AutoModelForCausalLM.from_pretrained
        model, found = from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
        assert not any(found[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        for name, param in model.named_parameters():
            if name in trained:
                assert _same_bits(param.detach().numpy(), trained[name])

        for rank in ranks:  # versions strictly increase, and a smaller one is refused before any byte moves
            assert rank.refused.startswith("WeightUpdateError: weights version 1 was refused")
            assert rank.arrived_after == 0

    def test_an_update_can_reach_every_rank_in_bfloat16(self, subject: Subject) -> None:
        setup = evolve(subject.setup("qwen3-moe"), weights=WeightsConfig(bucket_bytes=2**14, dtype="bfloat16"))
        ranks = subject.run(scenarios.push_weights, setup, True)
        trained = whole([rank.state for rank in ranks])["master"]
        rounded = {name: torch.tensor(value).bfloat16().float().numpy() for name, value in trained.items()}
        for rank in ranks:
            assert sorted(rank.names) == sorted(trained)
            assert different({"master": rank.tensors}, {"master": rounded}, ["master"]) == []

    def test_an_update_holds_a_few_buckets_and_never_the_model(self, subject: Subject) -> None:
        ranks = subject.run(scenarios.push_weights, subject.setup("qwen3-moe"), False)
        total = sum(4 * math.prod(shape) for shape in files_of(subject.model("qwen3-moe")).values())
        for rank in ranks:
            assert 0 < rank.largest <= 4 * rank.bucket < total / 2
            assert rank.peak < total / 2

    def test_an_engine_that_fails_is_an_entry_and_training_goes_on(self, subject: Subject) -> None:
        ranks = subject.run(scenarios.push_to_a_failing_engine, subject.setup("qwen3"))
        assert ranks[0].result.engines == {"engine-0": "out of memory"}
        assert ranks[0].then.engines == {"engine-0": ""}
        assert ranks[0].names == ranks[0].wanted

    def test_a_resumed_run_goes_on_with_the_versions_it_had_reached(self, subject: Subject) -> None:
        ranks = subject.run(scenarios.version_after_resume, subject.setup("qwen3"), str(subject.directory / "actor"))
        for version, refused in ranks:
            assert version == 7 and refused.startswith("WeightUpdateError: weights version 6 was refused")

    # ---- memory ----------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize(("down", "up"), [(ENDS, ENDS), (ENDS[::-1], ENDS), (ENDS[1:] + ENDS[:1], ENDS[::-1])])
    def test_sleep_frees_what_it_says_and_waking_restores_every_bit(
        self, subject: Subject, down: Sequence[MemoryKind], up: Sequence[MemoryKind]
    ) -> None:
        subject.require(Capability.SLEEP)
        setup = subject.setup("qwen3-tied")
        ranks = subject.run(scenarios.sleep_and_wake, setup, down, up, str(subject.directory / "actor"))
        for rank in ranks:
            freed = [result.freed_bytes for result in rank.sleeps]
            assert sum(freed) == sum(rank.resident.values()) >= rank.state_bytes
            assert rank.resident_asleep == [0] * len(down) and rank.state_bytes_asleep == 0
            assert rank.again.freed_bytes == 0
            assert [result.restored_bytes for result in rank.wakes] == [freed[down.index(kind)] for kind in up]
            assert {verb for verb, error in rank.refused.items() if not error.startswith("NotResident: ")} == set()
        after, before = whole([rank.after for rank in ranks]), whole([rank.before for rank in ranks])
        assert different(after, before, [*SAVED, "param"]) == []
        awake = subject.train(setup, range(4))
        steps = list(zip(*(rank.then for rank in ranks), strict=True))
        assert [loss_of(results) for results in steps] == awake.losses[2:]
        assert [grad_norm_of(results) for results in steps] == awake.grad_norms[2:]
        assert different(whole([rank.end for rank in ranks]), awake.state) == []

    def test_only_the_verbs_that_need_moments_are_refused_while_these_sleep(self, subject: Subject) -> None:
        subject.require(Capability.SLEEP)
        ranks = subject.run(scenarios.sleep_partly, subject.setup("qwen3"), str(subject.directory / "actor"))
        for verbs in ranks:
            assert (verbs["forward"], verbs["update_weights"]) == ("", "")
            for verb in ("train", "save"):
                assert verbs[verb].startswith(f"NotResident: {verb} ") and "sleeps: optimizer;" in verbs[verb]


def mean_apart(found: Sequence[float], wanted: Sequence[float]) -> float:
    """The mean over steps of |found - wanted|, over the mean size of `wanted`: single losses may be near zero."""
    return float(np.abs(np.subtract(found, wanted)).mean() / np.abs(wanted).mean())


def _read(source: CheckpointSource) -> Tensors:
    return {name: source.read(name, (0,) * len(shape), shape).numpy() for name, shape in source.shapes.items()}
