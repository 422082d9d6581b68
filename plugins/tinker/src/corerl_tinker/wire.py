"""Bodies in protobuf: passes as clients send them, and what passes and samples are answered. No other file knows it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import TypeAlias

import numpy as np
import zstandard
from google.protobuf.message import DecodeError
from tinker.proto import tinker_public_pb2 as pb
from tinker.types.topk_logprobs import MASK_LOGPROB

from corerl.types import Array, IntArray
from corerl_tinker.futures import Answer
from corerl_tinker.requests import Datum, Drawn, Pass, PassDone, Refused

PROTOBUF = "application/x-protobuf"
LARGEST_WINDOW = 2**27  # of zstd, in bytes: memory that a frame's header may ask for
MOST_BYTES = 64 * 2**20  # of a body, once it is decompressed
MOST_TARGETS = 2**25  # of a pass, once all its tokens have as many: a body of few bytes may have many that are 0
PassMessage: TypeAlias = pb.ForwardBackwardRequest

# The SDK widens all others to these.
DTYPES: Mapping[int, np.dtype] = {pb.DTYPE_FLOAT32: np.dtype("<f4"), pb.DTYPE_INT64: np.dtype("<i8")}


def decompressed(body: bytes, *, most: int = MOST_BYTES) -> bytes:
    """A body compressed by zstd. Raises Refused if it is none, or has more than `most` bytes."""
    try:
        with zstandard.ZstdDecompressor(max_window_size=LARGEST_WINDOW).stream_reader(body) as reader:
            found = reader.read(most + 1)
    except (zstandard.ZstdError, MemoryError) as error:
        raise Refused(f"the body is not compressed by zstd: {error}") from error
    if len(found) > most:
        raise Refused(f"the body has more than {most} bytes when decompressed; send fewer datums at once", status=413)
    return found


# ---- passes ----------------------------------------------------------------------------------------------------------


def parsed(body: bytes) -> PassMessage:
    """The message of a `forward_backward`, of which `model_id` and `seq_id` can be read; `read_pass` reads the rest."""
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise Refused(f"the body is no ForwardBackwardRequest in protobuf: {error}") from error
    return message


def read_pass(message: PassMessage, *, longest: int) -> Pass:
    """What a message asks for. Rows have at most `longest` tokens. Raises Refused, with the number of the datum, for
    what is not served or contradicts itself."""
    if not message.data:
        raise Refused("a pass without datums")
    datums, total, most = [], 0, 1
    for number, datum in enumerate(message.data):
        try:
            tokens = _tokens(datum.model_input, longest=longest)
            given = datum.loss_fn_inputs.items()
            total, most = total + len(tokens), max(most, *(each for _, tensor in given for each in tensor.shape[1:]), 1)
            if total * most > MOST_TARGETS:
                raise Refused(
                    f"{total} tokens with {most} targets each are more than {MOST_TARGETS}; send fewer datums"
                )
            inputs = {name: _array(tensor, name=name, rows=len(tokens)) for name, tensor in given}
        except Refused as refused:
            raise Refused(f"datum {number}: {refused.message}") from refused
        datums.append(Datum(tokens=tokens, inputs=inputs))
    config: dict[str, float | str] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        config[name] = value.text if value.WhichOneof("value") == "text" else value.number
    return Pass(datums=tuple(datums), loss=message.loss_fn, config=config, forward_only=message.forward_only)


def _tokens(chunks: Iterable[pb.Chunk], *, longest: int) -> IntArray:
    parts = []
    for chunk in chunks:
        if (kind := chunk.WhichOneof("chunk")) != "encoded_text":
            raise Refused(f"a chunk is {kind or 'empty'}; this server reads text only")
        parts.append(_values(chunk.encoded_text.tokens, np.dtype("<i4"), what="tokens"))
    return row_of(np.concatenate(parts) if parts else np.zeros(0), longest=longest)


def row_of(tokens: Array, *, longest: int) -> IntArray:
    """The tokens of one row, once they are checked."""
    if not 0 < len(tokens) <= longest:
        raise Refused(f"{len(tokens)} tokens, wanted 1 to {longest} (serve.tokens_per_row)")
    return tokens.astype(np.int64)


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
