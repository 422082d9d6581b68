"""The loss scale for float16, whose smallest positive number is 2**-24: smaller gradients would become zero."""

from __future__ import annotations

from attrs import define

# The defaults of torch.amp.GradScaler.
INITIAL = 2.0**16
GROWTH, BACKOFF = 2.0, 0.5
GROWTH_STEPS = 2000


@define
class LossScale:
    """A dynamic loss scale: doubled after GROWTH_STEPS finite steps in a row, halved after one that is not finite
    (Micikevicius et al. 2018, "Mixed Precision Training"). A power of two, so that scaling is exact."""

    value: float = INITIAL
    finite_steps: int = 0  # since the last change

    def update(self, *, finite: bool) -> None:
        """Call after each step. `finite` is equal on all ranks, so the scale is too."""
        self.finite_steps = self.finite_steps + 1 if finite else 0
        if not finite:
            self.value *= BACKOFF
        elif self.finite_steps == GROWTH_STEPS:
            self.value *= GROWTH
            self.finite_steps = 0
