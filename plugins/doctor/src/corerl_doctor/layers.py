"""Pass the same tokens through the actor's model as CoreRL trains it and as transformers runs it, and name the first
module in which the two part."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from attrs import frozen
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedConfig, PreTrainedModel

from corerl.config import ModelConfig, RoleConfig
from corerl.models import (
    Policy,
    WholePolicy,
    buffer_chunks,
    build_on_meta,
    hf_boxes,
    hf_config,
    initial_source,
    local_chunks,
    make_policy,
    materialize,
    meta_model,
    own_attention,
    routers,
    stored_buffers,
)
from corerl.ops import PackedSequences
from corerl.plugin import Finding, Level, ok
from corerl.types import Output, offsets_of
from corerl.weights import fill
from corerl_doctor.child import CheckStarted, Report

LENGTHS = (41, 29, 13)  # tokens of each sequence, the longest first; no size of a model, so that dims of tokens show
WINDOW = 8  # a longer one would let every token of these sequences see all before it
TOLERANCE = 1e-3  # of a token's vector; float32 kernels that compute the same differ by 1e-6 to 1e-5
GIB = 2**30

# Parts of the names of modules, from the innermost outwards -> the kind of layer.
KINDS: Mapping[str, Sequence[str]] = {
    "norm": ("norm", "ln_"),
    "rotary embedding": ("rotary", "rope"),
    "embedding": ("embed", "wte", "wpe"),
    "experts": ("experts",),
    "attention": ("attn", "attention", "mixer", "mamba", "conv", "delta"),
    "mlp": ("mlp", "ffn", "feed_forward", "feedforward", "moe"),
}
BETWEEN = "residual stream"  # what joins the modules of a layer: additions, scalings


@frozen(kw_only=True)
class Parting:
    """Where trainer and transformers first differ."""

    kind: str  # of layer
    where: str  # the module, and if it calls others before which of them
    difference: float  # of the token that differs most, relative to its vector


@frozen(kw_only=True)
class Compared:
    modules: int  # that agree, of both sides
    largest: float  # difference among these
    parting: Parting | None


def compare_layers(role: RoleConfig, *, temperature: float) -> Iterator[Report]:
    """One finding: whether the two ways through a role's model agree, on this machine's CPU in float32."""
    model, way = role.model, role.train.layout
    hf = hf_config(model)
    shorten_windows(hf)
    needs, free = 4 * sum(param.numel() for param in meta_model(hf).parameters()), free_memory()
    if needs > 0.8 * free:
        yield Finding(
            level=Level.WARNING,
            what=f"the layers were not compared: the model takes {needs / GIB:.3g} GiB in float32, and this machine "
            f"has {free / GIB:.3g} GiB free",
            why="where trainer and engine part is only looked for on the CPU, on a copy of the model",
            fix="try it on a machine with more memory, or with [model.config] of the same type and fewer layers",
        )
        return
    yield CheckStarted("comparing the layers", "leave out --layers")
    plain = plain_model(hf, model, seed=role.seed)
    policy = policy_like(plain, hf, layout=way)
    found = compare(policy, plain, temperature=temperature)
    ways = f"CoreRL's {way} pass and transformers' own"
    if found.parting is None:
        yield ok(
            f"{ways} agree in all {found.modules} modules that could be compared and in log-probs, to "
            f"{found.largest:.2g}, on {sum(LENGTHS)} tokens in float32; a backend or an engine with modules of its own "
            "was not looked at"
        )
        return
    parting = found.parting
    yield Finding(
        level=Level.ERROR,
        what=f"{ways} part at the {parting.kind}: {parting.where} differs by {parting.difference:.2g} of its size, "
        f"after {found.modules} modules that agree",
        why="the trainer scores tokens with another model than the engine samples from",
        fix="set train.layout='whole', and report this line" if way == "packed" else "report this line",
    )


def shorten_windows(config: PreTrainedConfig) -> None:
    """Let a sliding window end within the sequences."""
    text = config.get_text_config()
    if getattr(text, "sliding_window", None):
        text.sliding_window = min(text.sliding_window, WINDOW)


def free_memory() -> int:
    """Bytes of this machine's memory that programs can still have."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))


