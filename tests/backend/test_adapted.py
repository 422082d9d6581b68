"""What the base class makes of a role that trains adapters: its reference is the model, of which no copy is kept, and
an update adds adapters to all weights with few products."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from attrs import evolve
from torch.utils._python_dispatch import TorchDispatchMode

from corerl.config.schema import LoraConfig, WeightsConfig
from corerl.errors import ModelError
from corerl.weights.adapters import adapters_of, is_adapter
from corerl_testing.harness import Setup, running
from corerl_testing.inprocess import InProcessSender

LORA = LoraConfig(rank=3, alpha=7.0).settled({})
REFERENCE = "reference"


@pytest.fixture
def setup(model_directories: Mapping[str, Path]) -> Setup:
    base = Setup(backend="plain", model=str(model_directories["qwen3-tied"]), lora=LORA)
    # Not clipped, so that three steps change the log-probs by much more than rounding.
    return evolve(base, train=evolve(base.train, optimizer=evolve(base.train.optimizer, clip_norm=None)))


def test_no_directory_can_be_the_reference_of_adapters(setup: Setup) -> None:
    with running(setup) as worker, pytest.raises(ModelError, match="has no tensor 'base_model.model"):
        worker.backend.load_snapshot(REFERENCE, setup.model)


class Operations(TorchDispatchMode):
    """Counts torch's operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


# At once for both layers: q, k, v, o, gate, up and down. Experts: q, k, v and o for both layers; for each layer its
# experts' gate, up and down, of 8 experts each.
@pytest.mark.parametrize(("kind", "most"), [("qwen3", 7), ("qwen3-moe", 4 + 2 * 3)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_update_merges_all_adapters_with_few_products(
    setup: Setup, model_directories: Mapping[str, Path], kind: str, most: int, dtype: Literal["float32", "bfloat16"]
) -> None:
    targets = ("all-linear", *(["experts"] if kind == "qwen3-moe" else []))
    setup = evolve(setup, model=str(model_directories[kind]), weights=WeightsConfig(dtype=dtype))
    setup = evolve(setup, lora=evolve(LORA, targets=targets))
    sent: dict[str, torch.Tensor] = {}

    def receive(bucket: Mapping[str, torch.Tensor]) -> None:
        sent.update({name: weight.clone() for name, weight in bucket.items()})

    with running(setup) as worker:
        torch.manual_seed(5)
        held = {chunk.name: chunk.view for chunk in worker.backend.weights}
        for name, view in held.items():
            if is_adapter(name):
                view.copy_(torch.randn(view.shape))
        with Operations() as done:
            worker.host.update_weights(InProcessSender(receive), 1)
        merged = {name: adapters_of(name) for name in held if adapters_of(name)[0] in held}
        rounded = {name: view.to(getattr(torch, dtype)) for name, view in held.items() if not is_adapter(name)}
        assert sent.keys() == rounded.keys()
        for name, weight in rounded.items():
            if name in merged:
                a, b = (held[each] for each in merged[name])
                weight = (weight + LORA.scale * (b @ a)).to(weight.dtype)
            torch.testing.assert_close(sent[name], weight)
    products = {name: done.counts[name] for name in ("mm", "bmm", "addmm", "baddbmm") if done.counts[name]}
    assert products == {"bmm": most}, products
    assert len(merged) == (14 if kind == "qwen3" else 56)
