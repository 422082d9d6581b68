"""What clients ask for, once it is read and checked, and what they are answered: plain data between the wire and the
policy."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

from attrs import field, frozen

from corerl.types import Array, FloatArray, IntArray

T = TypeVar("T")

Category: TypeAlias = Literal["user", "server"]


class Refused(Exception):
    """A request that is not served; `sentence` says why, and what to do. Clients repeat what fails with 5xx, 408, 409
    or 429 for minutes without a word, so that everything else has a status of 4xx."""

    def __init__(self, sentence: str, *, status: int = 400) -> None:
        super().__init__(sentence)
        self.sentence, self.status = sentence, status


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
class Adam:
    """The settings of one optimizer step."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    clip_norm: float  # 0: gradients are not clipped


@frozen(kw_only=True)
class ModelWanted:
    """A model that a session creates."""

    base_model: str
    rank: int | None  # of its adapters; None: not said
    seed: int | None = None
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True
    optimizer: str = "adamw"
    user_metadata: Mapping[str, str] = field(factory=dict)


@frozen(kw_only=True)
class ModelMade:
    """A trained model as clients are told of it."""

    base_model: str
    tokenizer: str  # what the client loads by this name or from this directory
    rank: int | None  # None: all weights are trained


@frozen(kw_only=True)
class Draw:
    """A request for samples of one prompt."""

    sampler: str  # id of a sampler, as `Trainer.save_for_sampler` and `Trainer.sampler` give it
    prompt: IntArray  # [n]
    samples: int = 1
    max_tokens: int | None = None  # None: as many as fit
    seed: int | None = None
    key: int = 0  # number of the request of its sampler, from which noise follows if there is no seed
    stop_texts: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] | None = None  # None: the model's own end tokens; (): none
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all tokens
    prompt_logprobs: bool = False
    prompt_top: int = 0  # of so many of the likeliest tokens at each place of the prompt
    prompt_last: int | None = None  # tokens of the prompt for which this is asked; None: all


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


class Policy(Protocol):
    """The trained model and what samples from it. One thread calls what is above `draw`, in the order of the client's
    numbers. Each raises `Refused` for what the client should do otherwise; any other error is fatal."""

    def create(self, wanted: ModelWanted, *, model_id: str) -> ModelMade:
        """Begin with a new model in the place of the one before, which goes on if this one is refused."""

    def release(self) -> None:
        """The client has gone or has created another model: what no checkpoint has is given up. Samplers stay."""

    def run(self, wanted: Pass) -> PassDone: ...

    def discard(self) -> None:
        """Drop the gradients that no step has taken: a part of them was refused."""

    def step(self, settings: Adam) -> Mapping[str, float]:
        """Metrics of the step, such as the gradient norm."""

    def save(self, name: str, *, ttl: float | None, overwrite: bool, user_metadata: Mapping[str, str]) -> Saved: ...

    def load(self, path: str, *, optimizer: bool) -> None:
        """Into the model that was created, with the moments of a training checkpoint or without."""

    def save_for_sampler(
        self, name: str | None, *, ttl: float | None, inflight: bool, user_metadata: Mapping[str, str]
    ) -> tuple[str, Saved | None]:
        """The id of a new sampler of the weights as they are, and the checkpoint if it has a name."""

    def sampler(self, model_path: str | None, base_model: str | None) -> str:
        """The id of a new sampler of a saved checkpoint, or of a base model."""

    def draw(self, wanted: Draw, in_turn: InTurn) -> Coroutine[Any, Any, Drawn]:
        """A coroutine of the server's event loop. What ranks compute for it, such as log-probs of the prompt, waits its
        turn."""

    # Of files alone, so that any thread may call them while the group computes.

    def runs(self) -> Sequence[Run]: ...

    def delete(self, path: str) -> None: ...

    def expire(self, path: str, *, ttl: float | None) -> None:
        """Delete a checkpoint `ttl` seconds from now; None: never."""
