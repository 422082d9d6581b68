"""What only `delta` promises; what all transports do is in core's test_transports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

from corerl.errors import WeightUpdateError
from corerl.weights import Address, Bucket, build_manifest
from corerl_delta.transport import DeltaReceiver, DeltaSender

SHAPES: list[tuple[str, tuple[int, ...]]] = [
    ("embed", (400, 20)),
    ("norm", (20,)),
    ("q", (300, 20)),
    ("head", (90, 20)),
]
MANIFEST = build_manifest(SHAPES, dtype="bfloat16", bucket_bytes=16_100)  # two buckets
WHOLE = sum(2 * bucket.numel for bucket in MANIFEST.buckets)


class Model:
    """A policy in bfloat16 with its float32 masters; a step changes the few elements that it takes over a rounding."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self._masters = [torch.randn(shape, generator=generator).requires_grad_() for _, shape in SHAPES]
        self._adam = torch.optim.Adam(self._masters, lr=3e-5)
        self._generator = generator

    def step(self) -> None:
        for master in self._masters:
            master.grad = torch.randn(master.shape, generator=self._generator)
        self._adam.step()

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        names = [name for name, _ in SHAPES]
        return {name: each.detach().bfloat16() for name, each in zip(names, self._masters, strict=True)}


def update(
    sender: DeltaSender, receivers: Sequence[DeltaReceiver], weights: Mapping[str, torch.Tensor], version: int
) -> list[dict[str, torch.Tensor]]:
    """What each receiver has loaded."""
    sender.open(MANIFEST, version)
    for bucket in MANIFEST.buckets:
        sender.send(bucket, torch.cat([weights[entry.name].reshape(-1) for entry in bucket.entries]))
    assert sender.finish() == {}
    return [
        {
            name: tensor.clone()
            for bucket, flat in receiver.buckets(MANIFEST, version)
            for name, tensor in bucket.views(flat).items()
        }
        for receiver in receivers
    ]


def equal(loaded: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor]) -> bool:
    """Bit by bit."""
    return all(torch.equal(loaded[name].view(torch.int16), weights[name].view(torch.int16)) for name in weights)


@pytest.fixture
def address(tmp_path: Path) -> Address:
    return Address(transport="delta", engines=("a", "b", "b"), path=str(tmp_path), token="abc", timeout=10.0)


@pytest.fixture
def receivers(address: Address) -> list[DeltaReceiver]:
    return [DeltaReceiver(address, index) for index in range(3)]


def files(address: Address, version: int) -> set[str]:
    found = Path(address.path, f"v{version:08d}-abc").iterdir()
    return {path.name for path in found if path.suffix in (".bin", ".safetensors")}


CHANGES = {"changes-00000.bin", "changes-00001.bin"}
BUCKETS = {"bucket-00000.safetensors", "bucket-00001.safetensors"}


def test_engines_hold_the_trainers_bits_after_small_steps(address: Address, receivers: list[DeltaReceiver]) -> None:
    sender, model = DeltaSender(address), Model()
    before = model.weights
    for version in range(1, 6):
        assert all(equal(loaded, model.weights) for loaded in update(sender, receivers, model.weights, version))
        if version == 1:
            assert sender.bytes_sent == WHOLE and files(address, version) == BUCKETS
        else:
            changed = sum(int((before[name] != model.weights[name]).sum()) for name in before)
            assert 100 < changed < 0.1 * WHOLE / 2
            assert sender.bytes_sent is not None and sender.bytes_sent < 3 * changed + 100
            assert files(address, version) == CHANGES
        before = model.weights
        model.step()


def test_bits_that_compare_as_equal_are_sent_as_they_are(address: Address, receivers: list[DeltaReceiver]) -> None:
    sender = DeltaSender(address)
    weights = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in SHAPES}
    weights["head"][0] = float("nan")
    update(sender, receivers, weights, 1)
    signed = {name: tensor.clone() for name, tensor in weights.items()}
    signed["q"][5, 5] = -0.0
    signed["head"].view(torch.int16)[0] ^= 1  # another NaN
    assert all(equal(loaded, signed) for loaded in update(sender, receivers, signed, 2))
    assert files(address, 2) == CHANGES


def test_a_new_sender_sends_everything(address: Address, receivers: list[DeltaReceiver]) -> None:
    model = Model()
    update(DeltaSender(address), receivers, model.weights, 1)
    assert all(equal(each, model.weights) for each in update(DeltaSender(address), receivers, model.weights, 2))
    assert files(address, 2) == BUCKETS


def test_dense_changes_go_whole_and_take_no_more_bytes(address: Address, receivers: list[DeltaReceiver]) -> None:
    sender = DeltaSender(address)
    for version in (1, 2):
        generator = torch.Generator().manual_seed(version)
        weights = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in SHAPES}
        assert all(equal(loaded, weights) for loaded in update(sender, receivers, weights, version))
        assert sender.bytes_sent == WHOLE and files(address, version) == BUCKETS


class Breaks(DeltaSender):
    """A disk that flips a bit of a file of changes."""

    def transmit(self, bucket: Bucket, flat: torch.Tensor, directory: Path) -> None:
        super().transmit(bucket, flat, directory)
        path = directory / f"changes-{bucket.index:05d}.bin"
        if path.exists():
            data = bytearray(path.read_bytes())
            data[-6] ^= 1
            path.write_bytes(data)


def test_a_damaged_file_is_refused(address: Address, receivers: list[DeltaReceiver]) -> None:
    sender, model = Breaks(address), Model()
    update(sender, receivers, model.weights, 1)
    model.step()
    with pytest.raises(WeightUpdateError, match="^cannot read bucket 0 in .*v00000002-abc: "):
        update(sender, receivers, model.weights, 2)


def test_the_checksum_finds_a_damaged_copy(address: Address, receivers: list[DeltaReceiver]) -> None:
    sender, model = DeltaSender(address), Model()
    update(sender, receivers, model.weights, 1)
    receivers[0]._kept[1][7] = 1.0
    model.step()
    with pytest.raises(WeightUpdateError, match="^bucket 1 of version 2 was damaged in transit: "):
        update(sender, receivers, model.weights, 2)
