"""Bodies in JSON: requests as the SDK's own classes of them, what they mean, and fields of answers."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, TypeVar

import numpy as np
import pydantic
from tinker import types as sdk

from corerl.messages import short_repr
from corerl_tinker.requests import Draw, Refused, Run, Sampler, Saved
from corerl_tinker.wire import row_of

MOST_SAMPLES = 4096  # of one prompt
MOST_TOKEN = 2**31  # a token is below
MOST_LIKELY = 2**22  # likely tokens of one prompt, of all its places together
# What samplers are not asked, and what clients do instead.
UNSERVED = {
    "topk_sample_logprobs": "ask for topk_prompt_logprobs of the prompt followed by what was sampled",
    "target_prompt_logprobs": "ask for topk_prompt_logprobs; or, under the weights that are trained, call forward with "
    "'cross_entropy', these tokens as target_tokens [n, K] and weights of 0, and read logprobs [n, K]",
    "prompt_alt_tokens_k": "ask for topk_prompt_logprobs; or sample one token after each beginning of the prompt",
}
Fields = Mapping[str, Any]
Request = TypeVar("Request", bound=pydantic.BaseModel)


def read(cls: type[Request], fields: Fields) -> Request:
    """A request as the SDK's own class of it. Fields of later versions are ignored where they are empty."""
    try:
        return cls.model_validate(fields)
    except pydantic.ValidationError as error:
        wrong = error.errors(include_url=False, include_context=False)
    unknown = {str(each["loc"][0]) for each in wrong if each["type"] == "extra_forbidden" and not each["input"]}
    if unknown & fields.keys():
        return read(cls, {name: value for name, value in fields.items() if name not in unknown})
    where, got = ".".join(map(str, wrong[0]["loc"])), short_repr(wrong[0]["input"], 80)
    raise Refused(f"{where}: {wrong[0]['msg']}, got {got}")


def address(fields: Fields) -> tuple[str, int]:
    """The model of a request, and its number."""
    model_id, number = fields.get("model_id"), fields.get("seq_id")
    if not isinstance(model_id, str) or not isinstance(number, int):
        raise Refused("a request needs the text model_id and the number seq_id, as a TrainingClient sends them")
    return model_id, number


def draw_of(request: sdk.SampleRequest, given: Fields, *, sampler: Sampler, longest: int) -> Draw:
    """What is asked of a sampler; `given` are the sampling parameters as they came."""
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
    try:
        prompt = row_of(np.array(request.prompt.to_ints(), np.int64), longest=longest)
    except OverflowError:
        raise Refused("the prompt has a token that is no number of 64 bits") from None
    checks = {
        "num_samples": 1 <= request.num_samples <= MOST_SAMPLES,
        "max_tokens": params.max_tokens is None or params.max_tokens >= 1,
        "temperature": 0 <= params.temperature < float("inf"),
        "top_p": 0 < params.top_p <= 1,
        "top_k": -1 <= params.top_k < MOST_TOKEN,
        "stop": all(0 <= each < MOST_TOKEN for each in params.stop or () if isinstance(each, int)),
        "prompt_logprobs_last_n": 1 <= (request.prompt_logprobs_last_n or 1) <= len(prompt),
        "topk_prompt_logprobs": 0 <= request.topk_prompt_logprobs * len(prompt) <= MOST_LIKELY,
    }
    for name, holds in checks.items():
        if not holds:
            raise Refused(f"{name}={getattr(request, name, None) or getattr(params, name, None)} is out of range")
    return Draw(sampler=sampler, prompt=prompt, asked=request)


def run_fields(run: Run) -> Fields:
    latest = {saved.kind: checkpoint_fields(saved) for saved in run.checkpoints}
    return {
        "training_run_id": run.id,
        "base_model": run.made.base_model,
        "model_owner": "local",
        "is_lora": run.made.rank is not None,
        "lora_rank": run.made.rank,
        "last_request_time": timestamp(run.used),
        "last_checkpoint": latest.get("training"),
        "last_sampler_checkpoint": latest.get("sampler"),
        "user_metadata": dict(run.user_metadata),
    }


def checkpoint_fields(saved: Saved) -> Fields:
    return {
        "checkpoint_id": "/".join(saved.path.split("/")[3:]),
        "checkpoint_type": saved.kind,
        "time": timestamp(saved.created),
        "tinker_path": saved.path,
        "size_bytes": saved.bytes,
        "user_metadata": dict(saved.user_metadata),
        "expires_at": None if saved.expires is None else timestamp(saved.expires),
    }


def timestamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
