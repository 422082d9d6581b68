"""No gradient is applied twice: where DeepSpeed keeps a parameter's last one, each backward pass must bring another."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from deepspeed.utils.z3_leaf_module import z3_leaf_parameter
from torch import Tensor, nn

from corerl.errors import Unsupported
from corerl_deepspeed.config import DeepSpeedConfig


class GradientWatch:
    """Sees which parameters get a gradient in a backward pass.

    Under stage 3, and for an optimizer on the host, DeepSpeed writes a gradient, when it comes, into memory that is
    never cleared. Without one in a step's first micro-batch, in its last one, or in all of them, the step before would
    be applied again, or a part of this one lost. A parameter that has had none yet is no danger: its memory holds
    zeros.
    """

    def __init__(self, params: Mapping[str, nn.Parameter], options: DeepSpeedConfig) -> None:
        self._names: list[str] = []  # in the model's order
        self._before: set[str] = set()  # had one in an earlier pass
        self._now: set[str] = set()
        if options.stage < 3 and options.offload == "none":
            return  # what is missing counts as zeros there
        for name, param in params.items():
            # DeepSpeed gives those of a leaf module zeros itself.
            if param.requires_grad and not z3_leaf_parameter(param):
                self._names.append(name)
                param.register_post_accumulate_grad_hook(partial(self._note, name))

    def check(self) -> None:
        """After each backward pass. Raises Unsupported for a parameter without a gradient that had one before."""
        missing = self._before - self._now
        if missing:
            name = next(name for name in self._names if name in missing)
            raise Unsupported(
                f"{name} got no gradient in this micro-batch, and had one before, which DeepSpeed would apply again "
                "under stage=3 or with offload; take a model that uses each parameter in every pass (layerdrop=0), or "
                "stage=2 without offload"
            )
        self._before |= self._now
        self._now.clear()

    def _note(self, name: str, _: Tensor) -> None:
        self._now.add(name)
