"""An engine on the model's own `generate`, for any transformers causal language model, on a CPU or a GPU."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from attrs import evolve
from torch import nn
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from corerl.config import ModelConfig
from corerl.engines import (
    Engine,
    EngineContext,
    EngineLifecycle,
    GenerateRequest,
    Generation,
    OnFinished,
    PromptScores,
    Received,
    SamplingParams,
    ignore,
    shape_mismatch,
)
from corerl.errors import EngineFailed
from corerl.memory import empty_cache
from corerl.models import (
    build_on_meta,
    carries_state,
    choose_layout,
    hf_config,
    materialize,
    meta_model,
    named_views,
    own_attention,
    parts_of,
    put_adapters,
    routers,
)
from corerl.ops import gumbel
from corerl.pictures import Picture, Tower
from corerl.plugin import picture_inputs
from corerl.types import PICTURE, Array, BoolArray, MicroBatch, offsets_of
from corerl.weights import Address, Bucket, Manifest, bit_sums, is_adapter
from corerl_transformers.spec import TransformersConfig

PAD = 0  # any token will do: padding is masked, and what follows a stop token is cut off


class TransformersEngine(Engine):
    """The engine `transformers`, in the process that constructs it: the model's own `generate`, on a CPU or a GPU."""

    def __init__(self, model: ModelConfig, options: TransformersConfig, context: EngineContext) -> None:
        self._options, self._name = options, context.name
        self._vocabulary = model.vocabulary or None
        self._device = torch.device(context.device)
        hf = hf_config(model)
        attention = own_attention(hf) if options.attention == "auto" else options.attention
        inputs = picture_inputs(model)
        self._model = build_on_meta(
            hf, dtype=getattr(torch, context.precision), attention=attention, pictures=inputs is not None
        )
        self._tower = None if inputs is None else inputs.tower(parts_of(self._model).decoder)
        if context.lora is not None:
            put_adapters(self._model, context.lora, dtype=getattr(torch, context.precision))
        # Rows are padded on the left. Attention of other kinds, distances and states may begin with the padding.
        looked = meta_model(hf)
        self._pads = choose_layout(looked, "auto").name == "packed" and not carries_state(parts_of(looked).decoder)
        # Left uninitialized: nothing is served before the first update has overwritten every parameter.
        empty = {
            name: nn.Parameter(torch.empty_like(parameter, device=self._device), requires_grad=False)
            for name, parameter in self._model.named_parameters()
        }
        materialize(self._model, empty)
        self._model.eval()
        nn.Module.to(self._model, self._device)  # the buffers
        # `generate` takes unset options from here: a model's own defaults (top_k, penalties, a second end of sequence)
        # would distort the recorded distribution.
        self._model.generation_config = GenerationConfig()
        self._views = named_views(self._model)
        self._storages = [(storage, storage.nbytes()) for storage in (p.untyped_storage() for p in empty.values())]
        self._sent: dict[str, torch.dtype] = {}  # HF tensor -> the dtype in which it last came
        self._routers = routers(self._model)
        self._asleep = False
        self._versions = context.weights.versions
        self._serving = EngineLifecycle(context.name, context.index, versions=self._versions)
        self._adapters: dict[int, dict[str, torch.Tensor]] = {}  # by version; those in use may be left out
        self._in_use = -1  # the version whose adapters the model has

    # ---- sampling ----------------------------------------------------------------------------------------------------

    def generate(self, request: GenerateRequest, on_finished: OnFinished = ignore) -> Generation:
        done: list[Generation] = []
        encoded: dict[str, Any] = {}  # features by the picture's id
        with self._serving.generating(request.version) as version:
            self._use(version)
            for start, end in pairwise(self._bounds(request)):
                rows = request.row_range(start, end)
                done.append(
                    _left_out(rows, done[:1])
                    if self._serving.paused
                    else self._generate(rows, version, on_finished, encoded)
                )
        return Generation.concatenate(done)

    def _bounds(self, request: GenerateRequest) -> list[int]:
        """Where the rows of a request are split into those generated at once: of one length, unless they are padded."""
        size, lengths = self._options.batch_size, np.diff(request.offsets)
        others = [] if self._pads else (np.flatnonzero(np.diff(lengths)) + 1).tolist()
        parts = pairwise([0, *others, len(request)])
        return [*(at for start, end in parts for at in range(start, end, size)), len(request)]

    @torch.inference_mode()
    def _generate(
        self, request: GenerateRequest, version: int, on_finished: OnFinished, encoded: MutableMapping[str, Any]
    ) -> Generation:
        params = request.params
        scores = self._scores(request, encoded) if params.scored else None
        lengths = np.diff(request.offsets)
        width = int(lengths.max())
        mask = np.arange(width) >= width - lengths[:, None]  # left-padded: every row's next token is in the same column
        keys, sampled, left = (
            torch.tensor(each, device=self._device)
            for each in (request.noise_keys, request.response_lengths, request.left)
        )
        sampling = SampleToken(keys, sampled, params, vocabulary=self._vocabulary)
        routes = Routes(self._routers if params.routed_experts else [])
        generate: Any = self._model.generate  # its decorator hides that it is callable
        with routes, self._prompts(request, mask, encoded) as prompts:
            sequences = generate(
                **prompts,
                logits_processor=LogitsProcessorList([sampling]),
                stopping_criteria=StoppingCriteriaList(
                    [Halt(width + left, params.stop_tokens, self._serving, on_finished)]
                ),
                generation_config=GenerationConfig(
                    do_sample=False,
                    use_cache=True,
                    max_new_tokens=int(request.left.max()),
                    eos_token_id=list(params.stop_tokens) or None,
                    pad_token_id=PAD,
                ),
            )
        responses = sequences[:, width:].cpu().numpy()
        steps = np.arange(responses.shape[1])
        # A finished row is padded while others continue, and the padding may look like a stop token.
        stopped = np.isin(responses, params.stop_tokens) & (steps < request.left[:, None])
        finished = stopped.any(axis=1)
        sizes = np.where(finished, stopped.argmax(axis=1) + 1, np.minimum(len(steps), request.left))
        chosen = steps < sizes[:, None]
        return Generation(
            tokens=responses[chosen],
            offsets=offsets_of(sizes),
            logprobs=torch.stack(sampling.logprobs, dim=1).cpu().numpy()[chosen],
            versions=np.full(sizes.sum(), version, dtype=np.int64),
            truncated=~finished & (sizes == request.left),
            routed_experts=routes.of(mask, chosen),
            scores=scores,
            unfinished=~finished & (sizes < request.left),
        )

    def _scores(self, request: GenerateRequest, encoded: MutableMapping[str, Any]) -> PromptScores:
        """One row at a time: logits of all places of all rows would take too much memory."""
        top, found = request.params.scored_top, PromptScores.unknown(len(request.tokens), request.params)
        for row, stop in enumerate(request.offsets[1:].tolist()):
            one = request.row_range(row, row + 1)
            count = min(request.params.scored, len(one.tokens) - 1)
            if not count:
                continue
            with self._prompts(one, np.ones((1, len(one.tokens)), np.bool_), encoded) as prompt:
                logits = self._model(**prompt, use_cache=False).logits[0, -count - 1 : -1].float()
            logits[:, self._vocabulary or logits.shape[1] :] = -torch.inf
            logprobs = torch.log_softmax(logits, dim=-1)
            own = torch.tensor(one.tokens[-count:], device=self._device)
            found.logprobs[stop - count : stop] = logprobs.gather(1, own[:, None])[:, 0].cpu()
            values, tokens = logprobs.topk(min(top, logprobs.shape[1]), dim=-1)
            found.top_logprobs[stop - count : stop, : values.shape[1]] = values.cpu()
            found.top_tokens[stop - count : stop, : values.shape[1]] = tokens.cpu()
        return found

    @contextmanager
    def _prompts(
        self, request: GenerateRequest, mask: BoolArray, encoded: MutableMapping[str, Any]
    ) -> Iterator[dict[str, Any]]:
        """The arguments of `generate` for the prompts, whose places in padded rows `mask` [R, width] marks. Within the
        block the model's tower gives `encoded`, to which the pictures that are not yet there are added."""
        cells = torch.tensor(mask, device=self._device)

        def padded(values: torch.Tensor, fill: int) -> torch.Tensor:
            """[..., n] -> [..., R, width]"""
            rows = values.new_full((*values.shape[:-1], *cells.shape), fill)
            rows[..., cells] = values
            return rows

        tokens, tower, seen = torch.tensor(request.tokens, device=self._device), self._tower, None
        positions = np.concatenate([np.arange(length) for length in np.diff(request.offsets)])
        if tower is not None:
            micro = MicroBatch(
                tokens=request.tokens,
                positions=positions,
                cu_seqlens=request.offsets,
                lengths=np.diff(request.offsets),
                rows=np.arange(len(request)),
                columns={PICTURE: request.picture},
            )
            seen = tower.seen(micro, self._features(tower, request.pictures, encoded), self._device)
            tokens = tower.shown(tokens, seen)
        prompts = {"input_ids": padded(tokens, PAD), "attention_mask": cells.long()}
        if tower is None or seen is None:
            yield prompts
            return
        numbered = tower.positions(tokens, torch.tensor(positions, device=self._device), request.offsets, seen)
        if len(numbered) > 1:  # else `generate` numbers them
            last = numbered[:, 0, request.offsets[1:] - 1]
            if (last != last[0]).any():
                # It goes on in each direction from where the picture ends there.
                raise EngineFailed(
                    f"{self._name}: a prompt ends with a picture, after which transformers' `generate` numbers tokens "
                    "otherwise than training does; put a text behind it, or use another engine"
                )
            prompts["position_ids"] = padded(numbered[:, 0], 0)
        prompts |= tower.kinds_of_tokens(padded(seen.slots, False))
        with tower.showing([each for own in seen.features for each in own]) as shown:
            yield prompts | shown

    def _features(self, tower: Tower, pictures: Sequence[Picture], encoded: MutableMapping[str, Any]) -> dict[int, Any]:
        """What the tower makes of the pictures, by their numbers in the column `picture`."""
        new = {picture.id: picture for picture in pictures if picture.id not in encoded}
        encoded.update(tower.encode(new, self._device))
        return {number: encoded[picture.id] for number, picture in enumerate(pictures, start=1)}

    def pause(self) -> None:
        self._serving.pause()

    def resume(self) -> None:
        self._serving.resume()

    # ---- weights -----------------------------------------------------------------------------------------------------

    def receive(self, manifest: Manifest, version: int, address: Address) -> Received:
        def load(bucket: Bucket, flat: torch.Tensor) -> None:
            self._in_use = version
            self._load(bucket, flat)

        return self._serving.receive(manifest, version, address, check=self._check, load=load)

    def forget(self, version: int) -> None:
        self._serving.forget(version)

    def _check(self, manifest: Manifest) -> str:
        """Why this manifest cannot be loaded; "" if it can."""
        if self._asleep:
            return "the engine's weights are asleep; wake it up first"
        self._keep()
        held = {name: tuple(view.shape) for name, view in self._views.items()}
        return shape_mismatch(manifest.shapes, held, whole=self._serving.holds_weights)

    @torch.no_grad()
    def _load(self, bucket: Bucket, flat: torch.Tensor) -> None:
        for name, tensor in bucket.views(flat).items():
            self._views[name].copy_(tensor)
            self._sent[name] = tensor.dtype

    def _keep(self) -> None:
        """Before others take their place: keep a copy of the adapters in use, should they be sampled from again."""
        held = self._serving.held if self._versions > 1 else ()
        self._adapters = {version: kept for version, kept in self._adapters.items() if version in held}
        if self._in_use in held and self._in_use not in self._adapters:
            own = {name: view.clone() for name, view in self._views.items() if is_adapter(name)}
            self._adapters[self._in_use] = own

    @torch.no_grad()
    def _use(self, version: int) -> None:
        """Let the model have the adapters of a version that is held."""
        if version != self._in_use:
            self._keep()
            for name, kept in self._adapters[version].items():
                self._views[name].copy_(kept)
            self._in_use = version

    def weight_sums(self, dtype: str) -> dict[str, int] | None:
        own = {name: view.dtype for name, view in self._views.items()}
        sent = self._sent or dict.fromkeys(own, getattr(torch, dtype))
        if sent == own:
            return bit_sums(self._views)
        # Of the others, loading has rounded what was sent.
        exact = {name: each for name, each in sent.items() if torch.promote_types(own[name], each) == own[name]}
        return {name: bit_sums({name: self._views[name].to(each)})[name] for name, each in exact.items()} or None

    def sleep(self) -> int:
        if self._asleep:
            return 0
        before = self._reserved
        with self._serving.dropping_weights("its weights were put to sleep"):
            for storage, _ in self._storages:
                storage.resize_(0)
            self._asleep = True
            self._keep()
            empty_cache(self._device)
        return max(self._bytes, before - self._reserved)

    def wake_up(self) -> int:
        if not self._asleep:
            return 0
        with self._serving.dropping_weights("no weights have arrived since it woke up"):
            for storage, size in self._storages:
                storage.resize_(size)
            self._asleep = False
        return self._bytes

    @property
    def _reserved(self) -> int:
        """Bytes that torch has of a GPU, with what generating took."""
        return torch.cuda.memory_reserved(self._device) if self._device.type == "cuda" else 0

    @property
    def _bytes(self) -> int:
        return sum(size for _, size in self._storages)

    def close(self) -> None:
        self.pause()
        self.sleep()
        self._serving.close()


