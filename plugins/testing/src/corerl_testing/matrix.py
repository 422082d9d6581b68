"""What becomes of every causal language model type of transformers: packed, whole, or refused and why; and whether what
CoreRL computes is what transformers does."""

from __future__ import annotations

import copy
import json
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from typing import Any

import torch
from attrs import asdict, evolve, frozen
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from transformers.utils import logging

from corerl.errors import ModelError
from corerl.messages import one_line
from corerl.models import Policy, build_on_meta, hf_boxes, make_policy, materialize, meta_model, stored_buffers
from corerl.models.layouts import choose_layout
from corerl.ops import PackedSequences
from corerl.types import Output
from corerl_testing.smallest import drawn_model, smallest_config

LIMIT = 60  # seconds for one type
LENGTHS = (24, 9, 17)  # tokens of the sequences that are compared, longer than the smallest configs' windows
TEMPERATURE = 0.7
ONLY = (Output.LOGPROBS,)
# Gradients may be off further, where transformers' own in float32 are half as far from those in float64.
TOLERANCE = 1e-5  # of a log-prob, relative to it above 1, and of a parameter's gradient relative to its norm
SMALL = 1e-3  # gradients below this fraction of the whole one's norm are compared with that: they may be all rounding


class Status(StrEnum):
    PACKED = "packed"
    WHOLE = "whole"
    REFUSED = "refused"  # by CoreRL
    WRONG = "wrong"  # accepted, but what it computes is not what transformers does
    UNBUILT = "unbuilt"  # transformers cannot build it here from a small config


@frozen(kw_only=True)
class Row:
    model_type: str
    status: Status
    pictures: bool = False  # whether its checkpoints have parts for pictures: what is examined is their text half
    reason: str = ""  # why it is not packed
    logprobs: float | None = None  # the largest difference, if it was checked, relative as above
    gradients: float | None = None  # the largest difference, relative as above


def model_types() -> list[str]:
    """Every type that `AutoModelForCausalLM` or `AutoModelForImageTextToText` knows."""
    return list({**MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, **MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES})


def examine(model_type: str, *, check: bool = False) -> Row:
    """What becomes of a model of `smallest_config`; with `check`, it is compared with transformers in float32."""
    blank = Row(
        model_type=model_type, status=Status.UNBUILT, pictures=model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    )
    try:
        config = smallest_config(model_type)
    except Exception as error:  # whatever transformers' code does with a config that nobody publishes
        return evolve(blank, reason=one_line(error))
    if blank.pictures:
        config.architectures = [MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[model_type]]  # as published checkpoints say
    try:
        chosen = choose_layout(meta_model(config), "auto")
        policy = make_policy(config, dtype=torch.float32, layout=chosen.name)
        hf_boxes(policy.model)
    except ModelError as error:
        status = Status.REFUSED if error.__cause__ is None else Status.UNBUILT  # which has what transformers raised
        return evolve(blank, status=status, reason=error.message)
    row = evolve(blank, status=Status(chosen.name), reason=chosen.why)
    if not check:
        return row
    model = _drawn_text(config) if blank.pictures else drawn_model(config)
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() > 1:
                param.mul_(2)  # else all tokens are nearly equally likely, whatever they see
        theirs = stored_buffers(model)
        for name, buffer in stored_buffers(policy.model).items():
            buffer.copy_(theirs[name])
    materialize(policy.model, {name: nn.Parameter(param.detach().clone()) for name, param in model.named_parameters()})
    sequences = [torch.randint(3, 97, (length,), generator=torch.Generator().manual_seed(1)) for length in LENGTHS]
    try:
        wanted = _alone(model, sequences)
    except Exception as error:  # as above
        return evolve(blank, reason=f"transformers' own forward: {one_line(error)}")
    logprobs, gradients = _differences(_together(policy.eval(), sequences), policy.model, wanted, model)
    row = evolve(row, logprobs=logprobs, gradients=gradients)
    if logprobs <= TOLERANCE and gradients <= TOLERANCE:  # which a NaN is not
        return row
    if logprobs <= TOLERANCE and gradients <= 2 * _rounding(model, sequences):
        return row
    why = f"log-probs differ by {logprobs:.2g}, gradients by {gradients:.2g} of their norm, though {chosen.name}"
    return evolve(row, status=Status.WRONG, reason=why)


