"""Combine all ranks' reports, and compare them: bit by bit, within tolerances, with transformers."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from attrs import field, frozen
from transformers import AutoConfig, AutoModelForCausalLM

from corerl.checkpoint.reader import CheckpointSource
from corerl.types import Array, BoolArray, FloatArray, ForwardResult, Output, SampleBatch, TrainResult, merge_metrics
from corerl_testing.harness import State
from corerl_testing.references import reference
from corerl_testing.scenarios import training
from corerl_testing.tolerances import GRAD_NORM, LOGPROBS, LOSS, METRICS, WEIGHTS_L2

Tensors = dict[str, Array]  # whole tensors by HF name

SAVED = ("master", "exp_avg", "exp_avg_sq")
CLOSE = 1e-3  # relative: what is further apart than by rounding, of gradients and of weights after one step


# ---- all ranks' reports together -------------------------------------------------------------------------------------


@frozen(kw_only=True, eq=False)
class Trajectory:
    """Optimizer steps as the driver sees them."""

    results: list[tuple[TrainResult, ...]]  # for each step, the results by rank
    losses: list[float]
    grad_norms: list[float]
    at_start: dict[str, Tensors]
    state: dict[str, Tensors]  # "master", "exp_avg", ... -> whole tensors, at the end
    adam_step: int
    optimizer_step: int  # of InitResult
    first: dict[str, Tensors] = field(factory=dict)  # masters and first moments after the first of several steps


def together(reports: Sequence[training.Trained]) -> Trajectory:
    """The trajectory that all ranks' reports of `scenarios.training` give, which must agree on steps and on Adam's."""
    steps = list(zip(*(report.results for report in reports), strict=True))
    for results in steps:
        assert [result.applied for result in results] == [True] * len(reports)
    assert len({report.adam_step for report in reports}) == 1
    assert len({report.init.optimizer_step for report in reports}) == 1
    return Trajectory(
        results=steps,
        losses=[loss_of(results) for results in steps],
        grad_norms=[grad_norm_of(results) for results in steps],
        at_start=whole([report.at_start for report in reports]),
        state=whole([report.state for report in reports]),
        adam_step=reports[0].adam_step,
        optimizer_step=reports[0].init.optimizer_step,
        first=whole([report.first for report in reports]),
    )


def loss_of(results: Sequence[TrainResult]) -> float:
    """The loss, summed over the ranks as the driver does."""
    return sum(result.metrics["loss"].value for result in results if "loss" in result.metrics)


def grad_norm_of(results: Sequence[TrainResult]) -> float:
    """The norm that all ranks report; they must agree."""
    norms = [result.grad_norm for result in results]
    equal = all(norm == norms[0] for norm in norms) or all(math.isnan(norm) for norm in norms)
    assert equal, (
        f"the ranks disagree on the norm: {norms}; sum gradients over all ranks that have other samples, and squares "
        "over those that hold other parts of the model"
    )
    return norms[0]


def metrics_of(results: Sequence[TrainResult]) -> dict[str, float]:
    """All ranks' metrics of one step, merged as the driver does."""
    return {name: metric.value for name, metric in merge_metrics(result.metrics for result in results).items()}


def assert_same_metrics(found: Trajectory, wanted: Trajectory, *, in_calls: bool = False) -> None:
    """Compare every metric of each step, within the tolerance for means over few tokens. The load of experts is
    reported by whoever can; of a step `in_calls` it is a mean over these, which no single call has."""
    for number, results in enumerate(zip(found.results, wanted.results, strict=True)):
        mine, others = (metrics_of(each) for each in results)
        assert {*filter(_required, mine)} == {*filter(_required, others)}
        for name, value in others.items():
            if name not in mine or (in_calls and not _required(name)):
                continue
            near = pytest.approx(value, rel=METRICS.relative, abs=METRICS.absolute)
            assert mine[name] == near, f"{name} of step {number}"


def _required(metric: str) -> bool:
    return not metric.startswith("moe/")