class Routes:
    """A context that records the routers' choices."""

    def __init__(self, routers: Sequence[nn.Module]) -> None:
        self._routers = routers
        self._chosen: list[list[torch.Tensor]] = [[] for _ in routers]  # per layer, pass by pass: [tokens, k]

    def __enter__(self) -> None:
        self._handles = [
            router.register_forward_hook(functools.partial(self._keep, chosen))
            for router, chosen in zip(self._routers, self._chosen, strict=True)
        ]

    def __exit__(self, *exception: Any) -> None:
        for handle in self._handles:
            handle.remove()

    @staticmethod
    def _keep(chosen: list[torch.Tensor], router: nn.Module, arguments: Any, output: Any) -> None:
        # Logits, scores and indices, in a model-specific order: only the indices are integers.
        chosen += [each for each in output if not each.is_floating_point()] if isinstance(output, tuple) else []

    def of(self, prompts: BoolArray, responses: BoolArray) -> Array | None:
        """[n + m, layers, k] experts of the tokens marked by `prompts` [R, width] and `responses` [R, steps], row by
        row, from one pass over all prompts and one per step but the last. A row's last token is -1: it was the input of
        no step, or of one whose result is unused. None if the routers reported nothing."""
        if not self._chosen or not all(self._chosen):
            return None
        rows = len(prompts)
        layers = [torch.cat([each.view(rows, -1, each.shape[-1]) for each in chosen], dim=1) for chosen in self._chosen]
        known = torch.stack(layers, dim=2).to(torch.int16).cpu().numpy()  # [R, width + steps - 1, layers, k]
        experts = np.concatenate([known, np.full_like(known[:, :1], -1)], axis=1)
        last = prompts.shape[1] + responses.sum(axis=1) - 1
        experts[np.arange(rows), last] = -1
        marked: Array = experts[np.concatenate([prompts, responses], axis=1)]
        return marked


