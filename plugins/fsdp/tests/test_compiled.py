"""Compiled layers where attention is one kernel, as on a GPU: on a CPU by a reference of that kernel's operator."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from attrs import evolve
from torch._dynamo.utils import counters
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from corerl.config import ClusterInfo, TrainConfig
from corerl.kinds import InPieces
from corerl.types import ModelSize
from corerl_fsdp import build, compiled
from corerl_fsdp.config import FsdpConfig
from corerl_fsdp.memory import memory
from corerl_testing import Setup, forward, make_branches, running, tiny_fields, train
from plugins.fsdp.tests.ragged import samples_of
from tests.ops.flash import as_the_kernel, back_from_the_kernel

# Of torch, which asks for it while it traces.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")

FIELDS = tiny_fields("qwen3")
SIZE = int(FIELDS["hidden_size"])
# Batches of few tokens and many, of one sample and many, and one of as many tokens as a hidden state has elements.
BATCHES = [[20, 3, 19], [40] * 4, [SIZE], [SIZE - 3, 3], [2], [5, 7], [16] * 5, [9] * 40, [31], [300], [13, 2, 2, 2]]
BATCHES += [[2 + number, 50 - number] * (1 + number % 3) for number in range(19)]


def always(*_: object) -> bool:
    return True


@pytest.fixture
def one_kernel() -> Iterator[None]:
    """Attention as in half precision on a GPU. What inductor would make of a graph takes a minute here."""
    with (
        mock.patch("corerl.ops.attention.KERNEL", as_the_kernel),
        mock.patch("corerl.ops.attention.KERNEL_BACKWARD", back_from_the_kernel),
        mock.patch("corerl.ops.attention.one_kernel", always),  # a Mock cannot be traced
        mock.patch.object(build, "one_kernel", always),
        mock.patch("torch.compile", partial(torch.compile, backend="aot_eager")),
    ):
        torch._dynamo.reset()
        counters.clear()
        yield
        torch._dynamo.reset()
        counters.clear()


def norms(batches: Sequence[Sequence[int]], *, compiled: bool) -> tuple[list[float], list[int]]:
    """Of the gradients of a step on each batch; and the graphs that were compiled until its end, and until that of a
    pass without gradients on the next batch."""
    setup = Setup(backend="fsdp", model="", fields=FIELDS, options={"compile": compiled})
    setup = evolve(setup, train=evolve(setup.train, tokens_per_micro_batch=400))
    found, graphs = [], []
    with running(setup) as worker:
        for number, lengths in enumerate(batches):
            result = train(worker, setup, number, samples=samples_of(lengths, seed=number))
            found.append(result.grad_norm)
            graphs.append(counters["stats"]["unique_graphs"])
            next_one = batches[(number + 1) % len(batches)]
            forward(worker, setup, samples_of(next_one, seed=number))
            graphs.append(counters["stats"]["unique_graphs"])
    return found, graphs


@pytest.mark.usefixtures("one_kernel")
def test_one_graph_trains_all_lengths_and_one_passes_them() -> None:
    found, graphs = norms(BATCHES, compiled=True)
    assert graphs == [1, *[2] * 59]
    assert found == pytest.approx(norms(BATCHES, compiled=False)[0], rel=1e-5)


@pytest.mark.usefixtures("one_kernel")
def test_a_first_batch_of_two_tokens_allows_any_other() -> None:
    assert norms([[2], [20, 3, 19], [9] * 40], compiled=True)[1] == [1, 2, 2, 2, 2, 2]


@pytest.mark.usefixtures("one_kernel")
def test_one_graph_trains_trees_as_samples_apart() -> None:
    found: dict[bool, list[float]] = {}
    for share in (True, False):
        setup = Setup(backend="fsdp", model="", fields=FIELDS, options={"compile": share})
        setup = evolve(setup, train=evolve(setup.train, tokens_per_micro_batch=90, share_prefixes=share))
        with running(setup) as worker:
            batches = [make_branches(number, groups=number + 1) for number in range(4)]
            results = [train(worker, setup, number, samples=each) for number, each in enumerate(batches)]
        found[share] = [each.grad_norm for each in results]
    assert found[True] == pytest.approx(found[False], rel=1e-5)
    assert counters["stats"]["unique_graphs"] == 1


# ---- whether, and where what was compiled is kept --------------------------------------------------------------------


@pytest.mark.usefixtures("one_kernel")
@pytest.mark.parametrize(
    ("asked", "fields", "lacks", "wanted"),
    [
        ("auto", {}, "", "whole"),
        ("auto", {"head_dim": 264}, "", "not"),
        ("auto", {}, "Triton is not installed", "not"),
        (True, {"head_dim": 264}, "Triton is not installed", "in pieces"),
        (False, {}, "", "not"),
    ],
)
def test_layers_are_compiled_where_attention_is_one_kernel(
    asked: Any, fields: dict[str, int], lacks: str, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = ["not"]
    monkeypatch.setattr(build, "why_unbuildable", lambda: lacks)
    monkeypatch.setattr(
        build, "compile_forward", lambda layers, *, attention: seen.append("whole" if attention else "in pieces")
    )
    with running(Setup(backend="fsdp", model="", fields={**FIELDS, **fields}, options={"compile": asked})):
        assert seen[-1] == wanted


@pytest.mark.parametrize(
    ("asked", "device", "train", "in_pieces", "wanted"),
    [
        ("auto", "cuda", TrainConfig(precision="bfloat16"), None, True),
        ("auto", "cuda", TrainConfig(precision="bfloat16"), InPieces.HEADS, False),
        ("auto", "cuda", TrainConfig(precision="float32"), None, False),
        ("auto", "cuda", TrainConfig(precision="bfloat16", layout="whole"), None, False),
        ("auto", "cpu", TrainConfig(precision="bfloat16"), None, False),
        (True, "cuda", TrainConfig(precision="float32"), None, True),
        (False, "cuda", TrainConfig(precision="bfloat16"), None, False),
    ],
)
def test_a_forecast_knows_whether_ranks_will_compile(
    asked: Any, device: str, train: TrainConfig, in_pieces: InPieces | None, wanted: bool
) -> None:
    size = ModelSize(layers=(10,), experts=(0,), embedding=4, head=4, rest=1, hidden=2, in_pieces=in_pieces)
    found = memory(FsdpConfig(compile=asked), ClusterInfo(device=device, ranks=1, train=train), size)
    assert found.fused is wanted


@pytest.mark.parametrize(
    ("folder", "there", "wanted"),
    [
        ("{}/kept", "", "{}/kept"),
        ("{}/kept", default_cache_dir(), "{}/kept"),  # as torch sets it
        ("{}/kept", "/elsewhere", "/elsewhere"),
        ("", "", ""),
        ("{}/file/kept", "", ""),
    ],
)
def test_what_is_compiled_is_kept_in_the_asked_folder(
    folder: str, there: str, wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(compiled.CACHE, there)
    compiled.keep_compiled(folder.format(tmp_path))
    assert os.environ[compiled.CACHE] == wanted.format(tmp_path)
