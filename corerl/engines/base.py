"""The rollout engine interface: prompts in, sampled tokens out with their log-probs and weights version."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from attrs import Factory, evolve, field, frozen

from corerl.config.schema import LoraConfig, ModelConfig, WeightsConfig
from corerl.pictures import Picture
from corerl.types import Array, BoolArray, FloatArray, IntArray, all_shown, offsets_of, only_shown, rows_at
from corerl.weights.manifest import Manifest
from corerl.weights.transport import Address

UNLIMITED = np.iinfo(np.int64).max

REQUEST_ROWS = ("noise_keys", "response_lengths", "answered", "limits")  # fields of a request that are [R]
GENERATION_ROWS = ("truncated", "unfinished")  # fields of a generation that are [R]
GENERATION_TOKENS = ("tokens", "logprobs", "versions", "engines")  # and [m]
SCORES = ("logprobs", "top_tokens", "top_logprobs")  # fields of scores, [n, ...]

OnFinished = Callable[[int], None]  # called with a number of rows when that many more have finished
# Called with a row's index and tokens that have been sampled of it; returns whether it has enough.
Watch = Callable[[int, Sequence[int]], bool]


def ignore(rows: int) -> None:
    """An `on_finished` for callers that need no progress."""


@frozen(kw_only=True)
class SamplingParams:
    """The distribution that tokens are sampled from, and where responses end."""

    temperature: float = 1.0
    top_p: float = 1.0  # only the likeliest tokens that together have this probability, of all tokens
    top_k: int = 0  # only so many of the likeliest tokens; 0: all. With top_p, the fewer of both
    max_tokens: int = 256  # maximum number of new tokens
    stop_tokens: tuple[int, ...] = ()  # the sampled stop token is part of the response
    stop: tuple[str, ...] = ()  # texts that end a response too; CoreRL looks for them, engines need not (see `stops`)
    greedy: bool = False  # take the likeliest token; noise is unused
    routed_experts: bool = False  # also report `Generation.routed_experts`, if the engine can
    # Also report `Generation.scores`, if the engine can: of so many of each prompt's last tokens (UNLIMITED: of all),
    scored: int = 0
    scored_top: int = 0  # and of so many of the likeliest tokens at each of their places


@frozen(kw_only=True)
class GenerateRequest:
    """R rows to complete. What is sampled for a row depends on its noise key and its tokens alone."""

    tokens: IntArray  # [n] prompts, concatenated
    offsets: IntArray  # [R + 1]
    noise_keys: IntArray  # [R] hash of (seed, rollout step, prompt, sample)
    params: SamplingParams
    version: int | None = None  # of the weights to sample from, one of those that engines hold; None: the newest
    # [R] how many of a row's last tokens already belong to its response, after an interruption or after an episode's
    # first turn; the next token sampled has this number in the response. 0 in a fresh row.
    response_lengths: IntArray = field(
        default=Factory(lambda self: np.zeros(len(self), dtype=np.int64), takes_self=True)
    )
    # [R] how many of these belong to the answer being sampled, in which stop texts are looked for: after an episode's
    # first turn, not the earlier answers.
    answered: IntArray = field(default=Factory(lambda self: self.response_lengths, takes_self=True))
    # [R] maximum length of each row's response, where an episode's turn asks for fewer than params.max_tokens.
    limits: IntArray = field(default=Factory(lambda self: np.full(len(self), UNLIMITED), takes_self=True))
    # [n] 1 + the index in `pictures` of the picture that each token stands for, 0 for text; see `SampleBatch`.
    picture: IntArray = field(default=Factory(lambda self: np.zeros(len(self.tokens), dtype=np.int32), takes_self=True))
    pictures: tuple[Picture, ...] = ()

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def by_row(self) -> list[IntArray]:
        """[R] each row's tokens."""
        return np.split(self.tokens, self.offsets[1:-1])

    def picture_by_row(self) -> list[IntArray]:
        """[R] the column `picture` of each row."""
        return np.split(self.picture, self.offsets[1:-1])

    def row_range(self, start: int, stop: int) -> GenerateRequest:
        """Rows [start, stop) as a new request."""
        return self.take_rows(np.arange(start, stop))

    def parts(self, n: int) -> list[GenerateRequest]:
        """Split into at most `n` contiguous, non-empty requests whose row counts differ by at most one."""
        bounds = [len(self) * part // n for part in range(n + 1)]
        return [self.row_range(start, stop) for start, stop in pairwise(bounds) if stop > start]

    def take_rows(self, rows: IntArray) -> GenerateRequest:
        """The given rows [n], in that order, as a new request."""
        tokens, offsets = rows_at(self.offsets, rows)
        picture, pictures = only_shown(self.picture[tokens], self.pictures)
        return evolve(
            self,
            tokens=self.tokens[tokens],
            offsets=offsets,
            picture=picture,
            pictures=pictures,
            **{name: getattr(self, name)[rows] for name in REQUEST_ROWS},
        )

    @property
    def left(self) -> IntArray:
        """[R] how many tokens may still be sampled for each row."""
        return np.minimum(self.limits, self.params.max_tokens) - self.response_lengths

    @classmethod
    def concatenate(cls, parts: Sequence[GenerateRequest]) -> GenerateRequest:
        """The rows of several requests with the same parameters and version, in order."""
        picture, pictures = all_shown([(part.picture, part.pictures) for part in parts])
        return cls(
            params=parts[0].params,
            version=parts[0].version,
            picture=picture,
            pictures=pictures,
            **_joined(parts, "tokens", *REQUEST_ROWS),
        )


@frozen(kw_only=True)
class PromptScores:
    """What the weights make of the prompts of R rows, n tokens. Of logits as they are, whatever the temperature; NaN
    where nobody has asked, and at first tokens."""

    logprobs: FloatArray  # [n] log p(token)
    top_tokens: IntArray  # [n, k] the likeliest tokens in its place, the likeliest first
    top_logprobs: FloatArray  # [n, k]

    @classmethod
    def unknown(cls, tokens: int, params: SamplingParams) -> PromptScores:
        """Of so many tokens, to be filled in."""
        return cls(
            logprobs=np.full(tokens, np.nan, np.float32),
            top_tokens=np.zeros((tokens, params.scored_top), np.int32),
            top_logprobs=np.full((tokens, params.scored_top), np.nan, np.float32),
        )

    def part(self, start: int, stop: int) -> PromptScores:
        """Of tokens [start, stop)."""
        return PromptScores(**{name: getattr(self, name)[start:stop] for name in SCORES})

    @classmethod
    def concatenate(cls, parts: Sequence[PromptScores]) -> PromptScores:
        return cls(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in SCORES})


