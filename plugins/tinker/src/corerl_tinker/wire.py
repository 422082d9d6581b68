"""Bodies in protobuf: passes as clients send them, and what passes and samples are answered. No other file knows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Literal, TypeAlias

import numpy as np
from starlette.responses import Response
from tinker.proto import tinker_public_pb2 as pb
from tinker.types import SampleRequest, TensorData
from tinker.types.topk_logprobs import MASK_LOGPROB

from corerl.engines import Generation
from corerl.messages import message_of
from corerl.types import Array, FloatArray
from corerl_tinker.requests import Datum, Pass, Refused

PROTOBUF = "application/x-protobuf"
MOST_BYTES = 64 * 2**20  # of a body
MOST_TARGETS = 2**25  # of a pass, once all its tokens have as many: a body of few bytes may have many that are 0
PassMessage: TypeAlias = pb.ForwardBackwardRequest
# The SDK widens all others to these.
DTYPES: Mapping[int, Literal["float32", "int64"]] = {pb.DTYPE_FLOAT32: "float32", pb.DTYPE_INT64: "int64"}


# ---- passes ----------------------------------------------------------------------------------------------------------


def read_pass(message: PassMessage) -> Pass:
    """What a message asks for. Raises Refused, with the number of the datum, for what is no tensor, is not served, or
    would be too large."""
    if not message.data:
        raise Refused("a pass without datums")
    datums, total, most = list[Datum](), 0, 1
    for number, datum in enumerate(message.data):
        tensors = datum.loss_fn_inputs
        most = max(most, *(each for tensor in tensors.values() for each in tensor.shape[1:]), 1)
        try:
            tokens = _tokens(datum.model_input)
            total += len(tokens)
            if total * most > MOST_TARGETS:
                raise Refused(
                    f"{total} tokens with {most} targets each are more than {MOST_TARGETS}; send fewer datums"
                )
            for name, tensor in tensors.items():  # before a sparse one is made dense
                if tensor.shape and (len(tensor.shape) > 2 or tensor.shape[0] != len(tokens)):
                    raise Refused(f"{name} has the shape {list(tensor.shape)}, but there are {len(tokens)} tokens")
            datums.append(Datum(tokens=tokens, inputs={name: _array(tensors[name]) for name in tensors}))
        except (Refused, ValueError, RuntimeError) as error:  # of numpy and torch, for what the SDK does not send
            raise Refused(f"datum {number}: {message_of(error)}") from error
    config = {  # the SDK writes `loss_fn_config` too, for earlier servers
        name: value.text if value.WhichOneof("value") == "text" else value.number
        for name, value in message.loss_fn_config_v2.items()
    }
    return Pass(loss=message.loss_fn, datums=datums, config=config, forward_only=message.forward_only)


def _tokens(chunks: Sequence[pb.Chunk]) -> Array:
    parts = [np.zeros(0, np.int64)]
    for chunk in chunks:
        if (kind := chunk.WhichOneof("chunk")) != "encoded_text":
            raise Refused(f"a chunk is {kind or 'empty'}; this server reads text only")
        parts.append(np.frombuffer(chunk.encoded_text.tokens, "<i4"))
    return np.concatenate(parts)


def _array(tensor: pb.Tensor) -> Array:
    """Dense, with 0 where a sparse one has nothing. Raises ValueError or RuntimeError for what is no tensor."""
    if tensor.dtype not in DTYPES or min(tensor.shape, default=1) < 1:
        raise ValueError(f"a tensor has the dtype {tensor.dtype}, and the shape {list(tensor.shape)}")
    dtype = DTYPES[tensor.dtype]
    if not tensor.HasField("sparse_csr"):
        return np.frombuffer(tensor.dense, dtype).reshape(tuple(tensor.shape) or -1)
    csr = tensor.sparse_csr
    rows, columns = (np.frombuffer(each, "<i8").tolist() for each in (csr.crow_indices, csr.col_indices))
    values = np.frombuffer(csr.values, dtype)
    return TensorData(values, dtype, list(tensor.shape), rows, columns).to_numpy()


# ---- answers ---------------------------------------------------------------------------------------------------------


def pass_answer(logprobs: Sequence[FloatArray], loss: float) -> Response:
    """Log-probs of each datum, in the shape of its targets."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics={"loss:sum": loss})
    for several, rows in groupby(logprobs, key=lambda row: row.shape[1:]):
        parts = [np.ascontiguousarray(row, "<f4").tobytes() for row in rows]
        offsets = np.cumsum([0, *map(len, parts)]).astype("<i8").tobytes()  # in bytes
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(parts))
        tensor = pb.BatchedTensor(data=b"".join(parts), offsets=offsets, dtype=pb.DTYPE_FLOAT32, trailing_shape=several)
        record.fields["logprobs"].CopyFrom(tensor)
    return Response(message.SerializeToString(), media_type=PROTOBUF)


def sample_answer(asked: SampleRequest, found: Generation) -> Response:
    """The samples of one prompt, with its scores, of which those of the first row are read."""
    message, ended_early = pb.SampleResponse(), found.truncated | found.unfinished
    for start, end, by_length in zip(found.offsets, found.offsets[1:], ended_early, strict=False):
        message.sequences.add(
            stop_reason=pb.STOP_REASON_LENGTH if by_length else pb.STOP_REASON_STOP,
            tokens=found.tokens[start:end].astype("<i4").tobytes(),
            logprobs=found.logprobs[start:end].astype("<f4").tobytes(),
        )
    if found.scores is not None:
        scores, top = found.scores.part(0, asked.prompt.length), message.topk_prompt_logprobs
        if asked.prompt_logprobs:  # a log-prob that is not there is written as NaN
            message.prompt_logprobs = scores.logprobs.astype("<f4").tobytes()
        if asked.topk_prompt_logprobs:
            top.length, top.k = scores.top_tokens.shape
            top.token_ids = scores.top_tokens.astype("<i4").tobytes()
            top.logprobs = np.nan_to_num(scores.top_logprobs, nan=MASK_LOGPROB).astype("<f4").tobytes()
    return Response(message.SerializeToString(), media_type=PROTOBUF)
