"""What a rank of the server does with an update: FP8 that it loads, and adapters that it writes."""

from __future__ import annotations

import base64
import pickle
import uuid
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from corerl.config import ModelConfig, WeightsConfig
from corerl.weights import Address, build_manifest
from corerl_sglang import loader
from corerl_sglang.adapters import Packed, Room
from corerl_testing import GuardedSender, Setup, open_sender, running
from plugins.sglang.tests.test_engine import given_to_server
from tests.engines.models import MOE, hf_tensors, random_model


class InBlocks:
    """One rank's model as published FP8 checkpoints are read: its config says which matrices have no blocks, and how
    large these are. It passes over names that are not its, as SGLang's does."""

    def __init__(self, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
        assert config["quant_method"] == "fp8"
        self.rows, self.columns = config["weight_block_size"]
        kept = {f"{module}.weight" for module in config["modules_to_not_convert"]}
        self.held: dict[str, torch.Tensor] = {}
        for name, shape in shapes.items():
            blocks = len(shape) == 2 and name not in kept
            self.held[name] = torch.zeros(shape, dtype=torch.float8_e4m3fn if blocks else torch.bfloat16)
            if blocks:
                self.held[f"{name}_scale_inv"] = torch.zeros(-(-shape[0] // self.rows), -(-shape[1] // self.columns))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name in self.held:
                self.held[name].copy_(tensor)

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.held.items())

    def named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(())

    def modules(self) -> Iterator[Any]:
        return iter(())

    def weight(self, name: str) -> torch.Tensor:
        """What the model multiplies by."""
        values, scales = self.held[name].double(), self.held[f"{name}_scale_inv"].double()
        rows, columns = (torch.arange(size) for size in values.shape)
        return values * scales[(rows // self.rows)[:, None], columns // self.columns]


def most_apart(weight: torch.Tensor) -> torch.Tensor:
    """By how much FP8 may round each number: half of the distance to the next one, of 3 bits of mantissa, or of the
    least one, 2 ** -9, where the largest of a block of 128 x 128 becomes 448. A scale is itself rounded to float32."""
    apart = weight.double().abs() / 16
    for strip in apart.split(128):
        for block in strip.split(128, dim=1):
            block.clamp_(min=float(block.max()) * 16 / 448 * 2.0**-10)
    return apart * (1 + 1e-6)


def test_an_engine_holds_in_fp8_what_the_trainer_has(tmp_path: Path) -> None:
    """In several buckets; matrices end within a block, and blocks differ much in their largest numbers."""
    weights = WeightsConfig(dtype="bfloat16", quantize="fp8", unquantized=("o_proj",), bucket_bytes=200_000)
    fields = {**MOE, "hidden_size": 144, "head_dim": 40, "moe_intermediate_size": 136}
    model = random_model(fields, seed=1)
    for matrix in (each for each in model.parameters() if each.dim() > 1):
        rows, columns = (torch.logspace(-1, 1, size) for size in matrix.shape[-2:])
        matrix.data *= rows[:, None] * columns
    sent = {name: tensor.bfloat16() for name, tensor in hf_tensors(model, tmp_path / "model").items()}
    given = given_to_server(ModelConfig(path=str(tmp_path / "model")), tmp_path / "own", weights)
    rank = InBlocks(given.config["quantization_config"], {name: tuple(each.shape) for name, each in sent.items()})

    def post(path: str, body: Any = None) -> None:
        if path == "/update_weights_from_tensor":
            (payload,) = body["serialized_named_tensors"]
            loader.load(rank, pickle.loads(base64.b64decode(payload)))

    server: Any = given.engine._server
    server.post = post
    engines, token = ("engine-0",), uuid.uuid4().hex
    address = Address(transport="disk", engines=engines, path=str(tmp_path / "weights"), timeout=20.0, token=token)
    setup = Setup(backend="plain", model=str(tmp_path / "model"), weights=weights)
    with running(setup) as worker, ThreadPoolExecutor(1) as engine:
        sender = GuardedSender(open_sender(address), verify=True)
        receiving = engine.submit(given.engine.receive, worker.backend.stream(adapters=False).as_sent, 1, address)
        assert worker.host.update_weights(sender, 1).engines == {}
        assert receiving.result().error == ""
        sender.close()
    assert given.engine.weight_sums("uint8") == sender.sums
    in_blocks = {name for name in sent if f"{name}_scale_inv" in rank.held}
    assert len(in_blocks) == 2 * (3 + 3 * 4)  # of each layer q, k and v, and of 4 experts
    for name, weight in sent.items():
        if name in in_blocks:
            assert ((rank.weight(name) - weight.double()).abs() <= most_apart(weight)).all(), name
        else:
            assert torch.equal(rank.held[name], weight), name


class Pinning:
    """As CudaPinning on a GPU, which the test says there is."""

    pinned: ClassVar[list[int]] = []

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def pin_apart(self, memory: torch.Tensor) -> str:
        self.pinned.append(memory.data_ptr())
        return ""

    def unpin(self, memory: torch.Tensor) -> None:
        self.pinned.remove(memory.data_ptr())


def test_files_that_are_closed_are_unpinned_and_unmapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "CudaPinning", Pinning)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(loader, "MAPPED", {})
    packed = Packed.of(build_manifest([("base_model.model.layers.0.up_proj.lora_A.weight", (2, 8))], dtype="float32"))

    def mapped(room: Room) -> Any:
        return loader._mapped(room.path, packed.nbytes)

    first, second = Room(packed), Room(packed)
    mapped(first).fill_(1)
    assert mapped(second).fill_(2).data_ptr() != mapped(first).data_ptr() and mapped(first).tolist() == [1] * 64
    first.close()
    other = Room(packed)  # it takes the path of the first one
    assert other.path == first.path
    third = mapped(other)
    assert third.tolist() == [0] * 64
    assert Pinning.pinned == [mapped(second).data_ptr(), third.data_ptr()] and len(loader.MAPPED) == 2
