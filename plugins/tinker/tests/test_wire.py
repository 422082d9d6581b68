"""Protobuf against the SDK's own encoders and decoders, and bodies that are cut, forged or bombs."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from itertools import chain

import numpy as np
import pytest
import torch
from attrs import evolve
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st
from tinker import types
from tinker.proto import tinker_public_pb2 as pb
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response

from corerl.engines import Generation, PromptScores
from corerl.types import offsets_of
from corerl_tinker import wire
from corerl_tinker.losses import rows_of
from corerl_tinker.requests import Refused

FLOATS = st.floats(width=32, allow_nan=False)


def request(data: list[types.Datum], **config: float | str) -> types.ForwardBackwardRequest:
    given = types.ForwardBackwardInput(data=data, loss_fn="ppo", loss_fn_config=config or None)
    return types.ForwardBackwardRequest(forward_backward_input=given, model_id="session-1:train:0", seq_id=3)


def encoded(data: list[types.Datum], **config: float | str) -> pb.ForwardBackwardRequest:
    return forward_backward_request_to_proto(request(data, **config))


@st.composite
def datums(draw: st.DrawFn) -> types.Datum:
    tokens = draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6))
    cut = draw(st.integers(0, len(tokens)))
    chunks = [types.EncodedTextChunk(tokens=part) for part in (tokens[:cut], tokens[cut:])]
    n = len(tokens)
    inputs = {
        "target_tokens": types.TensorData(data=tokens, dtype="int64"),
        "weights": types.TensorData(data=draw(st.lists(FLOATS, min_size=n, max_size=n)), dtype="float32"),
    }
    if several := draw(st.integers(0, 5)):  # the SDK writes what is mostly 0 as sparse
        wanted = draw(st.lists(st.just(0) | st.integers(0, 2**40), min_size=n * several, max_size=n * several))
        inputs["target_tokens"] = types.TensorData.from_torch_sparse(torch.tensor(wanted).view(n, several))
        weights = draw(st.lists(st.just(0.0) | FLOATS, min_size=n * several, max_size=n * several))
        inputs["weights"] = types.TensorData.from_torch_sparse(torch.tensor(weights).view(n, several))
    return types.Datum(model_input=types.ModelInput(chunks=chunks), loss_fn_inputs=inputs)


@settings(max_examples=50, deadline=None)
@given(st.lists(datums(), min_size=1, max_size=4), st.dictionaries(st.text(max_size=4), FLOATS | st.text(max_size=4)))
def test_a_pass_is_read_as_the_sdk_meant_it(data: list[types.Datum], config: dict[str, float | str]) -> None:
    message = encoded(data, **config)
    found = wire.read_pass(message)
    assert (message.model_id, message.seq_id, found.loss, dict(found.config)) == ("session-1:train:0", 3, "ppo", config)
    for mine, theirs in zip(found.datums, data, strict=True):
        assert mine.tokens.tolist() == theirs.model_input.to_ints()
        assert mine.inputs.keys() == theirs.loss_fn_inputs.keys()
        for name, tensor in theirs.loss_fn_inputs.items():
            assert mine.inputs[name].dtype == tensor.to_numpy().dtype
            np.testing.assert_array_equal(mine.inputs[name], tensor.to_numpy(), strict=True)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.lists(FLOATS, max_size=4), st.integers(0, 2)), max_size=5))
def test_the_sdk_reads_what_a_pass_returned(given_rows: list[tuple[list[float], int]]) -> None:
    """Of one target of each token, or of several, in any order."""
    rows = [np.array(row * max(several, 1), np.float32) for row, several in given_rows]
    shapes = [[len(row), several] if several else [len(row)] for row, several in given_rows]
    logprobs = tuple(row.reshape(shape) for row, shape in zip(rows, shapes, strict=True))
    found = deserialize_forward_backward_output(bytes(wire.pass_answer(logprobs, 0.5).body))
    assert found.metrics == {"loss:sum": 0.5}
    assert [each["logprobs"].data for each in found.loss_fn_outputs] == [row.tolist() for row in rows]
    assert [each["logprobs"].shape for each in found.loss_fn_outputs] == shapes


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5), st.booleans()), max_size=4))
def test_the_sdk_reads_what_was_sampled(sequences: list[tuple[list[int], bool]]) -> None:
    rows, nothing = [tokens for tokens, _ in sequences], [np.nan, np.nan]
    scores = PromptScores(
        logprobs=np.array([np.nan, np.nan, -2.0] * 2, np.float32),
        top_tokens=np.array([[0, 0], [0, 0], [7, 0]] * 2),
        top_logprobs=np.array([nothing, nothing, [-0.5, -3.0]] * 2),
    )
    drawn = Generation(
        tokens=np.array([*chain(*rows)], np.int64),
        offsets=offsets_of([len(tokens) for tokens in rows]),
        logprobs=np.concatenate([np.zeros(0), *(-np.arange(len(tokens)) for tokens in rows)]),
        versions=np.zeros(0, np.int64),
        truncated=np.array([not stopped for _, stopped in sequences], np.bool_),
        scores=scores,
    )
    prompt = types.ModelInput.from_ints([1, 2, 3])
    asked = types.SampleRequest(prompt=prompt, sampling_params=types.SamplingParams())
    asked = asked.model_copy(update={"prompt_logprobs": True, "topk_prompt_logprobs": 2})
    found = deserialize_sample_response(bytes(wire.sample_answer(asked, drawn).body))
    assert [(each.tokens, each.stop_reason == "stop") for each in found.sequences] == sequences
    assert [each.logprobs for each in found.sequences] == [list(range(0, -len(tokens), -1)) for tokens, _ in sequences]
    assert found.prompt_logprobs == [None, None, -2.0]
    assert found.topk_prompt_logprobs == [None, None, [(7, -0.5), (0, -3.0)]]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_bodies_that_are_cut_or_forged_are_refused_or_read(data: st.DataObject) -> None:
    body = bytearray(encoded([data.draw(datums())]).SerializeToString())
    for _ in range(data.draw(st.integers(0, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    body = body[: data.draw(st.integers(0, len(body)))]
    with contextlib.suppress(Refused, DecodeError):  # and nothing else
        found = evolve(wire.read_pass(wire.PassMessage.FromString(bytes(body))), loss="cross_entropy", config={})
        rows = rows_of(found, vocabulary=2**31, longest=0)
        assert len(rows.samples) == len(rows.shapes) == len(found.datums)


def forged(**fields: object) -> pb.ForwardBackwardRequest:
    """A pass of two tokens whose input `weights` has these fields."""
    message = pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.array([1, 2], np.int32).tobytes()
    datum.loss_fn_inputs["weights"].CopyFrom(pb.Tensor(**fields))  # type: ignore[arg-type]
    return message


def csr(width: int, *, rows: Sequence[int] = (0, 1, 2), columns: Sequence[int] = (0, 1)) -> dict[str, object]:
    """Two values, in that many columns: large only once it is dense."""
    sparse = pb.SparseCsr(
        values=np.ones(2, np.float32).tobytes(),
        crow_indices=np.array(rows, np.int64).tobytes(),
        col_indices=np.array(columns, np.int64).tobytes(),
    )
    return {"dtype": pb.DTYPE_FLOAT32, "shape": [2, width], "sparse_csr": sparse}


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"dtype": 77, "dense": b"1234"}, r"datum 0: ValueError: a tensor has the dtype 77, and the shape \[\]"),
        ({"dtype": 1, "dense": b"12345"}, "datum 0: ValueError: buffer size must be a multiple of element size"),
        ({"dtype": 1, "dense": b"12345678", "shape": [2, -1]}, r"the dtype 1, and the shape \[2, -1\]"),
        ({"dtype": 1, "dense": bytes(16), "shape": [2, 3]}, "cannot reshape array of size 4 into shape"),
        (csr(2**40), "2 tokens with 1099511627776 targets each are more than 33554432; send fewer datums"),
        (csr(4) | {"shape": [2**20, 4]}, r"weights has the shape \[1048576, 4\], but there are 2 tokens"),
        (csr(4) | {"shape": [2, 4, 4]}, r"weights has the shape \[2, 4, 4\], but there are 2 tokens"),
        (csr(4, columns=[0, 4]), "datum 0: RuntimeError: "),
        (csr(4, columns=[0, -1]), "RuntimeError"),
        (csr(4, columns=[0]), "RuntimeError"),
        (csr(4, rows=[0, 2, 1]), "RuntimeError"),
        (csr(4, rows=[0, 3, 2]), "RuntimeError"),
        (csr(4, rows=[0, 2]), "RuntimeError"),
    ],
)
def test_tensors_that_contradict_themselves_are_refused(fields: dict[str, object], sentence: str) -> None:
    with pytest.raises(Refused, match=sentence):
        wire.read_pass(forged(**fields))


def test_what_is_no_text_is_refused() -> None:
    message = forged(dtype=1, dense=b"12345678")
    message.data[0].model_input.add().image.format = "png"
    with pytest.raises(Refused, match="datum 0: a chunk is image; this server reads text only"):
        wire.read_pass(message)
