"""What passes between the wire and the model that is served: requests once they are read and checked, and results."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal, TypeAlias

from attrs import define, field, frozen
from tinker.types import SampleRequest

from corerl.errors import UserError
from corerl.types import Array, FloatArray, IntArray

Category: TypeAlias = Literal["user", "server"]
# Awaits what it is given, called in the thread of the group, between two requests of the model.
InTurn: TypeAlias = Callable[[Callable[[], Any]], Awaitable[Any]]


class Refused(UserError):
    """A request that has no result, for which nothing else ends; the message says why, and what to do. Clients repeat
    what fails with 5xx, 408, 409 or 429 for minutes without a word, so that everything else has a status of 4xx."""

    def __init__(self, message: str, *, status: int = 400, category: Category = "user") -> None:
        super().__init__(message)
        self.status, self.category = status, category


@frozen(kw_only=True)
class Pass:
    """A `forward_backward`, or a `forward`, of D datums that have M tokens together."""

    loss: str
    tokens: IntArray  # [M]
    shapes: tuple[tuple[int, ...], ...]  # [D] of a datum's inputs: [n], or [n, K] for K targets of each token
    # `target_tokens`, `weights`, `logprobs`, ...: [M], or [M, K] with the most targets of any datum, and 0 in others.
    inputs: Mapping[str, Array]
    config: Mapping[str, float | str] = field(factory=dict)  # of the loss
    forward_only: bool = False


@frozen(kw_only=True)
class PassDone:
    """What a pass returns: metrics have their reductions as suffixes (`loss:sum`)."""

    logprobs: tuple[FloatArray, ...]  # for each datum, in the shape of its targets
    metrics: Mapping[str, float]


@define(kw_only=True, eq=False)
class Sampler:
    """What a client samples from."""

    number: int  # the same each time a client does the same
    weights: int  # their number
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