def whole(states: Sequence[State]) -> dict[str, Tensors]:
    """Assemble tensors from all ranks' boxes; each element must be in exactly one."""
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
    """[N, ...] output in the batch's order; each sample must come from exactly one rank."""
    shape = next(result.outputs[output].shape[1:] for result in results if len(result.samples))
    column = np.full((len(samples.tokens), *shape), np.nan, np.float32)
    for result in results:
        for index, sample in enumerate(result.samples):
            start, end = samples.offsets[sample : sample + 2]
            values = result.outputs[output][result.offsets[index] : result.offsets[index + 1]]
            assert len(values) == end - start, f"sample {sample} has {len(values)} {output}, expected {end - start}"
            assert np.isnan(column[start:end]).all(), (
                f"{output} of sample {sample} came twice, or are no numbers; of ranks that share samples one sets "
                "outputs in its layout"
            )
            column[start:end] = values
    assert not np.isnan(column).any(), f"{output} of samples are missing, or are no numbers"
    return column


def assert_outputs(found: FloatArray, wanted: FloatArray, samples: SampleBatch, output: Output) -> None:
    """Compare an output [N] of all samples, within the tolerance of log-probs."""
    wrong = np.flatnonzero(~_near(found, wanted))
    if not len(wrong):
        return
    bounds = [slice(*each) for each in pairwise(samples.offsets.tolist())]
    at = int(np.searchsorted(samples.offsets, wrong[0], side="right")) - 1
    token = int(wrong[0] - samples.offsets[at])
    told = f"{output} of token {token} of sample {at} is {found[wrong[0]]}, expected {wanted[wrong[0]]}"
    mine = found[bounds[at]]
    if all(_near(found[each][1:-1], wanted[each][2:]).all() for each in bounds):
        told += "; each token has that of the next one"
    elif all(_near(found[each][2:], wanted[each][1:-1]).all() for each in bounds):
        told += "; each token has that of the one before"
    else:
        others = (other for other, each in enumerate(bounds) if len(wanted[each]) == len(mine))
        twin = next((other for other in others if other != at and _near(mine, wanted[bounds[other]]).all()), None)
        told += "" if twin is None else f"; sample {at} has those of sample {twin}"
    raise AssertionError(f"{told}; {len(wrong)} of {len(wanted)} differ")


def _near(found: FloatArray, wanted: FloatArray) -> BoolArray:
    near: BoolArray = np.isclose(found, wanted, rtol=LOGPROBS.relative, atol=LOGPROBS.absolute)
    return near


# ---- what is compared ------------------------------------------------------------------------------------------------


def assert_follows(found: Trajectory, wanted: Trajectory) -> None:
    """Compare the loss and grad norm of each step, and the final weights, within the float32 tolerances."""
    assert len(found.losses) == len(wanted.losses)
    for step, (loss, norm) in enumerate(zip(wanted.losses, wanted.grad_norms, strict=True)):
        near = pytest.approx(loss, rel=LOSS.relative, abs=LOSS.absolute)
        assert found.losses[step] == near, _told("loss", step, found.losses, loss) + (
            _after_the_first(found, wanted) if step else ""
        )
        near = pytest.approx(norm, rel=GRAD_NORM.relative)
        assert found.grad_norms[step] == near, _told("gradient norm", step, found.grad_norms, norm) + (
            _after_the_first(found, wanted) if step else _in_the_first(found, wanted)
        )
    assert weights_apart(found.state["master"], wanted.state["master"]) < WEIGHTS_L2


def _told(what: str, step: int, found: Sequence[float], wanted: float) -> str:
    return f"the {what} of step {step} is {found[step]}, expected {wanted}"


def _after_the_first(found: Trajectory, wanted: Trajectory) -> str:
    """What the state after the first step says of a later difference; "" if it is not known."""
    if not found.first or not wanted.first:
        return ""
    if told := _of_gradients(found.first["exp_avg"], wanted.first["exp_avg"]):
        return told
    mine, others, start = found.first["master"], wanted.first["master"], wanted.at_start["master"]
    wrong = [name for name in others if _l2(mine[name] - others[name]) > CLOSE * _l2(others[name] - start[name])]
    if wrong:
        return (
            f"; the gradients of the first step agree, but not the weights after it, in {_such(wrong, others)}: look "
            "at weight decay, the learning rate and bias correction"
        )
    return (
        "; gradients and weights of the first step agree: check that gradients are cleared after each step, and the "
        "learning rate of later ones"
    )