def plain_model(config: PreTrainedConfig, model: ModelConfig, *, seed: int) -> PreTrainedModel:
    """transformers' model in float32 with the weights that a run starts from, as engines get them."""
    built = build_on_meta(config, dtype=torch.float32, attention=own_attention(config))
    params = {name: nn.Parameter(torch.empty(param.shape)) for name, param in built.named_parameters()}
    materialize(built, params)
    boxes = hf_boxes(built)
    chunks = [
        *(
            chunk
            for name, param in params.items()
            for chunk in local_chunks(boxes[name], (0,) * param.dim(), tuple(param.shape), param.detach())
        ),
        *buffer_chunks(built, boxes, replica=False),
    ]
    source = initial_source(model, config, {chunk.name: chunk.shape for chunk in chunks}, seed=seed)
    fill(chunks, source, what=f"model.path={model.path!r}" if model.path else "random initialization")
    return built.eval()


def policy_like(plain: PreTrainedModel, config: PreTrainedConfig, *, layout: str) -> Policy:
    """The policy that a trainer makes of `config`, with the weights of `plain`, which are not copied."""
    policy = make_policy(config, dtype=torch.float32, layout=layout)
    materialize(policy.model, {name: nn.Parameter(param) for name, param in plain.named_parameters()})
    buffers = stored_buffers(policy.model)
    for name, buffer in stored_buffers(plain).items():
        buffers[name].copy_(buffer)
    policy.eval()
    return policy


# ---- both ways -------------------------------------------------------------------------------------------------------

Place = tuple[str, str, str]  # module; "into" or "out of"; which argument or output, of which call
Record = dict[Place, Tensor]


