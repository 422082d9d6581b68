"""The loss scale against torch's own."""

from __future__ import annotations

import torch

from corerl_fsdp.scale import GROWTH_STEPS, INITIAL, LossScale


def test_the_scale_moves_as_that_of_torch_does() -> None:
    scaler = torch.amp.GradScaler("cpu")
    param = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([param], lr=0.0)
    scale = LossScale()
    finite = [True, False, False, *[True] * GROWTH_STEPS, False, *[True] * (GROWTH_STEPS - 1), True]
    seen = set()
    for step in finite:
        assert scale.value == scaler.scale(torch.ones(())).item()
        param.grad = torch.full((2,), 1.0 if step else torch.inf)
        scaler.step(optimizer)
        scaler.update()
        scale.update(finite=step)
        seen.add(scale.value)
    assert scale.value == scaler.get_scale()
    assert seen == {INITIAL, INITIAL / 2, INITIAL / 4}