def _left_out(request: GenerateRequest, done: Sequence[Generation]) -> Generation:
    """An empty generation for these rows, with the same columns as the finished part of the request."""
    nothing = Generation.nothing(request)
    if not done or done[0].routed_experts is None:
        return nothing
    experts = np.full((len(request.tokens), *done[0].routed_experts.shape[1:]), -1, done[0].routed_experts.dtype)
    return evolve(nothing, routed_experts=experts)


class Halt(StoppingCriteria):
    """Ends a row at its token limit, and all rows once the engine is paused; reports finished rows."""

    def __init__(
        self, ends: torch.Tensor, stops: Sequence[int], serving: EngineLifecycle, on_finished: OnFinished
    ) -> None:
        self._ends = ends  # [R] maximum length of prompt and response
        self._stops = torch.tensor(stops, dtype=torch.int64, device=ends.device)
        self._serving = serving
        self._on_finished = on_finished
        self._ended = torch.zeros_like(ends, dtype=torch.bool)  # [R]
        self._reported = 0  # finished rows that have been reported

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """[R, length so far] -> [R]"""
        if self._serving.paused:
            return torch.ones_like(self._ends, dtype=torch.bool)
        full = self._ends <= input_ids.shape[1]
        self._ended |= full | torch.isin(input_ids[:, -1], self._stops)
        if ended := int(self._ended.sum()) - self._reported:
            self._reported += ended
            self._on_finished(ended)
        return full


