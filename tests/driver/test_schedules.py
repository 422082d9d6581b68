import math

import pytest

from corerl.driver.roles import learning_rate


def rates(decay: str, *, warmup_steps: int, total_steps: int, final_ratio: float = 0.1) -> list[float]:
    return [
        learning_rate(
            warmup_steps=warmup_steps,
            decay=decay,
            final_ratio=final_ratio,
            peak=2.0,
            step=step,
            total_steps=total_steps,
        )
        for step in range(total_steps)
    ]


def test_linear_decay_falls_evenly_to_the_final_share() -> None:
    assert rates("linear", warmup_steps=2, total_steps=6, final_ratio=0.2) == pytest.approx(
        [1.0, 2.0, 1.6, 1.2, 0.8, 0.4]
    )
    assert rates("linear", warmup_steps=0, total_steps=3, final_ratio=0.5) == pytest.approx([2.0, 1.5, 1.0])


def test_cosine_decay_is_half_way_in_the_middle() -> None:
    got = rates("cosine", warmup_steps=0, total_steps=5, final_ratio=0.0)
    root = math.sqrt(0.5)
    assert got == pytest.approx([2.0, 1 + root, 1.0, 1 - root, 0.0])
