"""References for what routers do: transformers' MoE models, with experts read or given, and with its balancing loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import evolve, frozen
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from corerl.types import Array, FloatArray, Output, SampleBatch
from corerl_testing.compare import grad_norm_of, in_order, loss_of, metrics_of, reference, whole
from corerl_testing.harness import TRAIN, Setup, State, make_samples
from corerl_testing.require import require, require_near
from corerl_testing.scenarios.training import EXPERTS, Replayed, Trained
from corerl_testing.tolerances import BALANCED_ROUTER_GRADS, GRAD_NORM, LOGPROBS, LOSS, METRICS, ROUTER_GRADS

BALANCE = 0.5  # coefficient of the balancing loss


@frozen(kw_only=True)
class Routed:
    """One pass over all samples, each by itself."""

    logprobs: FloatArray  # [N]
    experts: Array  # [N, MoE layers, experts per token], each router's most likely expert first
    loss: float  # -sum_t weights_t * logprobs_t
    grad_norm: float  # of the loss, over the whole model
    router_grads: dict[str, Array]  # of the loss, by the name of each router's weight


@reference
def through_experts(
    directory: Path, samples: SampleBatch, weights: FloatArray, *, experts: Array | None = None
) -> Routed:
    """Pass samples through the model, in float64 by transformers and autograd alone. `experts` [N, layers, k] replace
    the routers' choices; where a token has -1 in a layer, its router chooses."""
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float64, experts_implementation="eager", trust_remote_code=False
    ).eval()
    routers = [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]
    logprobs, chosen, loss = np.zeros(len(samples.tokens)), [], torch.zeros((), dtype=torch.float64)
    for start, end in zip(samples.offsets[:-1], samples.offsets[1:], strict=True):
        tokens = torch.tensor(samples.tokens[start:end])
        given = None if experts is None else torch.tensor(experts[start:end].astype(np.int64))
        with _using(routers, given) as used:
            logits = model(input_ids=tokens[None]).logits[0, :-1] / samples.temperature
        found = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        loss = loss - (torch.tensor(weights[start + 1 : end]) * found).sum()
        logprobs[start + 1 : end] = found.detach().numpy()
        chosen.append(torch.stack(used, dim=1).numpy())
    torch.autograd.backward(loss)
    grads = torch.cat([grad.flatten() for _, grad in _grads(model)])
    return Routed(
        logprobs=logprobs.astype(np.float32),
        experts=np.concatenate(chosen),
        loss=float(loss.detach()),
        grad_norm=float(grads.norm()),
        router_grads={name: grad.numpy() for name, grad in _grads(model) if name.endswith(".gate.weight")},
    )


@frozen(kw_only=True)
class Balanced:
    """One step on all samples, of the likelihood and the balancing loss."""

    loss: float  # -sum_t weights_t * logprobs_t
    aux_loss: float  # without its coefficient
    grad_norm: float  # of both, over the whole model
    router_grads: dict[str, Array]


@reference
def with_aux_loss(directory: Path, samples: SampleBatch, *, coef: float) -> Balanced:
    """The loss that transformers itself computes with labels and router logits, by autograd in float64: of each sample,
    whose likelihood counts by its loss tokens, and its balancing loss by its tokens."""
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float64, experts_implementation="eager", trust_remote_code=False
    ).eval()
    model.router_aux_loss_coef = coef
    mask, loss, aux = samples.columns["loss_mask"], 0.0, 0.0
    for sample in range(len(samples)):
        part = samples.take_rows(np.array([sample]))
        tokens = torch.tensor(part.tokens)[None]
        labels = torch.tensor(np.where(part.columns["loss_mask"], part.tokens, -100))[None]
        found = model(input_ids=tokens, labels=labels, output_router_logits=True)
        likelihood = (found.loss - coef * found.aux_loss) * (part.columns["loss_mask"].sum() / mask.sum())
        share = len(part.tokens) / len(samples.tokens)
        (likelihood + coef * share * found.aux_loss).backward()
        loss, aux = loss + likelihood.item(), aux + share * found.aux_loss.item()
    grads = dict(_grads(model))
    return Balanced(
        loss=loss,
        aux_loss=aux,
        grad_norm=float(torch.cat([grad.flatten() for grad in grads.values()]).norm()),
        router_grads={name: grad.numpy() for name, grad in grads.items() if name.endswith(".gate.weight")},
    )


def assert_balances(directory: Path, setup: Setup, train: Callable[[Setup, SampleBatch], Sequence[Trained]]) -> None:
    """Check `train`, which takes a first step with this setup and returns all ranks' reports, with a balancing loss and
    without. Each sample is a micro-batch."""
    samples = evolve(make_samples(8, samples=6), temperature=1.0)
    plain = with_aux_loss(directory, samples, coef=0.0)
    for coef, tolerance in ((BALANCE, BALANCED_ROUTER_GRADS), (0.0, ROUTER_GRADS)):
        wanted = with_aux_loss(directory, samples, coef=coef)
        ranks = train(evolve(setup, train=evolve(setup.train, aux_loss_coef=coef)), samples)
        results = [rank.results[0] for rank in ranks]
        when = f"with aux_loss_coef = {coef:g}, against transformers' own,"
        require_near(f"the loss {when}", loss_of(results), wanted.loss, LOSS)
        found = metrics_of(results).get("moe/aux_loss")
        if coef and found is not None:
            require_near(f"the metric 'moe/aux_loss' {when}", found, wanted.aux_loss, METRICS)
        require((found is not None) == bool(coef), f"the metric 'moe/aux_loss' is {found}, but aux_loss_coef {coef:g}")
        require_near(f"the gradient norm {when}", grad_norm_of(results), wanted.grad_norm, GRAD_NORM)
        _assert_router_grads([rank.state for rank in ranks], wanted.router_grads, wanted.grad_norm, within=tolerance)
        for name, grad in plain.router_grads.items() if coef else ():
            share = float(np.linalg.norm(wanted.router_grads[name] - grad) / np.linalg.norm(grad))
            require(
                share > 0.1, f"the balancing loss changes {name}'s gradient by {share:.2g} of it: too little to see"
            )


