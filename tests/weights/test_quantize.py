from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from corerl.engines.lifecycle import Receiving
from corerl.plugin.transports import open_sender
from corerl.weights import quantize as module
from corerl.weights.checksums import bit_sums
from corerl.weights.manifest import Bucket, build_manifest
from corerl.weights.quantize import convert_bucket, converted_manifest, is_quantized, to_blocks
from corerl.weights.transport import Address, GuardedSender

SHAPES: list[tuple[str, tuple[int, ...]]] = [
    ("model.embed_tokens.weight", (9, 130)),
    ("model.layers.0.norm.weight", (130,)),
    ("model.layers.0.mlp.up_proj.weight", (200, 130)),
    ("model.layers.0.mlp.gate.weight", (4, 130)),
    ("model.layers.0.self_attn.o_proj.weight", (128, 256)),
    ("lm_head.weight", (9, 130)),
]
FP8 = {"model.layers.0.mlp.up_proj.weight", "model.layers.0.self_attn.o_proj.weight"}
MANIFEST = build_manifest(SHAPES, dtype="bfloat16", bucket_bytes=60_000)


def e4m3_numbers() -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """All finite ones by their bits 0 to 126: 4 bits of exponent with bias 7, 3 of mantissa."""
    bits = np.arange(127)
    exponent, mantissa = bits >> 3, bits & 7
    return np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))


