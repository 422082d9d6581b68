"""Combine all ranks' reports, and compare them: bit by bit, within tolerances, with transformers."""

from __future__ import annotations

import functools
import json
import math
import pickle
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from attrs import field, frozen
from transformers import AutoConfig, AutoModelForCausalLM

from corerl.backend.primitives import SAVED
from corerl.checkpoint import CheckpointSource
from corerl.types import (
    TARGETS,
    Array,
    BoolArray,
    FloatArray,
    ForwardResult,
    Output,
    SampleBatch,
    TrainResult,
    merge_metrics,
)
from corerl_testing.causes import Mismatch
from corerl_testing.harness import State
from corerl_testing.require import require, require_equal, require_near
from corerl_testing.scenarios import training
from corerl_testing.tolerances import (
    BFLOAT16_GRAD_NORM,
    BFLOAT16_LOSS,
    GRAD_NORM,
    HALF_MOVES_L2,
    LOGPROBS,
    LOSS,
    METRICS,
    WEIGHTS_L2,
)

T = TypeVar("T")
Tensors = dict[str, Array]  # whole tensors by HF name

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
    for number, results in enumerate(steps):
        applied = [result.applied for result in results]
        norms = ", ".join(f"{result.grad_norm:.6g}" for result in results)
        require(all(applied), f"call {number} to optimizer_step was skipped: applied is {applied}, grad_norm {norms}")
    for what, counted in (
        ("Backend.adam_step", [report.adam_step for report in reports]),
        ("InitResult.optimizer_step", [report.init.optimizer_step for report in reports]),
    ):
        require(len(set(counted)) == 1, f"{what} is {counted} by rank, expected the same number on each")
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
    if not equal:
        raise Mismatch(
            f"the ranks disagree on the norm: {norms}; sum gradients over all ranks that have other samples, and "
            "squares over those that hold other parts of the model"
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
        names = [sorted(filter(_required, each)) for each in (mine, others)]
        require_equal(f"the metrics of step {number}", *(dict.fromkeys(each) for each in names))
        for name, value in others.items():
            if name not in mine or (in_calls and not _required(name)):
                continue
            require_near(f"the metric {name!r} of step {number}, of all ranks together,", mine[name], value, METRICS)


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
        for name, seen in times.items():
            if (seen != 1).any():
                raise AssertionError(_overlap(key, name, seen))
        found[key] = tensors
    return found


def _overlap(key: str, name: str, seen: Array) -> str:
    at = tuple(int(each[0]) for each in np.nonzero(seen != 1))
    times = "no rank" if not seen[at] else f"{seen[at]} chunks that are not replicas"
    return (
        f"the element {list(at)} of {name} is in {times} of local_state({key!r}), expected exactly one: offsets and "
        "shapes are those of the whole tensor, and of ranks that hold the same part all but one say replica=True"
    )


def in_order(results: Sequence[ForwardResult], samples: SampleBatch, output: Output) -> FloatArray:
    """[N, ...] output in the batch's order; each sample must come from exactly one rank."""
    shape = next(result.outputs[output].shape[1:] for result in results if len(result.rows))
    column = np.full((len(samples.tokens), *shape), np.nan, np.float32)
    for result in results:
        for index, sample in enumerate(result.rows):
            start, end = samples.offsets[sample : sample + 2]
            values = result.outputs[output][result.offsets[index] : result.offsets[index + 1]]
            require(len(values) == end - start, f"sample {sample} has {len(values)} {output}, expected {end - start}")
            require(
                np.isnan(column[start:end]).all(),
                f"{output} of sample {sample} came twice, or are no numbers; of ranks that share samples one sets "
                "outputs in its layout",
            )
            column[start:end] = values
    if np.isnan(column).any():
        at = int(np.searchsorted(samples.offsets, np.flatnonzero(np.isnan(column))[0], side="right")) - 1
        raise AssertionError(
            f"{output} of sample {at} came from no rank, or are no numbers; each sample comes from one"
        )
    return column


def assert_outputs(found: FloatArray, wanted: FloatArray, samples: SampleBatch, output: Output) -> None:
    """Compare an output [N] of all samples, within the tolerance of log-probs."""
    wrong = np.flatnonzero(~_near(found, wanted))
    if not len(wrong):
        return
    bounds = [slice(*each) for each in pairwise(samples.offsets.tolist())]
    at = int(np.searchsorted(samples.offsets, wrong[0], side="right")) - 1
    token = int(wrong[0] - samples.offsets[at])
    text = f"{output} of token {token} of sample {at} is {found[wrong[0]]}, expected {wanted[wrong[0]]}"
    mine = found[bounds[at]]
    if np.isin(wrong, samples.offsets[:-1]).all():
        text += "; only first tokens differ, which nothing predicts: outputs are exactly 0 there"
    elif all(_near(found[each][1:-1], wanted[each][2:]).all() for each in bounds):
        text += "; each token has that of the next one"
    elif all(_near(found[each][2:], wanted[each][1:-1]).all() for each in bounds):
        text += "; each token has that of the one before"
    else:
        others = (other for other, each in enumerate(bounds) if len(wanted[each]) == len(mine))
        twin = next((other for other in others if other != at and _near(mine, wanted[bounds[other]]).all()), None)
        if twin is not None:
            text += f"; sample {at} has those of sample {twin}"
        elif _near(np.sort(found), np.sort(wanted)).all():
            text += "; the values are all there, in another order than that of the samples"
    right = int((wrong - samples.offsets[np.searchsorted(samples.offsets, wrong, side="right") - 1]).min())
    if right > 1:
        text += f"; the first {right} tokens of each sample are right, as if longer ones saw what they are packed with"
    raise AssertionError(f"{text}; {len(wrong)} of {len(wanted)} differ")


def _near(found: FloatArray, wanted: FloatArray) -> BoolArray:
    near: BoolArray = np.isclose(found, wanted, rtol=LOGPROBS.relative, atol=LOGPROBS.absolute)
    return near


# ---- what is compared ------------------------------------------------------------------------------------------------


def assert_follows(found: Trajectory, wanted: Trajectory) -> None:
    """Compare the loss and grad norm of each step, and the final weights, within the float32 tolerances."""
    require_equal("the number of steps", len(found.losses), len(wanted.losses))
    for step, (loss, norm) in enumerate(zip(wanted.losses, wanted.grad_norms, strict=True)):
        near = pytest.approx(loss, rel=LOSS.relative, abs=LOSS.absolute)
        if found.losses[step] != near:
            hint = _after_the_first(found, wanted) if step else BEFORE_A_STEP
            text = _difference_of("loss", step, found.losses, loss) + hint
            raise Mismatch(text) if hint else AssertionError(text)
        near = pytest.approx(norm, rel=GRAD_NORM.relative)
        if found.grad_norms[step] != near:
            hint = _after_the_first(found, wanted) if step else _in_the_first(found, wanted)
            text = _difference_of("gradient norm", step, found.grad_norms, norm) + hint
            raise Mismatch(text) if hint and step else AssertionError(text)
    assert_same_weights(found, wanted, _after_the_first(found, wanted))


def assert_same_weights(found: Trajectory, wanted: Trajectory, hint: str = "") -> None:
    """Compare the weights at the end, within the float32 tolerance."""
    mine, others = found.state["master"], wanted.state["master"]
    apart = weights_apart(mine, others)
    if not apart < WEIGHTS_L2:
        worst = max(others, key=lambda name: _l2(mine[name] - others[name]) / (_l2(others[name]) or 1.0))
        raise AssertionError(
            f"the weights at the end are {apart:.2g} of their norm from those expected, at most {WEIGHTS_L2:g} is "
            f"allowed; losses and gradient norms agree, and {worst} differs most{hint}"
        )


def assert_near_float32(found: Trajectory, wanted: Trajectory, *, at_least: float = 0.0) -> None:
    """Compare a run in half precision with one in float32, whose weights are further than `at_least` away."""
    for what, mine, others, most in (
        ("losses", found.losses, wanted.losses, BFLOAT16_LOSS),
        ("gradient norms", found.grad_norms, wanted.grad_norms, BFLOAT16_GRAD_NORM),
    ):
        apart = mean_apart(mine, others)
        require(
            apart < most,
            f"the {what} are {apart:.2g} from those in float32, relative and on average, at most {most:g} is allowed: "
            f"{mine} against {others}",
        )
    apart = weights_apart(found.state["master"], wanted.state["master"])
    require(
        apart > at_least,
        f"the weights are {apart:.2g} of their norm from those of float32, expected more than {at_least:g}: "
        "train.precision is ignored",
    )
    # The first steps of training move losses by less than rounding does, so that they do not show a wrong optimizer.
    moves, expected = (
        {name: end - each.at_start["master"][name] for name, end in each.state["master"].items()}
        for each in (found, wanted)
    )
    apart = weights_apart(moves, expected)
    require(
        apart < HALF_MOVES_L2,
        f"what the steps added to the weights is {apart:.2g} of its norm from that in float32, at most "
        f"{HALF_MOVES_L2:g} is allowed: look at the optimizer in this precision (learning rate, moments, decay, what "
        "it does with a scaled loss)",
    )


def assert_losses(what: str, found: Sequence[float], wanted: Sequence[float]) -> None:
    """Compare the losses of a run step by step, within the float32 tolerance."""
    require_equal(f"the number of losses of {what}", len(found), len(wanted))
    for step, (mine, other) in enumerate(zip(found, wanted, strict=True)):
        require_near(f"the loss of step {step} of {what}", mine, other, LOSS)


def assert_resumes(resumed: Trajectory, uninterrupted: Trajectory, *, saved: int, checkpoint: str = "") -> None:
    """The run that was saved after `saved` steps goes on as the uninterrupted one, to the last bit. It went on from
    `checkpoint`, if that is to be compared where they differ."""
    require_equal("InitResult.optimizer_step after the resume", resumed.optimizer_step, saved)
    require_equal("Backend.adam_step at the end of the resumed run", resumed.adam_step, uninterrupted.adam_step)
    for what, mine, others in (
        ("loss", resumed.losses, uninterrupted.losses[saved:]),
        ("gradient norm", resumed.grad_norms, uninterrupted.grad_norms[saved:]),
    ):
        require_equal(f"the number of steps with a {what}", len(mine), len(others))
        for at, (found, wanted) in enumerate(zip(mine, others, strict=True)):
            if found == wanted:
                continue
            text = (
                f"the {what} of step {saved + at} is {found} in the run resumed after step {saved - 1}, and {wanted} "
                "in the uninterrupted one: "
            )
            if not at:
                raise AssertionError(
                    f"{text}weights, or what forward_backward reads of them, are not those that were saved"
                )
            raise AssertionError(
                f"{text}the first step after the resume was equal, so the weights were restored, but not the moments, "
                f"their count of steps (set_adam_step) or the learning rate{_moments_of(resumed.at_start, checkpoint)}"
            )
    require_same_state(
        "the state at the end of the resumed run and of the uninterrupted one", resumed.state, uninterrupted.state
    )


def _moments_of(state: Mapping[str, Tensors], checkpoint: str) -> str:
    """Which moments are nothing but zeros where some steps have been taken, or that all are the checkpoint's."""
    empty = [key for key in SAVED[1:] if key in state and not any(values.any() for values in state[key].values())]
    if empty:
        return f"; right after the resume local_state gives {' and '.join(empty)} as zeros"
    if checkpoint:
        saved = {key.value: saved_tensors(CheckpointSource(checkpoint, key)) for key in SAVED[1:]}
        if not different(state, saved, SAVED[1:]):
            return "; right after the resume local_state gives the moments that were saved, so it is not these"
    return ""


def require_same_state(
    what: str, found: Mapping[str, Tensors], wanted: Mapping[str, Tensors], keys: Collection[str] = SAVED
) -> None:
    """Compare whole tensors to the last bit; the first that differs is named, with its element furthest off."""
    wrong = different(found, wanted, keys)
    if not wrong:
        return
    key, _, name = wrong[0].partition(" of ")
    mine, other = found[key][name], wanted[key][name]
    if mine.shape != other.shape or mine.dtype != other.dtype:
        text = f"is {mine.dtype} {mine.shape}, expected {other.dtype} {other.shape}"
    else:
        apart = np.nan_to_num(np.abs(mine.astype(np.float64) - other), nan=np.inf)
        at = np.unravel_index(int(apart.argmax()), apart.shape)
        text = f"has {mine[at]:.9g} at {[int(each) for each in at]}, expected {other[at]:.9g}"
        text += "; all of it is 0" if not mine.any() else ""
    number = sum(len(wanted[each]) for each in keys)
    raise AssertionError(f"{what} differ: {key} of {name} {text}; {len(wrong)} of {number} tensors differ")


# No gradient or optimizer has a part in the loss of the first step.
BEFORE_A_STEP = (
    "; no step was taken yet: look at the pass in training (temperature, attention, dropout, the weights and buffers "
    "that it reads) and at the loss (the tokens' weights, samples that are left out)"
)


def _difference_of(what: str, step: int, found: Sequence[float], wanted: float) -> str:
    return f"the {what} of step {step} is {found[step]}, expected {wanted}"


def _after_the_first(found: Trajectory, wanted: Trajectory) -> str:
    """What the state after the first step says of a later difference; "" if it is not known."""
    if not found.first or not wanted.first:
        return ""
    if text := _of_gradients(found.first["exp_avg"], wanted.first["exp_avg"], same_norm=True):
        return text
    mine, others, start = found.first["master"], wanted.first["master"], wanted.at_start["master"]
    wrong = [name for name in others if _l2(mine[name] - others[name]) > CLOSE * _l2(others[name] - start[name])]
    if wrong:
        matrices = {others[name].ndim > 1 for name in wrong}
        if len(matrices) < len({values.ndim > 1 for values in others.values()}):
            none = "vector" if True in matrices else "matrix"
            look = f"weight decay, which only matrices have, for no {none} is among them"
        else:
            look = "weight decay, the learning rate and bias correction"
        return (
            f"; the gradients of the first step agree, but not the weights after it, in {_such(wrong, others)}: look "
            f"at {look}"
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
        f"; clipped, the gradients agree: before, they are {clipped:.4g} times what they must be, or their squares are "
        "not summed once over all parts of the model"
    )


def _of_gradients(found: Tensors, wanted: Tensors, *, same_norm: bool = False) -> str:
    """What is wrong with the gradients of the first step, of which first moments are a share; "" if nothing is.
    `same_norm`: before they were clipped, their norm was right."""
    require_same_tensors("exp_avg", found, wanted)
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
    such = _such(wrong, wanted)
    if len(known) == len(wrong):
        one = max(known) - min(known) <= CLOSE * abs(known[0])
        by = (
            f"{known[0]:.4g} times"
            if one
            else f"{min(known):.4g} to {max(known):.4g} times, each by a factor of its own,"
        )
        if (same_norm or not one) and any(known):
            return (
                f"; the gradients of the first step, once clipped, are {by} what they must be in {such}: look at the "
                "clip, which divides all gradients by one norm, that of the whole model, and only above the limit"
            )
        text = f"; the gradients of the first step are {by} what they must be in {such}"
        only_some = len(wrong) < len(wanted) and not any(known)
        return text + (": none gets there; look at requires_grad and detach" if only_some else "")
    return (
        f"; the gradients of the first step differ in {such}: samples or calls may be left out or count more than "
        "once, sums over ranks be missing in these tensors, or ranks clip their own gradients before they are summed"
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
    require(not missing, f"{key} has no box, or only replicas, of {', '.join(missing)}")
    require(not extra, f"{key} has unexpected boxes of {', '.join(extra)}")


def same_bits(a: Array, b: Array) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def reference(function: Callable[..., T]) -> Callable[..., T]:
    """What backends are compared with and have no part in, such as transformers' numbers, computed once in a process:
    `function`, asked once for equal arguments: plain data, and directories whose files stay as they are. All callers
    get the same result, which none may change."""
    known: dict[bytes, T] = {}

    @functools.wraps(function)
    def remembering(*args: Any, **named: Any) -> T:
        asked = pickle.dumps((args, named))
        if asked not in known:
            known[asked] = function(*args, **named)
        return known[asked]

    return remembering


@reference
def transformers_outputs(directory: Path, samples: SampleBatch) -> dict[Output, FloatArray]:
    """Log-probs and entropy [N] by transformers alone, from all logits of each sample by itself. Log-probs are of the
    column `targets`, [N] or [N, K], if there is one."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, trust_remote_code=False).eval()
    named = samples.columns.get(TARGETS, samples.tokens)
    columns: dict[Output, FloatArray] = {Output.LOGPROBS: np.zeros(named.shape, np.float32)}
    columns[Output.ENTROPY] = np.zeros(len(samples.tokens), np.float32)
    for start, end in zip(samples.offsets[:-1], samples.offsets[1:], strict=True):
        tokens = torch.tensor(samples.tokens[start:end])
        with torch.no_grad():
            logits = model(input_ids=tokens[None]).logits[0, :-1] / samples.temperature
        distribution = torch.distributions.Categorical(logits=logits)
        following = torch.tensor(named[start + 1 : end])
        columns[Output.LOGPROBS][start + 1 : end] = distribution.log_prob(following.t()).t().numpy()
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
