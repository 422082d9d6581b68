"""What a rank's model holds, of models that fuse, cut, repeat and pad as SGLang's do, in plain torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from corerl.errors import EngineFailed
from corerl.weights import FP8, Manifest, bit_sums, build_manifest, converted_manifest
from corerl_sglang.held import Held, whole_sums
from corerl_testing import convert_bucket

HIDDEN, HEAD, HEADS, KV, FFN, EXPERTS, VOCAB = 8, 4, 4, 2, 12, 3, 10
SHAPES = {
    "model.embed_tokens.weight": (VOCAB, HIDDEN),
    "model.norm.weight": (HIDDEN,),
    "q_proj.weight": (HEADS * HEAD, HIDDEN),
    "k_proj.weight": (KV * HEAD, HIDDEN),
    "v_proj.weight": (KV * HEAD, HIDDEN),
    "k_proj.bias": (KV * HEAD,),
    "o_proj.weight": (HIDDEN, HEADS * HEAD),
    "gate.weight": (EXPERTS, HIDDEN),
    "scale": (1,),
    **{
        f"experts.{expert}.{name}.weight": (HIDDEN, FFN) if name == "down_proj" else (FFN, HIDDEN)
        for expert in range(EXPERTS)
        for name in ("gate_proj", "up_proj", "down_proj")
    },
}


class Rank:
    """One rank of `tp`: q, k and v in one parameter, k and v repeated where there are more ranks than heads of them;
    the vocabulary padded to a multiple of 8; gates and ups of all experts in one parameter, downs in another one,
    transposed."""

    def __init__(self, tp: int, rank: int, *, tied: bool, dtype: torch.dtype = torch.bfloat16) -> None:
        self.tp, self.rank, self.tied = tp, rank, tied
        self.heads, self.kv, self.ffn = HEADS * HEAD // tp, max(1, KV // tp) * HEAD, FFN // tp
        self.rows = math.ceil(VOCAB / 8 / tp) * 8
        shapes = {
            "embed": (self.rows, HIDDEN),
            "norm": (HIDDEN,),
            "qkv": (self.heads + 2 * self.kv, HIDDEN),
            "qkv_bias": (self.heads + 2 * self.kv,),
            "o": (HIDDEN, self.heads),
            "gate": (EXPERTS, HIDDEN),
            "scale": (1,),
            "w13": (EXPERTS, 2 * self.ffn, HIDDEN),
            "w2": (EXPERTS, self.ffn, HIDDEN),
        } | ({} if tied else {"head": (self.rows, HIDDEN)})
        self.parameters = {
            # Norms in a precision of their own.
            name: torch.nn.Parameter(torch.randn(shape).to(torch.float32 if name == "norm" else dtype), False)
            for name, shape in shapes.items()
        }

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.parameters.items())

    def named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(())

    def modules(self) -> Iterator[Any]:
        return iter(())

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        given = self.parameters
        for name, tensor in weights:
            words = name.split(".")
            if name == "model.embed_tokens.weight":
                self.vocabulary(given["embed"], tensor)
            elif name == "lm_head.weight":
                self.vocabulary(given["head"], tensor)
            elif name == "model.norm.weight":
                given["norm"].data.copy_(tensor)
            elif words[0] in ("q_proj", "k_proj", "v_proj"):
                self.heads_of(words[0], given["qkv" if words[1] == "weight" else "qkv_bias"], tensor)
            elif words[0] == "o_proj":
                given["o"].data.copy_(tensor.narrow(1, self.rank * self.heads, self.heads))
            elif name == "gate.weight":
                given["gate"].data.copy_(tensor)
            elif name == "scale":
                given["scale"].data.fill_(tensor.item())
            else:
                self.expert(int(words[1]), words[2], tensor)

    def vocabulary(self, parameter: torch.Tensor, tensor: torch.Tensor) -> None:
        start = min(self.rank * self.rows, VOCAB)
        part = tensor.narrow(0, start, min(self.rows, VOCAB - start))
        parameter[: part.shape[0]].data.copy_(part)
        parameter[part.shape[0] :].data.fill_(0)

    def heads_of(self, which: str, parameter: torch.Tensor, tensor: torch.Tensor) -> None:
        size = self.heads if which == "q_proj" else self.kv
        at = {"q_proj": 0, "k_proj": self.heads, "v_proj": self.heads + self.kv}[which]
        of = self.rank if which == "q_proj" else self.rank * KV // max(self.tp, KV)
        parameter.data.narrow(0, at, size).copy_(tensor.narrow(0, of * size, size))

    def expert(self, expert: int, which: str, tensor: torch.Tensor) -> None:
        if which == "down_proj":
            part = tensor.narrow(1, self.rank * self.ffn, self.ffn)
            self.parameters["w2"].data[expert].copy_(part.T.contiguous().to(torch.bfloat16))
        else:
            part = tensor.narrow(0, self.rank * self.ffn, self.ffn)
            at = 0 if which == "gate_proj" else self.ffn
            self.parameters["w13"].data[expert].narrow(0, at, self.ffn).copy_(part)


def stream(tied: bool, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = SHAPES if tied else {**SHAPES, "lm_head.weight": (VOCAB, HIDDEN)}
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


def manifest_of(tensors: Mapping[str, torch.Tensor]) -> Manifest:
    """All tensors have the dtype of the first."""
    shapes = [(name, tuple(tensor.shape)) for name, tensor in tensors.items()]
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    return build_manifest(shapes, dtype=dtype, bucket_bytes=600)


def update(ranks: list[Held], tensors: Mapping[str, torch.Tensor]) -> None:
    """As SGLang calls the loader, from a buffer of which the bucket is a part."""
    for bucket in manifest_of(tensors).buckets:
        flat = torch.cat([tensors[entry.name].flatten() for entry in bucket.entries])
        room = torch.cat([flat.new_zeros(5), flat])
        with torch.inference_mode():
            for held in ranks:
                held.load(bucket, room[5:])


def sums(ranks: list[Held], tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return whole_sums("engine-0", shapes, [held.sums() for held in ranks])


@pytest.mark.parametrize(("tp", "tied"), [(1, True), (1, False), (2, False), (4, True)])
def test_sums_of_rearranged_tensors_equal_the_streams(tp: int, tied: bool) -> None:
    ranks = [Held(Rank(tp, rank, tied=tied)) for rank in range(tp)]
    for seed in (1, 2):  # seen loading once, read again after another update
        tensors = stream(tied, seed)
        update(ranks, tensors)
        wanted = bit_sums(tensors)
        del wanted["scale"]  # which is not copied
        assert sums(ranks, tensors) == wanted


def test_ranks_with_differing_copies_are_an_error() -> None:
    ranks = [Held(Rank(4, rank, tied=True)) for rank in range(4)]  # two have the same head of keys
    tensors = stream(True, 4)
    update(ranks, tensors)
    model = ranks[1].model
    assert isinstance(model, Rank)
    model.parameters["qkv"].data.view(torch.int16)[model.heads, 0] ^= 1
    with pytest.raises(EngineFailed, match=r"^engine-0 has differing copies of 'k_proj.weight': .* on rank 1, but to "):
        sums(ranks, tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_tensors_that_loading_rounds_are_not_reported(dtype: torch.dtype) -> None:
    rank = Held(Rank(1, 0, tied=True))
    tensors = {name: tensor.to(dtype) for name, tensor in stream(True, 6).items()}
    tensors["o_proj.weight"] += 1 / 3
    update([rank], tensors)
    assert sums([rank], tensors) == bit_sums({"model.norm.weight": tensors["model.norm.weight"]})  # held in float32


def test_moved_or_partial_tensors_are_not_reported() -> None:
    class Clones(Rank):
        def heads_of(self, which: str, parameter: torch.Tensor, tensor: torch.Tensor) -> None:
            super().heads_of(which, parameter, tensor.clone())  # of which a part goes on, nobody knows which

    cloned = [Held(Clones(2, rank, tied=True)) for rank in range(2)]
    update(cloned, stream(True, 5))
    assert not {"q_proj.weight", "k_proj.bias"} & sums(cloned, stream(True, 5)).keys()
    first, second = (Held(Rank(2, rank, tied=True)) for rank in range(2))
    tensors = stream(True, 5)
    update([first, second], tensors)
    assert "q_proj.weight" not in sums([first], tensors)  # the other half is in the other rank
    model = second.model
    assert isinstance(model, Rank)
    model.parameters["qkv"].data = model.parameters["qkv"].data.clone()
    left = sums([first, second], tensors)
    assert left.keys() == tensors.keys() - {"scale", "q_proj.weight", "k_proj.weight", "v_proj.weight"}


MLP = "model.layers.0.mlp"
IN_BLOCKS = build_manifest(
    [(f"{MLP}.{part}_proj.weight", (256, 256)) for part in ("gate", "up", "down")] + [("model.norm.weight", (256,))],
    dtype="bfloat16",
    bucket_bytes=2**20,
)


class OldNames(Rank):
    """Its tower has the names of the files that Gemma 3 was published with, and passes over others, as SGLang does."""

    def __init__(self) -> None:
        shapes = {"vision_tower.vision_model.post_layernorm.weight": 4, "language_model.model.norm.weight": 3}
        self.parameters = {
            name: torch.nn.Parameter(torch.zeros(size).bfloat16(), False) for name, size in shapes.items()
        }

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name in self.parameters:
                self.parameters[name].data.copy_(tensor)


def test_a_tower_of_older_names_is_loaded_and_reported() -> None:
    model = OldNames()
    rank = Held(model)
    names = {"vision_tower.post_layernorm.weight": 4, "language_model.model.norm.weight": 3}
    for _ in range(2):  # the first records where tensors go
        sent = {name: torch.randn(size).bfloat16() for name, size in names.items()}
        update([rank], sent)
        for name, held in zip(names, model.parameters.values(), strict=True):
            assert torch.equal(held, sent[name])
        assert sums([rank], sent) == bit_sums(sent)


class Blocks(Rank):
    """One rank of two whose layers hold FP8 and scales: gate and up in one parameter, down cut by columns."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        scales = {"gate_up_scale_inv": torch.zeros(2, 2), "down_scale_inv": torch.zeros(2, 1)}
        values = {"gate_up": torch.zeros(256, 256).to(FP8), "down": torch.zeros(256, 128).to(FP8)}
        tensors = {**values, **scales, "norm": torch.zeros(256)}
        self.parameters = {name: torch.nn.Parameter(tensor, False) for name, tensor in tensors.items()}
        self.attention: list[Any] = []

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == "model.norm.weight":
                self.parameters["norm"].data.copy_(tensor)
                continue
            part = name.removeprefix(f"{MLP}.").partition("_")[0]
            scale = "_scale_inv" * name.endswith("_scale_inv")
            axis, held = (1, "down") if part == "down" else (0, "gate_up")
            if f"{held}{scale}" not in self.parameters:
                continue  # as SGLang passes over what it does not know
            size = tensor.shape[axis] // 2
            at = size if part == "up" else 0
            into = self.parameters[f"{held}{scale}"].data.narrow(axis, at, size)
            into.copy_(tensor.narrow(axis, self.rank * size, size))

    def modules(self) -> Iterator[Any]:
        return iter([self, *self.attention])