@torch.no_grad()
def compare(policy: Policy, plain: PreTrainedModel, *, temperature: float = 1.0) -> Compared:
    """Pass random tokens through both: through `policy` as a micro-batch, through `plain` one sequence after the
    other. The models have the same modules; what goes into and comes out of each is compared, in order."""
    vocab = plain.config.get_text_config().vocab_size
    tokens = torch.randint(vocab, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
    bounds = offsets_of(LENGTHS)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    with _recording(policy.model) as trained:
        outputs = policy(tokens, PackedSequences.of(bounds, "cpu"), positions, temperature, {Output.LOGPROBS})
    alone: list[Record] = []
    logprobs = torch.zeros(len(tokens))
    for start, end in pairwise(bounds.tolist()):
        with _recording(plain) as record:
            logits = plain(input_ids=tokens[None, start:end], use_cache=False).logits[0]
        distribution = torch.log_softmax(logits[:-1].float() / temperature, dim=-1)
        logprobs[start + 1 : end] = distribution.gather(1, tokens[start + 1 : end, None])[:, 0]
        alone.append(record)
    return _compared(policy, plain, trained, alone, (outputs[Output.LOGPROBS], logprobs))


def _compared(
    policy: Policy, plain: PreTrainedModel, trained: Record, alone: Sequence[Record], logprobs: tuple[Tensor, Tensor]
) -> Compared:
    largest, agree = 0.0, set[str]()
    choosing = set(map(id, routers(plain)))
    of_routers = {name for name, module in plain.named_modules() if id(module) in choosing}
    for place, value in trained.items():
        if not all(place in record for record in alone):
            continue
        pair = _by_token(value, [record[place] for record in alone], padded=isinstance(policy, WholePolicy))
        if pair is None:
            continue
        found = _difference(*pair)
        if not found <= TOLERANCE:
            kind, where = _named(place, of_routers)
            parting = Parting(kind=kind, where=where, difference=found)
            return Compared(modules=len(agree), largest=largest, parting=parting)
        largest = max(largest, found)
        agree.add(place[0])
    ours, theirs = logprobs
    found = float((ours - theirs).abs().max())
    head = Parting(kind="head", where="what turns the last hidden states into log-probs", difference=found)
    return Compared(modules=len(agree), largest=max(largest, found), parting=None if found <= TOLERANCE else head)


@contextmanager
def _recording(model: nn.Module) -> Iterator[Record]:
    """Copy what goes into and comes out of the model's modules, in order."""
    record: Record = {}
    calls: dict[str, int] = {}

    def entered(name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        calls[name] = calls.get(name, -1) + 1
        note(name, "into", [*enumerate(args), *kwargs.items()])

    def left(name: str, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        note(name, "out of", enumerate(tree_leaves(output)))

    def note(name: str, way: str, values: Any) -> None:
        for key, value in values:
            for index, leaf in enumerate(tree_leaves(value)):
                if isinstance(leaf, Tensor):
                    record[name, way, f"{calls[name]}.{key}.{index}"] = leaf.detach().clone()

    handles = []
    for name, module in model.named_modules():
        if name and "experts" not in name.split(".")[:-1]:  # those of each expert see the tokens in an order of its own
            handles.append(module.register_forward_pre_hook(partial(entered, name), with_kwargs=True))
            handles.append(module.register_forward_hook(partial(left, name), with_kwargs=True))
    try:
        yield record
    finally:
        for handle in handles:
            handle.remove()


def _by_token(trained: Tensor, alone: Sequence[Tensor], *, padded: bool) -> tuple[Tensor, Tensor] | None:
    """Both as [T, values], from a pass of all sequences and those of one each; None if they are not of tokens."""
    dims = range(min(each.dim() for each in alone))
    dim = next((d for d in dims if all(each.shape[d] == n for each, n in zip(alone, LENGTHS, strict=True))), None)
    if dim is None or trained.dtype is torch.bool or trained.dim() != alone[0].dim():
        return None
    if len({each.numel() // n for each, n in zip(alone, LENGTHS, strict=True)}) > 1:  # a mask's columns are tokens too
        return None
    theirs = torch.cat([each.movedim(dim, 0).reshape(n, -1) for each, n in zip(alone, LENGTHS, strict=True)])
    rows, width = len(LENGTHS), max(LENGTHS)
    if not padded:
        ours = trained.movedim(dim, 0).flatten(1) if trained.shape[dim] == len(theirs) else None
    elif dim == 0 and trained.shape[0] == rows * width:
        ours = _unpadded(trained.reshape(rows, width, -1))
    elif dim > 0 and trained.shape[0] in (1, rows) and trained.shape[dim] == width:  # 1: equal for all rows
        ours = _unpadded(trained.movedim(dim, 1).reshape(len(trained), width, -1).expand(rows, -1, -1))
    else:
        ours = None
    return (ours.reshape(len(theirs), -1), theirs) if ours is not None and ours.numel() == theirs.numel() else None


def _unpadded(cells: Tensor) -> Tensor:
    """[T, values] of right-padded rows [R, W, values]."""
    return torch.cat([row[:length] for row, length in zip(cells, LENGTHS, strict=True)])


def _difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest of any token, relative to its vector: of [T, values] each. Whole numbers, such as chosen experts,
    count as sets: the share of a token's that differ."""
    if ours.is_complex():  # rotary embeddings of some models
        ours, theirs = (torch.view_as_real(each).flatten(1) for each in (ours, theirs))
    if not ours.is_floating_point():
        return float((ours.sort(-1)[0] != theirs.sort(-1)[0]).float().mean(-1).max())
    sizes = theirs.double().norm(dim=-1)
    floor = 1e-3 * float(sizes.square().mean().sqrt()) + np.finfo(np.float32).tiny
    found = ((ours.double() - theirs.double()).norm(dim=-1) / sizes.clamp(min=floor)).max()
    return math.inf if found.isnan() else float(found)


def _named(place: Place, of_routers: set[str]) -> tuple[str, str]:
    """The kind of layer and the module to blame for what differs at `place`: what comes out of a module is its own
    work; what goes into one was made by the module around it."""
    name, way, which = place
    if way == "out of":
        return _kind(name, of_routers), name
    outer, _, inner = name.rpartition(".")
    # Besides hidden states, experts are given the choice among them.
    chosen = _kind(name, of_routers) == "experts" and ".0." not in which and "hidden" not in which
    return ("router" if chosen else _kind(outer, of_routers)), f"{outer}, before {inner}"


def _kind(name: str, of_routers: set[str]) -> str:
    parts = name.lower().split(".")
    if name in of_routers or parts[-1] in ("gate", "router"):
        return "router"
    for part in reversed(parts):
        for kind, words in KINDS.items():
            if any(word in part for word in words):
                return kind
    return BETWEEN