class SampleToken(LogitsProcessor):
    """Samples each row's next token, and returns scores that peak at it, since `generate` decodes greedily.

    Ids from `vocabulary` on are padding. Must be the last processor. Keeps one number per row and step: nothing of
    vocabulary size outlives a call.
    """

    def __init__(
        self, keys: torch.Tensor, lengths: torch.Tensor, params: SamplingParams, *, vocabulary: int | None = None
    ) -> None:
        self._keys = keys  # [R] int64
        self._lengths = lengths  # [R] response tokens that exist already
        self._params = params
        self._vocabulary = vocabulary
        self.logprobs: list[torch.Tensor] = []  # one [R] per step: log p of the sampled token, of logits / temperature

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """[R, length so far], [R, V] -> [R, V]"""
        tempered = scores.float() / self._params.temperature
        if self._vocabulary is not None:
            tempered[:, self._vocabulary :] = -torch.inf
        logprobs = torch.log_softmax(tempered, dim=-1)
        perturbed = logprobs
        if not self._params.greedy:
            perturbed = keep_likeliest(logprobs, self._params.top_p, self._params.top_k)
            # The Gumbel-max trick: the argmax is distributed as softmax(perturbed).
            perturbed = perturbed + gumbel(self._keys, self._lengths + len(self.logprobs), scores.shape[-1])
        sampled = perturbed.argmax(dim=-1, keepdim=True)
        self.logprobs.append(logprobs.gather(1, sampled)[:, 0])
        return perturbed


def keep_likeliest(logprobs: torch.Tensor, top_p: float, top_k: int) -> torch.Tensor:
    """[R, V] with -inf outside each row's nucleus, the smallest set of likeliest tokens with total probability of at
    least `top_p` (Holtzman et al. 2020, "The curious case of neural text degeneration"), and outside its `top_k`
    likeliest tokens, if that is not 0."""
    if top_p >= 1.0 and not top_k:
        return logprobs
    ordered, order = logprobs.sort(dim=-1, descending=True)
    left_out = torch.zeros_like(ordered, dtype=torch.bool)
    if top_p < 1.0:
        probabilities = ordered.exp()
        left_out = probabilities.cumsum(dim=-1) - probabilities >= top_p  # likelier tokens hold enough; never the first
    if top_k:
        left_out[:, top_k:] = True
    return torch.full_like(logprobs, -math.inf).scatter(-1, order, ordered.masked_fill(left_out, -math.inf))
