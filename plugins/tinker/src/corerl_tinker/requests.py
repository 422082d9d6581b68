"""What clients ask for, once it is read and checked, and what they are answered: plain data between the wire and the
model that is served."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Literal, Protocol, TypeAlias, TypeVar

from attrs import define, field, frozen
from tinker.types import SampleRequest

from corerl.errors import UserError
from corerl.types import Array, FloatArray, IntArray

T = TypeVar("T")

Category: TypeAlias = Literal["user", "server"]


class Refused(UserError):
    """A request that has no result, for which nothing else ends; the message says why, and what to do. Clients repeat
    what fails with 5xx, 408, 409 or 429 for minutes without a word, so that everything else has a status of 4xx."""

    def __init__(self, message: str, *, status: int = 400, category: Category = "user") -> None:
        super().__init__(message)
        self.status, self.category = status, category


@frozen(kw_only=True)
class Datum:
    """One row of a pass."""

    tokens: IntArray  # [n]
    inputs: Mapping[str, Array]  # name -> [n] or [n, K]: `target_tokens`, `weights`, `logprobs`, `advantages`, ...


@frozen(kw_only=True)
class Pass:
    """A `forward_backward`, or a `forward`."""

    datums: tuple[Datum, ...]
    loss: str
    config: Mapping[str, float | str] = field(factory=dict)  # of the loss
    forward_only: bool = False


@frozen(kw_only=True)
class PassDone:
    """What a pass returns: metrics have their reductions as suffixes (`loss:sum`)."""

    logprobs: tuple[FloatArray, ...]  # for each datum, in the shape of its targets
    metrics: Mapping[str, float]


@frozen(kw_only=True)
class ModelMade:
    """A trained model as clients are told of it."""

    base_model: str
    tokenizer: str  # what the client loads by this name or from this directory
    rank: int | None  # None: all weights are trained


@define(kw_only=True, eq=False)
class Sampler:
    """What a client samples from."""

    number: int  # the same each time a client does the same
    weights: int | None  # their number; None: those that were published last, while this model is trained
    name: str  # for messages
    base_model: str
    model_path: str | None = None  # of a checkpoint


@frozen(kw_only=True)
class Draw:
    """A request for samples of one prompt."""

    sampler: Sampler
    prompt: IntArray  # [n]
    asked: SampleRequest  # in the ranges that `draw_of` knows


@frozen(kw_only=True)
class Drawn:
    """The samples of one prompt."""

    tokens: tuple[IntArray, ...]  # by sample
    logprobs: tuple[FloatArray, ...]
    stopped: tuple[bool, ...]  # by a stop token or text; else by length
    prompt_logprobs: FloatArray | None = None  # [n], NaN at the first token, and where it was not asked
    prompt_top: tuple[IntArray, FloatArray] | None = None  # [n, k] tokens, the likeliest first, and log-probs, or NaN


@frozen(kw_only=True)
class Saved:
    """A checkpoint on disk: `tinker://RUN/weights/NAME` or `tinker://RUN/sampler_weights/NAME`, where RUN is the id of
    the model. Both parts consist of letters, digits and `._-`, RUN of colons too: whoever calls has checked it."""

    path: str
    kind: Literal["training", "sampler"]
    bytes: int
    created: float  # seconds since the epoch
    expires: float | None = None
    user_metadata: Mapping[str, str] = field(factory=dict)


@frozen(kw_only=True)
class Run:
    """A model that was trained here, by this server or an earlier one, and its checkpoints."""

    id: str  # of the model
    made: ModelMade
    used: float  # seconds since the epoch
    user_metadata: Mapping[str, str] = field(factory=dict)
    checkpoints: tuple[Saved, ...] = ()  # the oldest first


class InTurn(Protocol):
    """Awaits what `work` returns in the thread of the group, between two requests of the model."""

    def __call__(self, work: Callable[[], T], /) -> Awaitable[T]: ...