def send_in_blocks(ranks: list[Held], seed: int) -> dict[str, torch.Tensor]:
    """The tensors of one update, which is loaded from a buffer of which the bucket is a part."""
    tensors = {
        name: torch.randn(shape, generator=torch.Generator().manual_seed(seed + number)).bfloat16()
        for number, (name, shape) in enumerate(IN_BLOCKS.shapes.items())
    }
    (plain,), (bucket,) = IN_BLOCKS.buckets, converted_manifest(IN_BLOCKS).buckets
    room = torch.zeros(32 + bucket.numel, dtype=torch.uint8)
    convert_bucket(plain, torch.cat([tensor.flatten() for tensor in tensors.values()]), bucket, room[32:])
    with torch.inference_mode():
        for held in ranks:
            held.load(bucket, room[32:])
    return bucket.views(room[32:])


class Gate(torch.nn.Module):
    """A router as SGLang writes GLM-4.5's: its first pass makes a float32 copy of its weight, which all later ones,
    and graphs of them, multiply by."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(EXPERTS, HIDDEN, dtype=torch.bfloat16), requires_grad=False)
        self.register_buffer("_weight_fp32", None, persistent=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in weights:
            self.weight.data.copy_(tensor)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._weight_fp32 is None:
            self._weight_fp32 = self.weight.data.float()
        return torch.nn.functional.linear(hidden.float(), self._weight_fp32)


def test_routers_use_new_weights_after_each_update() -> None:
    gate, hidden = Gate(), torch.randn(4, HIDDEN)
    held, addresses = Held(gate), set()
    for seed in (1, 2, 3):
        weight = torch.randn(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(seed)).bfloat16()
        update([held], {"gate.weight": weight})
        with torch.inference_mode():
            assert torch.equal(gate(hidden), hidden @ weight.float().T)
        addresses.add(gate._weight_fp32.data_ptr())
    assert len(addresses) == 1  # where a graph reads it


def test_sums_of_blocks_and_scales_equal_the_streams() -> None:
    ranks = [Held(Blocks(rank)) for rank in range(2)]
    for seed in (1, 2):
        sent = send_in_blocks(ranks, seed)
        assert len(sent) == 7
        assert sums(ranks, sent) == bit_sums(sent)
    for parameter, wrong in {"gate_up_scale_inv": "up_proj.weight_scale_inv", "down": "down_proj.weight"}.items():
        model = ranks[1].model
        assert isinstance(model, Blocks)
        bits = model.parameters[parameter].data.view(torch.uint8)
        bits[-1, -1] ^= 1
        loaded, wanted = sums(ranks, sent), bit_sums(sent)
        assert {name for name in loaded if loaded[name] != wanted[name]} == {f"{MLP}.{wrong}"}
        bits[-1, -1] ^= 1


@pytest.mark.parametrize(
    ("parameter", "dtype", "wrong"),
    [
        ("down", torch.bfloat16, "'model.layers.0.mlp.down_proj.weight' is sent as float8_e4m3fn, but SGLang"),
        ("gate_up_scale_inv", torch.int32, "gate_proj.weight_scale_inv' is sent as float32, but SGLang stores it"),
        ("norm", FP8, r"'model.norm.weight' is sent as bfloat16, but SGLang stores it as float8_e4m3fn"),
    ],
)
def test_a_parameter_of_another_form_is_refused(parameter: str, dtype: torch.dtype, wrong: str) -> None:
    model = Blocks(0)
    model.parameters[parameter] = torch.nn.Parameter(model.parameters[parameter].to(dtype), False)
    with pytest.raises(EngineFailed, match=wrong):
        send_in_blocks([Held(model)], 1)


def test_a_model_that_passes_over_scales_is_refused() -> None:
    model = Blocks(0)
    del model.parameters["down_scale_inv"]
    with pytest.raises(EngineFailed, match=r"down_proj.weight' is loaded, but its scales are not: .*quantize='none'$"):
        send_in_blocks([Held(model)], 1)


def test_sleep_leaves_no_scales_of_keys_and_values() -> None:
    model = Blocks(0)
    scales = {name: torch.nn.Parameter(torch.tensor(float("nan")), False) for name in ("k_scale", "v_scale")}
    model.attention = [SimpleNamespace(k_scale=None), SimpleNamespace(**scales, k_scale_float=1.0, v_scale_float=1.0)]
    send_in_blocks([Held(model)], 1)
    assert [float(scale) for scale in scales.values()] == [1.0, 1.0]
    model.attention[1].v_scale_float = 2e-4
    with pytest.raises(EngineFailed, match=r"multiplies keys and values by 0.0002, wanted 1.0: .*quantize='none'$"):
        send_in_blocks([Held(model)], 2)
