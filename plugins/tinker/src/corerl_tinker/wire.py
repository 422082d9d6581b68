"""Bodies in protobuf: passes as clients send them, and what passes and samples are answered. No other file knows it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TypeAlias

import numpy as np
from google.protobuf.message import DecodeError
from tinker.proto import tinker_public_pb2 as pb
from tinker.types.topk_logprobs import MASK_LOGPROB

from corerl.types import Array
from corerl_tinker.requests import Drawn, Pass, PassDone, Refused
from corerl_tinker.sessions import Answer

PROTOBUF = "application/x-protobuf"
MOST_BYTES = 64 * 2**20  # of a body
LONGEST = 1_000_000  # tokens of a row; the model's own limit is below
MOST_TARGETS = 2**25  # of a pass, once all its tokens have as many: a body of few bytes may have many that are 0
PassMessage: TypeAlias = pb.ForwardBackwardRequest

# The SDK widens all others to these.
DTYPES: Mapping[int, np.dtype] = {pb.DTYPE_FLOAT32: np.dtype("<f4"), pb.DTYPE_INT64: np.dtype("<i8")}


# ---- passes ----------------------------------------------------------------------------------------------------------


def parsed(body: bytes) -> PassMessage:
    """The message of a `forward_backward`, of which `model_id` and `seq_id` can be read; `read_pass` reads the rest."""
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise Refused(f"the body is no ForwardBackwardRequest in protobuf: {error}") from error
    return message


def read_pass(message: PassMessage) -> Pass:
    """What a message asks for. Raises Refused, with the number of the datum, for what is not served or contradicts
    itself."""
    if not message.data:
        raise Refused("a pass without datums")
    names = sorted(message.data[0].loss_fn_inputs)
    tokens, shapes, total, most = list[Array](), list[tuple[int, ...]](), 0, 1
    parts: dict[str, list[Array]] = {name: [] for name in names}
    for number, datum in enumerate(message.data):
        try:
            row, given = _tokens(datum.model_input), datum.loss_fn_inputs
            if sorted(given) != names:
                raise Refused(
                    f"its inputs are {', '.join(sorted(given)) or 'none'}, and datum 0 has {', '.join(names)}"
                )
            total, most = total + len(row), max(most, *(each for name in names for each in given[name].shape[1:]), 1)
            if total * most > MOST_TARGETS:
                raise Refused(
                    f"{total} tokens with {most} targets each are more than {MOST_TARGETS}; send fewer datums"
                )
            shape = (len(row),)
            for at, name in enumerate(names):
                array = _array(given[name], name=name, rows=len(row))
                if at and array.shape != shape:
                    raise Refused(f"{name} has the shape {list(array.shape)}, and {names[0]} {list(shape)}")
                shape = array.shape
                parts[name].append(array)
        except Refused as refused:
            raise Refused(f"datum {number}: {refused.message}") from refused
        tokens.append(row)
        shapes.append(shape)
    config: dict[str, float | str] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        config[name] = value.text if value.WhichOneof("value") == "text" else value.number
    return Pass(
        loss=message.loss_fn,
        tokens=np.concatenate(tokens).astype(np.int64),
        shapes=tuple(shapes),
        inputs={name: _together(arrays) for name, arrays in parts.items()},
        config=config,
        forward_only=message.forward_only,
    )


def _together(parts: Sequence[Array]) -> Array:
    """[M] or [M, K] of datums [n] or [n, k], the most that one has; [M] if that is 1. 0 is what others lack."""
    most = max(math.prod(part.shape[1:]) for part in parts)
    if most == 1:
        return np.concatenate([part.reshape(-1) for part in parts])
    rows = [part.reshape(len(part), -1) for part in parts]
    return np.concatenate([np.pad(row, ((0, 0), (0, most - row.shape[1]))) for row in rows])


def _tokens(chunks: Sequence[pb.Chunk]) -> Array:
    parts = []
    for chunk in chunks:
        if (kind := chunk.WhichOneof("chunk")) != "encoded_text":
            raise Refused(f"a chunk is {kind or 'empty'}; this server reads text only")
        parts.append(_values(chunk.encoded_text.tokens, np.dtype("<i4"), what="tokens"))
    row = np.concatenate([np.zeros(0, np.int32), *parts]) if len(parts) != 1 else parts[0]
    if not 0 < len(row) <= LONGEST:
        raise Refused(f"{len(row)} tokens, wanted 1 to {LONGEST}")
    return row


def _array(tensor: pb.Tensor, *, name: str, rows: int) -> Array:
    """[rows] or [rows, K]: float32 or int64."""
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        raise Refused(f"{name} has the dtype {tensor.dtype}, wanted float32 (1) or int64 (2)")
    sparse = tensor.HasField("sparse_csr")
    values = _values(tensor.sparse_csr.values if sparse else tensor.dense, dtype, what=name)
    shape = tuple(tensor.shape) or (len(values),)
    if shape[0] != rows or len(shape) > 2 or min(shape) < 1 or (sparse and len(shape) < 2):
        raise Refused(
            f"{name} has the shape {list(shape)}, wanted [{rows}], or [{rows}, K] for K targets of each token"
        )
    if sparse:
        return _dense(tensor.sparse_csr, values, shape, name=name)
    if math.prod(shape) != len(values):
        raise Refused(f"{name} has {len(values)} values and the shape {list(shape)}")
    return values.reshape(shape)


def _dense(csr: pb.SparseCsr, values: Array, shape: tuple[int, ...], *, name: str) -> Array:
    """[rows, K], with 0 where nothing is written."""
    edges = _values(csr.crow_indices, np.dtype("<i8"), what=name)
    columns = _values(csr.col_indices, np.dtype("<i8"), what=name)
    counts = np.diff(edges)
    bounds = len(edges) == shape[0] + 1 and edges[0] == 0 and edges[-1] == len(values) == len(columns)
    if not bounds or (counts < 0).any() or (columns < 0).any() or (columns >= shape[1]).any():
        raise Refused(f"{name} is no sparse tensor of the shape {list(shape)}: its indices contradict it")
    dense = np.zeros(shape, values.dtype)
    dense[np.repeat(np.arange(shape[0]), counts), columns] = values
    return dense


def _values(data: bytes, dtype: np.dtype, *, what: str) -> Array:
    if len(data) % dtype.itemsize:
        raise Refused(f"{what} has {len(data)} bytes, no multiple of {dtype.itemsize}")
    return np.frombuffer(data, dtype)


# ---- answers ---------------------------------------------------------------------------------------------------------


def pass_answer(done: PassDone) -> Answer:
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=done.metrics)
    for several, rows in groupby(done.logprobs, key=lambda row: row.shape[1:]):
        parts = [np.ascontiguousarray(row, "<f4").tobytes() for row in rows]
        offsets = np.cumsum([0, *map(len, parts)]).astype("<i8").tobytes()  # in bytes
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(parts))
        tensor = pb.BatchedTensor(data=b"".join(parts), offsets=offsets, dtype=pb.DTYPE_FLOAT32, trailing_shape=several)
        record.fields["logprobs"].CopyFrom(tensor)
    return Answer(body=message.SerializeToString(), media_type=PROTOBUF)


def sample_answer(drawn: Drawn) -> Answer:
    message = pb.SampleResponse()
    for tokens, logprobs, stopped in zip(drawn.tokens, drawn.logprobs, drawn.stopped, strict=True):
        message.sequences.add(
            stop_reason=pb.STOP_REASON_STOP if stopped else pb.STOP_REASON_LENGTH,
            tokens=tokens.astype("<i4").tobytes(),
            logprobs=logprobs.astype("<f4").tobytes(),
        )
    if drawn.prompt_logprobs is not None:  # a log-prob that is not there is written as NaN
        message.prompt_logprobs = drawn.prompt_logprobs.astype("<f4").tobytes()
    if drawn.prompt_top is not None:
        tokens, logprobs = drawn.prompt_top
        length, k = tokens.shape
        message.topk_prompt_logprobs.CopyFrom(
            pb.TopkLogprobs(
                token_ids=tokens.astype("<i4").tobytes(),
                logprobs=np.where(np.isnan(logprobs), MASK_LOGPROB, logprobs).astype("<f4").tobytes(),
                k=k,
                length=length,
            )
        )
    return Answer(body=message.SerializeToString(), media_type=PROTOBUF)