def _drawn_text(config: PreTrainedConfig) -> PreTrainedModel:
    """The text half of a model with random weights: towers are not small, in a config that is small otherwise."""
    model = build_on_meta(config, dtype=torch.float32, attention="eager", vectors=True)
    drawn = {
        name: nn.Parameter(0.02 * torch.randn(param.shape) if param.is_meta else param.detach())
        for name, param in model.named_parameters()
    }
    materialize(model, drawn)
    return model.eval()


def _alone(model: Any, sequences: Sequence[Tensor]) -> Tensor:
    """The log-probs of each sequence alone, by the model of transformers."""
    parts = []
    for each in sequences:
        log_p = (model(input_ids=each[None], use_cache=False).logits[0, :-1].float() / TEMPERATURE).log_softmax(-1)
        parts += [torch.zeros(1), log_p.gather(-1, each[1:, None])[:, 0]]
    return torch.cat(parts)


def _rounding(model: Any, sequences: Sequence[Tensor]) -> float:
    """How far the model's own gradients in float32 are from those in float64; 0 if its code cannot compute in that."""
    exact = copy.deepcopy(model).double()
    try:
        wanted = _alone(exact, sequences)
    except RuntimeError:  # it mixes in float32
        return 0.0
    return _differences(_alone(model, sequences), model, wanted, exact)[1]


def _together(policy: Policy, sequences: Sequence[Tensor]) -> Tensor:
    packing = PackedSequences.of(torch.tensor([0, *map(len, sequences)]).cumsum(0), "cpu")
    positions = torch.cat([torch.arange(len(each)) for each in sequences])
    found: dict[Output, Tensor] = policy(torch.cat(list(sequences)), packing, positions, TEMPERATURE, ONLY)
    return found[Output.LOGPROBS]


def _differences(got: Tensor, mine: nn.Module, wanted: Tensor, theirs: nn.Module) -> tuple[float, float]:
    """The largest of two ways to compute log-probs, and of the gradients of a weighted sum of them; NaN if any is."""
    weights = torch.rand(len(got), generator=torch.Generator().manual_seed(2))
    found, right = _gradients(got @ weights, mine), _gradients(wanted @ weights, theirs)
    least = SMALL * torch.stack([gradient.norm() for gradient in right.values()]).norm()
    apart = [
        (found[name].to(each.dtype) - each).norm() / torch.maximum(each.norm(), least) for name, each in right.items()
    ]
    off = ((got - wanted) / wanted.abs().clamp(min=1)).detach().abs()
    return float(off.max()), float(torch.stack(apart).max())


def _gradients(loss: Tensor, model: nn.Module) -> dict[str, Tensor]:
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    return {
        name: torch.zeros_like(param) if gradient is None else gradient
        for (name, param), gradient in zip(trained.items(), found, strict=True)
    }


def rows(
    types: Iterable[str], *, check: bool = False, examine_row: Callable[..., Row] = examine, limit: float = LIMIT
) -> Iterator[Row]:
    """`examine` each type in a process of its own, which has `limit` seconds: none can end the table."""
    for model_type in types:
        yield _in_child(examine_row, model_type, check=check, limit=limit)


def _in_child(examine_row: Callable[..., Row], model_type: str, *, check: bool, limit: float) -> Row:
    reading, writing = os.pipe()
    pid = os.fork()  # importing torch and transformers again would take longer than the types themselves
    if pid == 0:
        os.close(reading)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # it ends the process
        signal.setitimer(signal.ITIMER_REAL, limit)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(1, 2)
        logging.set_verbosity_error()
        torch.set_num_threads(1)  # a pool of threads does not survive a fork
        try:
            row = examine_row(model_type, check=check)
        except BaseException as error:
            row = Row(model_type=model_type, status=Status.WRONG, reason=f"it raised {one_line(error)}")
        with os.fdopen(writing, "w") as pipe:
            json.dump(asdict(row), pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        answer = pipe.read()
    _, status = os.waitpid(pid, 0)
    if not answer:
        ended = os.waitstatus_to_exitcode(status)
        why = (
            f"did not end within {limit:g} s" if ended == -signal.SIGALRM else f"ended its process with status {ended}"
        )
        return Row(model_type=model_type, status=Status.UNBUILT, reason=why)
    found = json.loads(answer)
    return Row(**{**found, "status": Status(found["status"])})