def _in_the_first(found: Trajectory, wanted: Trajectory) -> str:
    """What it says of the first gradient norm."""
    if not found.first or not wanted.first:
        return ""
    clipped = found.grad_norms[0] / wanted.grad_norms[0]
    return _of_gradients(found.first["exp_avg"], wanted.first["exp_avg"]) or (
        f"; clipped, the gradients agree: before, they are {clipped:.4g} times what they must be"
    )


def _of_gradients(found: Tensors, wanted: Tensors) -> str:
    """What is wrong with the gradients of the first step, of which first moments are a share; "" if nothing is."""
    wrong = [name for name in wanted if not _close(found[name], wanted[name])]
    if not wrong:
        return ""
    for name in wrong:
        for other in wrong:
            same_shape = name != other and found[name].shape == wanted[other].shape
            if same_shape and _close(found[name], wanted[other]):
                return f"; in the first step {name} has the gradient of {other}: names are swapped"
    factors = [_factor(found[name], wanted[name]) for name in wrong]
    known = [factor for factor in factors if factor is not None]
    if len(known) == len(wrong) and max(known) - min(known) <= CLOSE * abs(known[0]):
        return f"; the gradients of the first step are {known[0]:.4g} times what they must be in {_such(wrong, wanted)}"
    return (
        f"; the gradients of the first step differ in {_such(wrong, wanted)}: they may not be summed over all ranks, "
        "or more than once, or some samples be left out"
    )


def _such(names: Sequence[str], of: Tensors) -> str:
    return f"{len(names)} of {len(of)} tensors, such as {names[0]}"


def _close(found: Array, wanted: Array) -> bool:
    return _l2(found - wanted) <= CLOSE * _l2(wanted)


def _factor(found: Array, wanted: Array) -> float | None:
    """The number by which `wanted` was multiplied; None if `found` is no multiple of it."""
    squares = float((wanted.astype(np.float64) ** 2).sum())
    factor = float((found.astype(np.float64) * wanted).sum()) / squares if squares else 0.0
    return factor if _l2(found - factor * wanted) <= CLOSE * _l2(found) else None


def _l2(values: Array) -> float:
    return float(np.sqrt((values.astype(np.float64) ** 2).sum()))


def weights_apart(found: Tensors, wanted: Tensors) -> float:
    """The L2 norm of the difference, relative to that of `wanted`."""
    require_same_tensors("weights", found, wanted)
    apart = math.fsum(float(((found[name] - wanted[name]).astype(np.float64) ** 2).sum()) for name in wanted)
    size = math.fsum(float((wanted[name].astype(np.float64) ** 2).sum()) for name in wanted)
    return math.sqrt(apart / size)


def different(found: Mapping[str, Tensors], wanted: Mapping[str, Tensors], keys: Collection[str] = SAVED) -> list[str]:
    """The tensors that are not equal to the last bit."""
    for key in keys:
        require_same_tensors(key, found[key], wanted[key])
    return [
        f"{key} of {name}" for key in keys for name in wanted[key] if not same_bits(found[key][name], wanted[key][name])
    ]


def require_same_tensors(key: str, found: Collection[str], wanted: Collection[str]) -> None:
    missing, extra = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    assert not missing, f"{key} has no box, or only replicas, of {', '.join(missing)}"
    assert not extra, f"{key} has unexpected boxes of {', '.join(extra)}"


def same_bits(a: Array, b: Array) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


@reference
def transformers_outputs(directory: Path, samples: SampleBatch) -> dict[Output, FloatArray]:
    """Log-probs and entropy [N] by transformers alone, from all logits of each sample by itself."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, trust_remote_code=False).eval()
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


@reference
def largest_parameter(directory: Path) -> int:
    """The number of elements of the model's largest parameter, in which a layer's experts are fused."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory, trust_remote_code=False))
    return max(param.numel() for param in model.parameters())


def mean_apart(found: Sequence[float], wanted: Sequence[float]) -> float:
    """The mean over steps of |found - wanted|, relative to the mean |wanted|, since single losses may be near zero."""
    return float(np.abs(np.subtract(found, wanted)).mean() / np.abs(wanted).mean())


def saved_tensors(source: CheckpointSource) -> Tensors:
    return {name: source.read(name, (0,) * len(shape), shape).numpy() for name, shape in source.shapes.items()}
