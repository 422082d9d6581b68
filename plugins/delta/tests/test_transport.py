"""What only `delta` promises; what all transports do is in core's test_transports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from attrs import field, frozen

from corerl.errors import WeightUpdateError
from corerl.weights import Address, Bucket, Manifest, build_manifest
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


@frozen(kw_only=True)
class Outcome:
    """Of one update."""

    engines: Mapping[str, str]
    loaded: Sequence[Mapping[str, torch.Tensor]] = field(factory=list)  # by receiver
    errors: Sequence[str] = field(factory=list)


def send(sender: DeltaSender, weights: Mapping[str, torch.Tensor], version: int) -> Mapping[str, str]:
    sender.begin(MANIFEST, version)
    for bucket in MANIFEST.buckets:
        sender.send(bucket, torch.cat([weights[entry.name].reshape(-1) for entry in bucket.entries]))
    return sender.commit()


def receive(
    receiver: DeltaReceiver, version: int, fails: bool = False, manifest: Manifest = MANIFEST
) -> tuple[dict[str, torch.Tensor], str]:
    loaded: dict[str, torch.Tensor] = {}
    error = ""
    try:
        for bucket, flat in receiver.buckets(manifest, version):
            loaded |= {name: view.clone() for name, view in bucket.views(flat).items()}
            if fails:
                raise WeightUpdateError("this engine cannot load it")
    except WeightUpdateError as failure:
        error = failure.message
    receiver.acknowledge(version, error)
    return loaded, error


def update(
    sender: DeltaSender,
    receivers: Sequence[DeltaReceiver],
    weights: Mapping[str, torch.Tensor],
    version: int,
    failing: Sequence[DeltaReceiver] = (),
) -> Outcome:
    with ThreadPoolExecutor(1 + len(receivers)) as both:
        sending = both.submit(send, sender, weights, version)
        receiving = [both.submit(receive, each, version, each in failing) for each in receivers]
        results = [each.result() for each in receiving]
        return Outcome(
            engines=sending.result(), loaded=[loaded for loaded, _ in results], errors=[error for _, error in results]
        )


def equal(loaded: Mapping[str, torch.Tensor], sent: Mapping[str, torch.Tensor]) -> bool:
    bits = {name: tensor.view(torch.int16) for name, tensor in loaded.items()}
    return bits.keys() == sent.keys() and all(torch.equal(bits[name], sent[name].view(torch.int16)) for name in sent)


@pytest.fixture
def address(tmp_path: Path) -> Address:
    """Two engines, the second with two receivers, as one over two devices has."""
    return Address(transport="delta", engines=("a", "b", "b"), path=str(tmp_path), timeout=20.0)


@pytest.fixture
def receivers(address: Address) -> list[DeltaReceiver]:
    return [DeltaReceiver(address, index) for index in range(3)]


def files(address: Address, version: int) -> set[str]:
    found = Path(address.path, f"v{version:08d}").iterdir()
    return {path.name for path in found if path.suffix in (".bin", ".safetensors")}


CHANGES = {"changes-00000.bin", "changes-00001.bin"}
BUCKETS = {"bucket-00000.safetensors", "bucket-00001.safetensors"}


def test_engines_hold_the_trainers_bits_after_each_of_several_small_steps(
    address: Address, receivers: list[DeltaReceiver]
) -> None:
    sender, model = DeltaSender(address), Model()
    before = model.weights
    for version in range(1, 6):
        outcome = update(sender, receivers, model.weights, version)
        assert outcome.engines == {"a": "", "b": ""}
        assert all(equal(loaded, model.weights) for loaded in outcome.loaded)
        if version == 1:
            assert sender.sent == WHOLE and files(address, version) == BUCKETS
        else:
            changed = sum(int((before[name] != model.weights[name]).sum()) for name in before)
            assert 100 < changed < 0.1 * WHOLE / 2
            assert sender.sent is not None and sender.sent < 3 * changed + 100 and files(address, version) == CHANGES
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
    outcome = update(sender, receivers, signed, 2)
    assert files(address, 2) == CHANGES and all(equal(loaded, signed) for loaded in outcome.loaded)


def test_a_receiver_that_failed_or_is_new_gets_all_of_it_and_the_others_the_changes(
    address: Address, receivers: list[DeltaReceiver]
) -> None:
    sender, model = DeltaSender(address), Model()
    update(sender, receivers, model.weights, 1)
    model.step()
    outcome = update(sender, receivers, model.weights, 2, failing=receivers[2:])
    assert outcome.engines == {"a": "", "b": "this engine cannot load it"}

    model.step()
    outcome = update(sender, receivers, model.weights, 3)  # the whole for the one that failed
    assert outcome.engines == {"a": "", "b": ""} and all(equal(loaded, model.weights) for loaded in outcome.loaded)
    assert files(address, 3) == CHANGES | BUCKETS and sender.sent is not None and sender.sent > WHOLE

    model.step()
    receivers[0] = DeltaReceiver(address, 0)  # a process of its own, started anew
    outcome = update(sender, receivers, model.weights, 4)
    assert outcome.engines == {"a": "", "b": ""} and all(equal(loaded, model.weights) for loaded in outcome.loaded)
    assert files(address, 4) == CHANGES | BUCKETS

    model.step()
    assert update(sender, receivers, model.weights, 5).engines == {"a": "", "b": ""}
    assert files(address, 5) == CHANGES


def test_a_receiver_that_missed_a_version_gets_all_of_the_next_one(tmp_path: Path) -> None:
    address = Address(transport="delta", engines=("a", "b"), path=str(tmp_path), timeout=0.5)
    sender, model, receivers = DeltaSender(address), Model(), [DeltaReceiver(address, index) for index in range(2)]
    update(sender, receivers, model.weights, 1)
    model.step()
    assert "no answer" in update(sender, receivers[:1], model.weights, 2).engines["b"]
    model.step()
    outcome = update(sender, receivers, model.weights, 3)
    assert outcome.engines == {"a": "", "b": ""} and all(equal(loaded, model.weights) for loaded in outcome.loaded)
    assert files(address, 3) == CHANGES | BUCKETS


def test_a_sender_that_begins_anew_sends_all_of_it(address: Address, receivers: list[DeltaReceiver]) -> None:
    model = Model()
    update(DeltaSender(address), receivers, model.weights, 1)
    outcome = update(DeltaSender(address), receivers, model.weights, 2)
    assert files(address, 2) == BUCKETS and all(equal(loaded, model.weights) for loaded in outcome.loaded)


def test_dense_changes_go_whole_and_take_no_more_bytes(address: Address, receivers: list[DeltaReceiver]) -> None:
    sender = DeltaSender(address)
    for version in (1, 2):
        generator = torch.Generator().manual_seed(version)
        weights = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in SHAPES}
        outcome = update(sender, receivers, weights, version)
        assert all(equal(loaded, weights) for loaded in outcome.loaded)
        assert sender.sent == WHOLE and files(address, version) == BUCKETS


class Breaks(DeltaSender):
    """A disk that flips a bit of the file of changes that is written last."""

    breaks = False

    def transmit(self, bucket: Bucket, flat: torch.Tensor) -> None:
        super().transmit(bucket, flat)
        if self.breaks:
            path = self.partial / f"changes-{bucket.index:05d}.bin"
            data = bytearray(path.read_bytes())
            data[-6] ^= 1
            path.write_bytes(data)


def test_a_damaged_file_is_refused_and_the_next_update_goes_whole(
    address: Address, receivers: list[DeltaReceiver]
) -> None:
    sender, model = Breaks(address), Model()
    update(sender, receivers, model.weights, 1)
    model.step()
    sender.breaks = True
    outcome = update(sender, receivers, model.weights, 2)
    sender.breaks = False
    assert all("cannot read" in error and "changes-00000.bin" in error for error in outcome.errors)
    assert outcome.engines == {"a": outcome.errors[0], "b": outcome.errors[1]}
    model.step()
    outcome = update(sender, receivers, model.weights, 3)
    assert outcome.engines == {"a": "", "b": ""} and all(equal(loaded, model.weights) for loaded in outcome.loaded)


def test_a_copy_that_somebody_has_written_to_is_found_by_the_checksum(
    address: Address, receivers: list[DeltaReceiver]
) -> None:
    sender, model = DeltaSender(address), Model()
    update(sender, receivers, model.weights, 1)
    receivers[0]._kept[1][7] = 1.0
    model.step()
    outcome = update(sender, receivers, model.weights, 2)
    assert "bucket 1 of version 2 was damaged in transit" in outcome.engines["a"] and outcome.engines["b"] == ""
    model.step()
    assert update(sender, receivers, model.weights, 3).engines == {"a": "", "b": ""}
    assert files(address, 3) == CHANGES | BUCKETS


def test_a_sender_that_could_not_write_sends_all_of_the_next_one(
    address: Address, receivers: list[DeltaReceiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, model = DeltaSender(address), Model()
    update(sender, receivers, model.weights, 1)
    model.step()

    def full(path: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        outcome = update(sender, receivers, model.weights, 2)
    assert all("No space left" in error for error in outcome.engines.values())
    model.step()
    outcome = update(sender, receivers, model.weights, 3)
    assert files(address, 3) == BUCKETS and all(equal(loaded, model.weights) for loaded in outcome.loaded)