def _assert_router_grads(states: Sequence[State], wanted: dict[str, Array], grad_norm: float, *, within: float) -> None:
    """Compare routers' gradients, which are a small part of the norm, by Adam's first moments after the first step."""
    kept = whole(states)["exp_avg"]
    missing = sorted(wanted.keys() - kept.keys())
    require(not missing, f"exp_avg has no box, or only replicas, of {', '.join(missing)}; see local_state(EXP_AVG)")
    clipped = (1 - TRAIN.optimizer.betas[0]) * min(1.0, TRAIN.optimizer.clip_norm / grad_norm)
    for name, grad in wanted.items():
        apart = np.linalg.norm(kept[name] - clipped * grad) / np.linalg.norm(clipped * grad)
        require(
            apart < within,
            f"the gradient of {name} is {apart:.1e} of its norm from transformers', at most {within:g} is allowed",
        )


def _grads(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, param.grad) for name, param in model.named_parameters() if param.grad is not None]


@contextmanager
def _using(routers: list[nn.Module], given: Tensor | None) -> Iterator[list[Tensor]]:
    """Use the experts `given` in the block; yields a list that gets each layer's experts [t, k], in order."""
    used: list[Tensor] = []

    def hook(router: Any, arguments: Any, output: Any) -> tuple[Tensor, Tensor, Tensor]:
        logits, _, own = output
        index = own if given is None else torch.where(given[:, len(used)] < 0, own, given[:, len(used)])
        used.append(index)
        scores = logits.sigmoid() if hasattr(router, "e_score_correction_bias") else logits.softmax(-1)
        scores = scores.gather(1, index)
        if router.norm_topk_prob:
            scores = scores / scores.sum(-1, keepdim=True)
        return logits, scores * getattr(router, "routed_scaling_factor", 1.0), index

    handles = [router.register_forward_hook(hook) for router in routers]
    yield used
    for handle in handles:
        handle.remove()


def assert_replays(directory: Path, replay: Callable[[SampleBatch], Sequence[Replayed]]) -> None:
    """Check `replay`, which returns all ranks' reports of a step with TRAIN, at a rate that changes the routing."""
    free = make_samples(7, samples=13)
    own = through_experts(directory, free, token_mean(free))
    samples = free.with_columns(**{EXPERTS: others(own.experts, free)})
    wanted = through_experts(directory, free, token_mean(free), experts=samples.columns[EXPERTS])
    ranks = replay(samples)

    def experts(part: str) -> Array:
        return np.sort(in_order([getattr(rank, part) for rank in ranks], samples, Output.ROUTED_EXPERTS), axis=2)

    def logprobs(part: str) -> FloatArray:
        return in_order([getattr(rank, part) for rank in ranks], samples, Output.LOGPROBS)

    for part, of, how in (("chosen", own, "as routers choose them"), ("given", wanted, "as they were given")):
        _require_experts(f"the experts of a pass {how}", experts(part), np.sort(of.experts, axis=2))
        require_near(f"log-probs by token, through experts {how},", logprobs(part), of.logprobs, LOGPROBS)
    results = [rank.result for rank in ranks]
    require_near("the loss of a step through the experts that were given", loss_of(results), wanted.loss, LOSS)
    norm = grad_norm_of(results)
    require_near("the gradient norm of a step through the experts that were given", norm, wanted.grad_norm, GRAD_NORM)
    _assert_router_grads([rank.state for rank in ranks], wanted.router_grads, wanted.grad_norm, within=ROUTER_GRADS)
    for name, grad in wanted.router_grads.items():
        other = np.linalg.norm(grad - own.router_grads[name]) / np.linalg.norm(grad)
        require(other > 1000 * ROUTER_GRADS, f"other experts change the gradient of {name} by {other:.2g}: too little")
    given = samples.columns[EXPERTS] >= 0
    what = "the experts that were given, after a step,"
    _require_experts(what, experts("given_after")[given.any(axis=(1, 2))], experts("given")[given.any(axis=(1, 2))])
    require(
        not np.array_equal(experts("chosen_after"), experts("chosen")),
        "routers choose the same experts of all tokens after a large step, expected others: they are not trained",
    )


def _require_experts(what: str, found: Array, wanted: Array) -> None:
    wrong = np.argwhere((found != wanted).any(axis=2))
    if len(wrong):
        token, layer = wrong[0].tolist()
        raise AssertionError(
            f"{what}, are {found[token, layer].tolist()} at token {token} in layer {layer}, expected "
            f"{wanted[token, layer].tolist()}; {len(wrong)} of {found.shape[0] * found.shape[1]} differ"
        )


def token_mean(samples: SampleBatch) -> FloatArray:
    """[N] weight of each token in a step of these samples."""
    mask = samples.columns["loss_mask"]
    weights: FloatArray = (mask / mask.sum()).astype(np.float32)
    return weights


def others(own: Array, samples: SampleBatch) -> Array:
    """Random experts in the shape of the routers' `own` [N, layers, k], of 8; -1 for a few tokens and for the last of
    each sample, whose experts an engine does not know."""
    rng = np.random.default_rng(3)
    given = rng.permuted(np.broadcast_to(np.arange(8), (*own.shape[:2], 8)), axis=2)[..., : own.shape[2]]
    given[rng.random(len(given)) < 0.1] = -1
    given[samples.offsets[1:] - 1] = -1
    return given.astype(np.int16)
