"""Ensure that no gradient is applied twice: DeepSpeed may keep a parameter's old one if a backward pass brings none."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from deepspeed.utils.z3_leaf_module import z3_leaf_parameter
from torch import Tensor, nn

from corerl.errors import Unsupported
from corerl_deepspeed.config import DeepSpeedConfig


class GradientWatch:
    """Records which parameters get a gradient in each backward pass.

    In stage 3, and for an optimizer on the host, DeepSpeed writes gradients into memory that is never cleared. If one
    is missing in a step's first or last micro-batch, or in all of them, the previous step's gradient would be applied
    again, or part of this step's lost. A parameter that never had one is safe: its memory holds zeros. Which calls the
    step's micro-batches come in is all the same: every pass is held to what any pass before it had.
    """

    def __init__(self, params: Mapping[str, nn.Parameter], options: DeepSpeedConfig) -> None:
        self._names: list[str] = []  # in the model's order
        self._before: set[str] = set()  # had a gradient in an earlier pass
        self._now: set[str] = set()
        if options.stage < 3 and options.offload == "none":
            return  # a missing gradient counts as zeros there
        for name, param in params.items():
            # DeepSpeed itself gives zeros to parameters of a leaf module.
            if param.requires_grad and not z3_leaf_parameter(param):
                self._names.append(name)
                param.register_post_accumulate_grad_hook(partial(self._note, name))

    def check(self) -> None:
        """Call after each backward pass. Raises Unsupported if a parameter got no gradient but had one before."""
        missing = self._before - self._now
        if missing:
            name = next(name for name in self._names if name in missing)
            raise Unsupported(
                f"{name} got no gradient in this micro-batch, but had one before, which DeepSpeed would apply again "
                "with stage=3 or offload; use a model that uses every parameter in each pass (layerdrop=0), or set "
                "stage=2 without offload"
            )
        self._before |= self._now
        self._now.clear()

    def _note(self, name: str, _: Tensor) -> None:
        self._now.add(name)