def by_hand(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Bits and scales, block by block: the nearest number of the format, of two that are as near the one whose last bit
    is 0."""
    numbers = e4m3_numbers()
    rows, columns = weight.shape
    bits = np.zeros((rows, columns), np.uint8)
    scales = np.zeros((-(-rows // 128), -(-columns // 128)), np.float32)
    values = weight.float().numpy()
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = (slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1)))
            largest = np.abs(values[block]).max()
            scales[i, j] = np.float32(largest) / np.float32(448) if largest else 1
            divided = values[block] / scales[i, j]
            distances = np.abs(np.abs(divided)[..., None].astype(np.float64) - numbers)
            nearest = distances == distances.min(-1, keepdims=True)
            even = nearest & (np.arange(127) % 2 == 0)
            chosen = np.where(even.any(-1), even.argmax(-1), nearest.argmax(-1))
            bits[block] = chosen + 128 * np.signbit(divided)
    return torch.from_numpy(bits), torch.from_numpy(scales)


def weight_of(name: str, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + len(name))
    return (torch.randn(shape, generator=generator) * torch.rand(shape[-1], generator=generator)).bfloat16()


WEIGHTS = {name: weight_of(name, shape) for name, shape in SHAPES}


@pytest.mark.parametrize("shape", [(128, 128), (200, 130), (1, 1), (127, 300), (700, 130)])
def test_blocks_are_those_of_the_formula(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AT_ONCE", 2 * 256 * 130)  # two rows of blocks of the last shape
    weight = weight_of("w", shape)
    weight[0, 0] = weight[-1, -1] = 0.0
    values = torch.empty(shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-shape[0] // 128), -(-shape[1] // 128))
    to_blocks(weight, values, scales)
    bits, wanted = by_hand(weight)
    assert torch.equal(scales, wanted)
    assert torch.equal(values.view(torch.uint8), bits)


@pytest.mark.parametrize(
    ("name", "shape", "wanted"),
    [
        ("model.layers.3.self_attn.q_proj.weight", (8, 8), True),
        ("model.layers.3.mlp.experts.7.down_proj.weight", (8, 8), True),
        ("model.layers.3.mlp.gate_proj.weight", (8, 8), True),
        ("model.layers.3.mlp.gate.weight", (8, 8), False),  # a router
        ("model.layers.3.input_layernorm.weight", (8,), False),
        ("model.layers.3.self_attn.q_proj.bias", (8,), False),
        ("model.layers.3.conv1d.weight", (8, 1, 4), False),
        ("model.layers.3.shared_expert_gate.weight", (1, 8), False),  # left out below
        ("model.embed_tokens.weight", (8, 8), False),
        ("lm_head.weight", (8, 8), False),
    ],
)
def test_the_matrices_of_layers_are_quantized(name: str, shape: tuple[int, ...], wanted: bool) -> None:
    assert is_quantized(name, shape, ["shared_expert_gate"]) is wanted


def test_the_quantized_manifest_has_aligned_tensors_with_dtypes() -> None:
    sent = converted_manifest(MANIFEST)
    assert sent.dtype == "uint8" and len(sent.buckets) == len(MANIFEST.buckets) == 3
    shapes = dict(SHAPES)
    scales = {"model.layers.0.mlp.up_proj.weight": (2, 2), "model.layers.0.self_attn.o_proj.weight": (1, 2)}
    assert sent.shapes == shapes | {f"{name}_scale_inv": shape for name, shape in scales.items()}
    dtypes = {entry.name: entry.dtype for bucket in sent.buckets for entry in bucket.entries}
    assert {name for name, dtype in dtypes.items() if dtype == "float8_e4m3fn"} == FP8
    assert {name for name, dtype in dtypes.items() if dtype == "float32"} == {f"{name}_scale_inv" for name in FP8}
    assert all(dtypes[name] == "bfloat16" for name in shapes.keys() - FP8)
    assert all(entry.start % 16 == 0 for bucket in sent.buckets for entry in bucket.entries)
    large = sum(np.prod(shapes[name]) for name in FP8)
    rest = 2 * sum(int(np.prod(shape)) for name, shape in SHAPES if name not in FP8)
    assert sum(bucket.numel for bucket in sent.buckets) < large + rest + 4 * 6 + 16 * len(dtypes)
    assert converted_manifest(MANIFEST, ["o_proj"]).digest != sent.digest


def test_quantized_buckets_are_the_same_whatever_lay_there_before() -> None:
    held: dict[str, torch.Tensor] = {}
    for bucket, as_sent in zip(MANIFEST.buckets, converted_manifest(MANIFEST).buckets, strict=True):
        flat = torch.cat([WEIGHTS[entry.name].reshape(-1) for entry in bucket.entries])
        out, other = (torch.full((as_sent.numel,), before, dtype=torch.uint8) for before in (0, 255))
        for room in (out, other):
            convert_bucket(bucket, flat, as_sent, room)
        assert torch.equal(out, other)  # the gaps between tensors too, which checksums cover
        held |= as_sent.views(out)
    for name, weight in WEIGHTS.items():
        if name in FP8:
            bits, scales = by_hand(weight)
            assert torch.equal(held[name].view(torch.uint8), bits)
            assert torch.equal(held[f"{name}_scale_inv"], scales)
        else:
            assert torch.equal(held[name], weight)


def test_quantized_buckets_travel_and_are_verified_as_sent(tmp_path: Path) -> None:
    sent = converted_manifest(MANIFEST)
    address = Address(transport="disk", engines=("e",), path=str(tmp_path), timeout=20.0)
    sender, receiver = GuardedSender(open_sender(address), verify=True), Receiving(0)
    converted: dict[str, torch.Tensor] = {}
    loaded: dict[str, torch.Tensor] = {}

    def load(bucket: Bucket, flat: torch.Tensor) -> None:
        loaded.update({name: view.clone() for name, view in bucket.views(flat).items()})

    with ThreadPoolExecutor(1) as engine:
        receiving = engine.submit(receiver.transfer, sent, 1, address, load=load)
        sender.open(sent, 1)
        for bucket, as_sent in zip(MANIFEST.buckets, sent.buckets, strict=True):
            flat = torch.cat([WEIGHTS[entry.name].reshape(-1) for entry in bucket.entries])
            out = torch.empty(as_sent.numel, dtype=torch.uint8)
            convert_bucket(bucket, flat, as_sent, out)
            converted |= as_sent.views(out.clone())
            sender.send(as_sent, out)
            out.fill_(77)  # as the next bucket, which may be converted into the same memory
        assert sender.finish() == {}
        assert receiving.result() == sum(bucket.numel for bucket in sent.buckets)
    receiver.close()
    sender.close()
    assert loaded.keys() == converted.keys()
    for name, weight in converted.items():
        assert loaded[name].dtype == weight.dtype
        assert torch.equal(loaded[name].view(torch.uint8), weight.view(torch.uint8))
    assert sender.sums == bit_sums(loaded)


def test_precise_tensors_keep_their_dtype() -> None:
    name = "model.layers.0.norm.weight"
    exact = torch.linspace(1, 2, 130)
    assert not torch.equal(exact, exact.bfloat16().float())
    for fp8 in (False, True):
        sent = converted_manifest(MANIFEST, fp8=fp8, dtypes={name: "float32"})
        dtypes = {entry.name: entry.dtype for bucket in sent.buckets for entry in bucket.entries}
        assert dtypes[name] == "float32" and dtypes["lm_head.weight"] == "bfloat16"
        assert ("float8_e4m3fn" in dtypes.values()) is fp8
        (number,) = (bucket.index for bucket in MANIFEST.buckets if name in {entry.name for entry in bucket.entries})
        bucket, as_sent = MANIFEST.buckets[number], sent.buckets[number]
        flat = torch.cat([WEIGHTS[entry.name].reshape(-1) for entry in bucket.entries])
        out = torch.empty(as_sent.numel, dtype=torch.uint8)
        convert_bucket(bucket, flat, as_sent, out, {name: exact})
        views = as_sent.views(out)
        assert torch.equal(views[name], exact)
        assert torch.equal(views["model.embed_tokens.weight"], WEIGHTS["model.embed_tokens.weight"])