@frozen(kw_only=True)
class Generation:
    """The responses of R rows."""

    tokens: IntArray  # [m] responses, concatenated
    offsets: IntArray  # [R + 1]
    logprobs: FloatArray  # [m] log p(token) of logits / temperature, of all tokens: before top_p and top_k
    versions: IntArray  # [m] of the weights that sampled each token
    truncated: BoolArray  # [R] reached max_tokens without a stop token
    # [n + m, MoE layers, experts per token] integers, row by row, prompt then response: the experts each token was
    # routed through; -1 for a token that was never routed, such as a row's last. None if the engine does not report.
    routed_experts: Array | None = None
    scores: PromptScores | None = None  # of the prompts; None if they are not asked for, or the engine reports none
    # [R] cut by `Engine.pause`, possibly before the first token: neither stopped nor truncated, to be continued.
    unfinished: BoolArray = field(
        default=Factory(lambda self: np.zeros(len(self.offsets) - 1, dtype=np.bool_), takes_self=True)
    )
    # [m] int16: index of the replica that sampled each token. The fleet sets it; engines need not.
    engines: Array = field(default=Factory(lambda self: np.zeros(len(self.tokens), np.int16), takes_self=True))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @classmethod
    def nothing(cls, request: GenerateRequest) -> Generation:
        """An empty, unfinished response for every row."""
        rows = len(request)
        return cls(
            tokens=np.zeros(0, dtype=np.int64),
            offsets=np.zeros(rows + 1, dtype=np.int64),
            logprobs=np.zeros(0, dtype=np.float32),
            versions=np.zeros(0, dtype=np.int64),
            truncated=np.zeros(rows, dtype=np.bool_),
            scores=PromptScores.unknown(len(request.tokens), request.params) if request.params.scored else None,
            unfinished=np.ones(rows, dtype=np.bool_),
        )

    @classmethod
    def concatenate(cls, parts: Sequence[Generation]) -> Generation:
        """The rows of several generations, in order."""
        routed = [part.routed_experts for part in parts if part.routed_experts is not None]
        scores = [part.scores for part in parts if part.scores is not None]
        return cls(
            routed_experts=np.concatenate(routed) if len(routed) == len(parts) else None,
            scores=PromptScores.concatenate(scores) if len(scores) == len(parts) else None,
            **_joined(parts, *GENERATION_TOKENS, *GENERATION_ROWS),
        )


def _joined(parts: Sequence[GenerateRequest] | Sequence[Generation], *names: str) -> dict[str, Any]:
    """The named fields of the parts, concatenated, and their offsets."""
    joined = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
    return {**joined, "offsets": offsets_of(np.concatenate([np.diff(part.offsets) for part in parts]))}


@frozen(kw_only=True)
class Received:
    """The outcome of one weight update on one engine."""

    bytes: int
    error: str = ""  # empty if committed; otherwise the engine serves nothing until a full update commits
    held: tuple[int, ...] = ()  # versions that the engine can sample from now, this one last; (): this one alone
    died: bool = False  # the engine's process has ended
    details: str = ""  # of the error, as `CorerlError.details`: all that is told of a death, for --debug


