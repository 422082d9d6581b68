"""What a rollout engine is: prompts in, sampled tokens out with their log-probs and weights version."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from attrs import Factory, evolve, field, frozen

from corerl.config.schema import ModelConfig, WeightsConfig
from corerl.types import Array, BoolArray, FloatArray, IntArray, offsets_of, rows_at
from corerl.weights.manifest import Manifest
from corerl.weights.transport import Address

UNLIMITED = np.iinfo(np.int64).max


@frozen(kw_only=True)
class SamplingParams:
    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 256  # new tokens at most
    stop_tokens: tuple[int, ...] = ()  # the sampled stop token is part of the response
    greedy: bool = False  # take the likeliest token; noise is not used
    routed_experts: bool = False  # tell `Generation.routed_experts` too, where the engine can


@frozen(kw_only=True)
class GenerateRequest:
    """R rows to complete. What is drawn for a row is a function of its noise key and its tokens alone."""

    tokens: IntArray  # [n] prompts, end to end
    offsets: IntArray  # [R + 1]
    noise_keys: IntArray  # [R] hash of (seed, rollout step, prompt, sample)
    params: SamplingParams
    # [R] how many of a row's last tokens are its response so far, of a row that was interrupted, or that is an episode
    # after its first turn: what is drawn next is number `begun` of the response. 0 in a row that begins.
    begun: IntArray = field(default=Factory(lambda self: np.zeros(len(self), dtype=np.int64), takes_self=True))
    # [R] tokens that each row's response may come to where a turn of an episode asks for fewer than params.max_tokens.
    limits: IntArray = field(default=Factory(lambda self: np.full(len(self), UNLIMITED), takes_self=True))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def by_row(self) -> list[IntArray]:
        """Each row's tokens."""
        return np.split(self.tokens, self.offsets[1:-1])

    def rows(self, start: int, stop: int) -> GenerateRequest:
        """Rows [start, stop) as a request of their own."""
        return self.take(np.arange(start, stop))

    def parts(self, n: int) -> list[GenerateRequest]:
        """At most `n` contiguous, non-empty requests whose row counts differ by at most one."""
        bounds = [len(self) * part // n for part in range(n + 1)]
        return [self.rows(start, stop) for start, stop in pairwise(bounds) if stop > start]

    def take(self, rows: IntArray) -> GenerateRequest:
        """These rows [n], in their order, as a request of their own."""
        tokens, offsets = rows_at(self.offsets, rows)
        return evolve(
            self,
            tokens=self.tokens[tokens],
            offsets=offsets,
            noise_keys=self.noise_keys[rows],
            begun=self.begun[rows],
            limits=self.limits[rows],
        )

    @property
    def left(self) -> IntArray:
        """[R] tokens that may still be drawn for each row."""
        return np.minimum(self.limits, self.params.max_tokens) - self.begun

    @classmethod
    def concatenate(cls, parts: Sequence[GenerateRequest]) -> GenerateRequest:
        """The rows of several requests with the same parameters, in order."""
        return cls(
            tokens=np.concatenate([part.tokens for part in parts]),
            offsets=offsets_of(np.concatenate([np.diff(part.offsets) for part in parts])),
            noise_keys=np.concatenate([part.noise_keys for part in parts]),
            params=parts[0].params,
            begun=np.concatenate([part.begun for part in parts]),
            limits=np.concatenate([part.limits for part in parts]),
        )


@frozen(kw_only=True)
class Generation:
    """The responses of R rows."""

    tokens: IntArray  # [m] responses, end to end
    offsets: IntArray  # [R + 1]
    logprobs: FloatArray  # [m] log p(token) of logits / temperature, before top-p
    versions: IntArray  # [m] of the weights that sampled each token
    truncated: BoolArray  # [R] max_tokens reached without a stop token
    # [n + m, layers of experts, experts of a token] integers, row by row, prompt and then response: the experts that
    # each token was sent through; -1 for one that was not, as a row's last. None where the engine does not tell.
    routed_experts: Array | None = None
    # [R] cut by `Engine.pause`, maybe before the first token: neither stopped nor truncated, to be continued.
    unfinished: BoolArray = field(
        default=Factory(lambda self: np.zeros(len(self.offsets) - 1, dtype=np.bool_), takes_self=True)
    )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @classmethod
    def nothing(cls, request: GenerateRequest) -> Generation:
        """No token for any row."""
        rows = len(request)
        return cls(
            tokens=np.zeros(0, dtype=np.int64),
            offsets=np.zeros(rows + 1, dtype=np.int64),
            logprobs=np.zeros(0, dtype=np.float32),
            versions=np.zeros(0, dtype=np.int64),
            truncated=np.zeros(rows, dtype=np.bool_),
            unfinished=np.ones(rows, dtype=np.bool_),
        )

    @classmethod
    def concatenate(cls, parts: Sequence[Generation]) -> Generation:
        """The rows of several generations, in order."""
        routed = [part.routed_experts for part in parts if part.routed_experts is not None]
        return cls(
            tokens=np.concatenate([part.tokens for part in parts]),
            offsets=offsets_of(np.concatenate([np.diff(part.offsets) for part in parts])),
            logprobs=np.concatenate([part.logprobs for part in parts]),
            versions=np.concatenate([part.versions for part in parts]),
            truncated=np.concatenate([part.truncated for part in parts]),
            routed_experts=np.concatenate(routed) if len(routed) == len(parts) else None,
            unfinished=np.concatenate([part.unfinished for part in parts]),
        )


@frozen(kw_only=True)
class Received:
    """How one engine fared with one weight update."""

    version: int
    bytes: int
    error: str = ""  # empty where it committed; else it serves nothing until a full update commits
    died: bool = False  # its process has ended


@frozen(kw_only=True)
class EngineContext:
    """Where one replica stands."""

    name: str  # engine-0, ...
    index: int
    device: str  # cpu or cuda
    precision: str  # float32, bfloat16 or float16
    bundles: int = 1  # that the replica takes
    devices: tuple[int, ...] = ()  # the GPUs of these, as the machine numbers them; the process itself sees the first
    context_length: int = 0  # tokens of a row at most, prompt and response; 0: unlimited
    run_dir: str = ""  # where it may leave a log; empty where no run is known
    weights: WeightsConfig = field(factory=WeightsConfig)  # how they will come: in which form, above all

    @property
    def receivers(self) -> range:
        """The indices, among those of all engines, of its receivers of weights: one for each bundle."""
        return range(self.index * self.bundles, (self.index + 1) * self.bundles)


class Engine(ABC):
    """One replica. A plain class, constructed in the process where it serves; `cluster` makes it an actor.

    It starts without weights and refuses to generate until a first update has committed. Its methods are called from
    several threads: `pause` while others generate.
    """

    @abstractmethod
    def __init__(self, model: ModelConfig, options: Any, context: EngineContext) -> None:
        """`options` is of the spec's own config class. Returns when it can take weights; raises a CorerlError that says
        what keeps it from starting."""

    @abstractmethod
    def generate(self, request: GenerateRequest) -> Generation:
        """Rows in the request's order, all under one version of the weights unless `pause` cuts them. Called from as
        many threads at the same time as `EngineSpec.calls` says. Raises EngineFailed without weights."""

    @abstractmethod
    def pause(self) -> None:
        """Generate no more until `resume`; returns when nothing is being generated. Requests under way, and those that
        come meanwhile, are answered at once, with the tokens that there are and the other rows `unfinished`.

        An engine that cannot interrupt a request finishes it instead."""

    @abstractmethod
    def resume(self) -> None:
        """Generate again, from the next request on."""

    @abstractmethod
    def receive(self, manifest: Manifest, version: int, address: Address) -> Received:
        """Load one full set of weights from `address`. Refuses a version that is not above the current one, before any
        byte is loaded. Never raises for a bad transfer: the reason is in the result."""

    def weight_sums(self, dtype: str) -> Mapping[str, int] | None:
        """The sum of each loaded HF tensor's elements' bit patterns, in `dtype` (the manifest's; "uint8" where each
        came with its own): `corerl.weights.verify.bit_sums`, added over the parts of a tensor that lie apart. What is
        left out is not compared with what was sent. None: this engine cannot tell. Called after an update, before
        weights sleep."""
        return None

    @abstractmethod
    def sleep(self) -> int:
        """Free device memory (weights, caches); returns bytes freed, 0 where it sleeps. Fresh weights must follow
        `wake_up`."""

    @abstractmethod
    def wake_up(self) -> int:
        """Take the memory for weights again, whose contents are undefined until an update; returns its bytes, 0 where
        it is awake. Memory for caches is to wait for the first request: ranks are still on the device."""

    @abstractmethod
    def close(self) -> None:
        """End whatever was started, at once, also while something is being generated. Nothing is called after it."""
