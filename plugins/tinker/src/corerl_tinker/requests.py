"""What passes between the wire and the model that is served: requests as they are read and checked, and results."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypeVar

import pydantic
from attrs import define, field, frozen
from tinker import types as sdk

from corerl.errors import UserError
from corerl.messages import short_repr
from corerl.types import Array, IntArray

MOST_SAMPLES = 4096  # of one prompt
MOST_TOKENS = 2**25  # of a prompt, once for each of its samples: 256 MiB, the least that serve.memory_mib can be
MOST_TOKEN = 2**31  # a token is below
MOST_LIKELY = 2**22  # likely tokens of one prompt, of all its places together
# What samplers are not asked, and what clients do instead.
UNSERVED = {
    "topk_sample_logprobs": "ask for topk_prompt_logprobs of the prompt followed by what was sampled",
    "target_prompt_logprobs": "ask for topk_prompt_logprobs; or, under the weights that are trained, call forward with "
    "'cross_entropy', these tokens as target_tokens [n, K] and weights of 0, and read logprobs [n, K]",
    "prompt_alt_tokens_k": "ask for topk_prompt_logprobs; or sample one token after each beginning of the prompt",
}
Fields: TypeAlias = Mapping[str, Any]
Request = TypeVar("Request", bound=pydantic.BaseModel)
Category: TypeAlias = Literal["user", "server"]
# Awaits what a function makes of something in the thread of the group, with all that is asked under the same key.
InTurn: TypeAlias = Callable[[Callable[[Sequence[Any]], Sequence[Any]], Any, Hashable], Awaitable[Any]]


class Refused(UserError):
    """A request that has no result, for which nothing else ends; the message says why, and what to do. Clients repeat
    what fails with 5xx, 408, 409 or 429 for minutes without a word, so that everything else has a status of 4xx."""

    def __init__(self, message: str, *, status: int = 400, category: Category = "user") -> None:
        super().__init__(message)
        self.status, self.category = status, category


@frozen(kw_only=True)
class Datum:
    """A row of a pass: n tokens, and what the loss takes for each."""

    tokens: IntArray  # [n]
    # `target_tokens`, `weights`, `logprobs`, ...: [n], or [n, K] for K targets of each token
    inputs: Mapping[str, Array]


@frozen(kw_only=True)
class Pass:
    """A `forward_backward`, or a `forward`."""

    loss: str
    datums: Sequence[Datum]
    config: Mapping[str, float | str] = field(factory=dict)  # of the loss
    forward_only: bool = False


@define(kw_only=True, eq=False)
class Sampler:
    """What a client samples from."""

    number: int  # the same each time a client does the same
    weights: int  # their number
    name: str  # for messages
    base_model: str
    model_path: str | None = None  # of a checkpoint


# ---- requests in JSON ------------------------------------------------------------------------------------------------


def read(cls: type[Request], fields: Fields) -> Request:
    """A request as the SDK's own class of it. Fields of later versions are ignored where they say nothing."""
    try:
        return cls.model_validate(
            {name: value for name, value in fields.items() if name in cls.model_fields or value not in (None, 0, "")}
        )
    except pydantic.ValidationError as error:
        wrong = error.errors(include_url=False, include_context=False)[0]
    where, got = ".".join(map(str, wrong["loc"])), short_repr(wrong["input"], 80)
    raise Refused(f"{where}: {wrong['msg']}, got {got}")


def require_sampled(request: sdk.SampleRequest, given: Fields) -> None:
    """Raise Refused for what no sampler is asked; `given` are the sampling parameters as they came."""
    params = request.sampling_params
    for name, instead in UNSERVED.items():
        if getattr(request, name):
            raise Refused(f"{name} is not served; {instead}")
    for name in given.keys() - sdk.SamplingParams.model_fields.keys():  # which the SDK's class ignores
        if given[name]:
            raise Refused(f"sampling_params.{name} is not served")
    for chunk in request.prompt.chunks:
        if not isinstance(chunk, sdk.EncodedTextChunk):
            raise Refused(f"the prompt has a chunk of type {chunk.type!r}; this server reads text only")
    if request.seq_id is None:  # all such requests would be one
        raise Refused("seq_id is missing; number the requests of a sampler, each with a seq_id of its own")
    length = request.prompt.length
    checks = {
        "prompt": length > 0,
        "num_samples": request.num_samples >= 1,
        "max_tokens": params.max_tokens is None or params.max_tokens >= 1,
        "temperature": 0 <= params.temperature < float("inf"),
        "top_p": 0 < params.top_p <= 1,
        "top_k": -1 <= params.top_k < MOST_TOKEN,
        "stop": all(0 <= each < MOST_TOKEN for each in params.stop or () if isinstance(each, int)),
        "prompt_logprobs_last_n": 1 <= (request.prompt_logprobs_last_n or 1) <= length,
        "topk_prompt_logprobs": 0 <= request.topk_prompt_logprobs * length <= MOST_LIKELY,
    }
    for name, holds in checks.items():
        if not holds:
            value = getattr(request, name, None) or getattr(params, name, None)
            raise Refused(f"{name}={short_repr(value, 80)} is out of range")
    if request.num_samples > (most := min(MOST_SAMPLES, MOST_TOKENS // length)):
        raise Refused(
            f"num_samples={request.num_samples} is out of range, at most {most} of a prompt of {length} tokens; send "
            "further requests for the others"
        )