@frozen(kw_only=True)
class CacheUse:
    """How full the cache is in which an engine keeps the keys and values of tokens."""

    capacity: int  # tokens that the cache holds, above 0
    tokens: int  # of rows that are being sampled, and of those that wait for room: it may be above the capacity
    retracted: int  # how often a row lost its room while it was sampled, and was read again, since the engine started


@frozen(kw_only=True)
class EngineContext:
    """Where one replica runs: its devices, precision and run directory."""

    name: str  # engine-0, ...
    index: int
    device: str  # cpu or cuda
    precision: str  # float32, bfloat16 or float16
    context_length: int = 0  # maximum tokens of a row, prompt and response; 0: unlimited
    bundles: int = 1  # placement bundles that the replica takes
    devices: tuple[str, ...] = ()  # their GPUs, as CUDA_VISIBLE_DEVICES takes them; the process itself sees the first
    run_dir: str = ""  # where it may write logs; empty outside a run
    weights: WeightsConfig = field(factory=WeightsConfig)  # how weights will arrive, above all in which form
    lora: LoraConfig | None = None  # of adapters that arrive separately, and alone once an engine has the weights

    @property
    def receivers(self) -> range:
        """Indices of this replica's weight receivers among those of all engines, one per bundle."""
        return range(self.index * self.bundles, (self.index + 1) * self.bundles)


class Engine(ABC):
    """One replica. A plain class, constructed in the process where it serves; `cluster` makes it an actor.

    It starts without weights and refuses to generate until a first update has committed. Methods are called from
    several threads: `pause`, for instance, while others generate.
    """

    @abstractmethod
    def __init__(self, model: ModelConfig, options: Any, context: EngineContext) -> None:
        """`options` is an instance of the spec's config class. Returns once weights can be received; raises a
        CorerlError that says why the engine cannot start."""

    @abstractmethod
    def generate(self, request: GenerateRequest, on_finished: OnFinished = ignore) -> Generation:
        """Complete the rows, in the request's order, all under one weights version unless `pause` cuts them: that of
        the request, or the newest. Called by up to `EngineSpec.calls` threads at once. Raises EngineFailed without
        these weights.

        Call `on_finished`, from any thread, with a number of rows when that many more have finished: users see the
        progress, and the watchdog takes an engine that finishes no rows for one that hangs."""

    def generate_watched(self, request: GenerateRequest, watch: Watch, on_finished: OnFinished = ignore) -> Generation:
        """As `generate`, but end a row once `watch` says that it has enough; it may have a few tokens more by then,
        which are in the generation, and counts as finished. `watch` is called from any thread, for one row by one
        thread at a time, with the row's index and its tokens since the last call, until the row ends or has enough.

        An engine that can see and end rows while it samples overrides this, which asks `generate` for a part of each
        row at a time: a part waits for all rows, and sends them again."""
        from corerl.engines.continuation import in_parts

        return in_parts(self.generate, request, watch, on_finished)

    @abstractmethod
    def pause(self) -> None:
        """Stop generating until `resume`; returns when nothing is being generated. Requests in flight, and any that
        arrive meanwhile, are answered at once with the tokens sampled so far, incomplete rows marked `unfinished`.

        An engine that cannot interrupt a request finishes it instead."""

    @abstractmethod
    def resume(self) -> None:
        """Generate again, starting with the next request."""

    @abstractmethod
    def receive(self, manifest: Manifest, version: int, address: Address) -> Received:
        """Load one full set of weights from `address`. Refuses a version that is not above the current one before
        loading any byte. Never raises for a failed transfer: the result holds the reason."""

    def forget(self, version: int) -> None:  # noqa: B027  -- most hold one version
        """Hold an earlier version of the adapters no longer, in whose place another one comes. Without such a call the
        oldest goes. For engines that hold several; called while they are paused."""

    def weight_sums(self, dtype: str) -> Mapping[str, int] | None:
        """Sum the bit patterns of each loaded HF tensor's elements, in `dtype` (the manifest's; "uint8" if tensors came
        in their own dtypes): `corerl.weights.checksums.bit_sums`, added over the parts of a tensor stored separately.
        Tensors left out are not compared with what was sent; None if the engine cannot report them. Called after an
        update, before weights sleep."""
        return None

    def cache_use(self) -> CacheUse | None:
        """How full its cache is now, of engines whose spec has `cache_use`. Called while others generate, several times
        a second, and answered without waiting for them."""
        return None

    @abstractmethod
    def sleep(self) -> int:
        """Free device memory (weights, caches); returns bytes freed, 0 if already asleep. Fresh weights must follow
        `wake_up`."""

    @abstractmethod
    def wake_up(self) -> int:
        """Reallocate the weights' memory, undefined until an update; returns its bytes, 0 if already awake. Allocate
        cache memory only at the first request: the training ranks are still on the device."""

    @abstractmethod
    def close(self) -> None:
        """Stop everything at once, even while generating. Nothing is called afterwards."""
