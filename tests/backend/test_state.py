"""What identifies the weights beside adapters depends on their values and names, and on nothing else."""

from __future__ import annotations

import pytest
import torch

from corerl.backend.state import digest_of_frozen, of_sums, require_same, rounded_sum
from corerl.errors import CheckpointError
from corerl.weights.chunks import Chunk
from corerl_testing.pool import RankPool
from tests.backend import ranks

WHOLE = ranks.tensors()


def whole(**changed: torch.Tensor) -> list[Chunk]:
    tensors = {**WHOLE, **changed}
    return [Chunk(name, tuple(t.shape), (0,) * t.dim(), tuple(t.shape), t) for name, t in tensors.items()]


DIGEST = digest_of_frozen(whole(), None)


def test_the_digest_is_the_same_however_the_weights_are_split(rank_pool: RankPool) -> None:
    halves = []
    for name, tensor in WHOLE.items():
        for start, stop in ((0, 3), (3, len(tensor))):
            part = tensor[start:stop]
            halves.append(
                Chunk(name, tuple(tensor.shape), (start,) + (0,) * (tensor.dim() - 1), tuple(part.shape), part)
            )
    assert digest_of_frozen(halves, None) == digest_of_frozen(halves[::-1], None) == DIGEST
    assert rank_pool.run(ranks.digest_of_halves) == [DIGEST, DIGEST]  # one of whose tensors is on both
    assert of_sums({name: rounded_sum(tensor) for name, tensor in WHOLE.items()}) == DIGEST


def test_the_digest_is_the_same_in_float32_and_in_bfloat16() -> None:
    assert digest_of_frozen(whole(**{name: tensor.bfloat16() for name, tensor in WHOLE.items()}), None) == DIGEST


def test_a_replica_is_not_counted() -> None:
    extra = WHOLE["up"]
    replica = Chunk("up", tuple(extra.shape), (0, 0), tuple(extra.shape), extra, replica=True)
    assert digest_of_frozen([*whole(), replica], None) == DIGEST


def saved(digest: str | None = DIGEST, scale: float = 2.0) -> dict[str, object]:
    return {"frozen_weights": digest, "lora_scale": scale}


@pytest.mark.parametrize(("before", "shown"), [("00ff", "00ff"), (None, "none")])
def test_adapters_of_other_weights_are_refused(before: str | None, shown: str) -> None:
    require_same(saved(), DIGEST, 2.0, where="step-2/actor")
    with pytest.raises(CheckpointError) as caught:
        require_same(saved(before), DIGEST, 2.0, where="step-2/actor")
    assert caught.value.message == (
        f"step-2/actor: its adapters belong to other weights (digest {shown}) than this model's ({DIGEST}); "
        "resume with the model.path, or the run.seed of random weights, that they were trained with, and in float16 if "
        "that was their train.precision"
    )


def test_adapters_that_would_be_scaled_otherwise_are_refused() -> None:
    with pytest.raises(
        CheckpointError, match=r"^here: its adapters were trained with a scale of 2.0 .*this run's is 4.0;"
    ):
        require_same(saved(), DIGEST, 4.0, where="here")
