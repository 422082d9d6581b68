"""Through which experts each token goes in a transformers model: read from its routers, or told to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from corerl.errors import ModelError
from corerl.models.config import experts

TOPK = (torch.topk, Tensor.topk)
REPLAYS = "models are replayed whose routers ask torch once for their top-k: set algorithm.routing_replay to 'none'"


def routers(model: PreTrainedModel) -> list[nn.Module]:
    """The modules that choose experts, layer by layer; none where transformers does not say which these are."""
    recorded = (getattr(model, "_can_record_outputs", None) or {}).get("router_logits")
    router = getattr(recorded, "target_class", None)
    return [] if router is None else [module for module in model.modules() if isinstance(module, router)]


class Routers:
    """Those of one model, whose choice this takes over. A model without experts has none.

    Each family of models makes its own scores, and its own weights of them; what all have in common is that a router
    asks torch for the highest `topk` of `experts` numbers. That is where it hears of other experts: their scores take
    the place of the highest, with their gradient, and whatever the family does to them follows.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        modules = routers(model)
        self._name = type(model).__name__
        self.layers = len(modules)
        self.experts = experts(model.config)
        self.topk = int(getattr(model.config, "num_experts_per_tok", 0) or 0)  # of a token
        self._told: Tensor | None = None
        self._chosen: list[Tensor | None] = [None] * self.layers
        for layer, module in enumerate(modules):
            module.forward = self._asking(layer, module.forward)

    @contextmanager
    def told(self, experts: Tensor | None) -> Iterator[None]:
        """Until the end of the block tokens go through `experts` [T, layers, k], or through those that the routers
        choose where that is -1, or None. A backward pass that computes layers again belongs into it."""
        self._told = experts
        try:
            yield
        finally:
            self._told, self._chosen = None, [None] * self.layers

    @property
    def chosen(self) -> Tensor:
        """[T, layers, k] int16: where the tokens of the last pass without gradients went; within the block."""
        known = [each for each in self._chosen if each is not None]
        if len(known) < self.layers or not known:
            raise ModelError(f"{self._name} does not tell its experts; {REPLAYS}")
        return torch.stack(known, dim=1).to(torch.int16)

    def _asking(self, layer: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        # Traced, it would be compiled for every layer, and for being told and not being told.
        @torch.compiler.disable
        def ask(*args: Any, **kwargs: Any) -> Any:
            told = None if self._told is None else self._told[:, layer].long()
            with _Topk(told, of=self.experts, k=self.topk) as asked:
                output = forward(*args, **kwargs)
            steps = len(asked.chosen)
            if steps != 1 and told is not None:
                raise ModelError(f"{self._name} chooses its experts in {steps} steps, and is told them; {REPLAYS}")
            if steps == 1 and not torch.is_grad_enabled():
                self._chosen[layer] = asked.chosen[0]
            return output

        return ask


class _Topk(TorchFunctionMode):
    """Answers the question for the highest `k` of so many numbers by those that are `told` [t, k], and keeps what was
    answered."""

    def __init__(self, told: Tensor | None, *, of: int, k: int) -> None:
        super().__init__()
        self._told, self._of, self._k = told, of, k
        self.chosen: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = func(*args, **(kwargs or {}))
        if func not in TOPK:
            return answer
        scores = args[0] if args else kwargs["input"]
        if (scores.shape[-1], answer.indices.shape[-1]) != (self._of, self._k):
            return answer
        if self._told is not None:
            index = torch.where(self._told < 0, answer.indices, self._told)
            answer = torch.return_types.topk((scores.gather(-1, index), index))
        self.chosen.append(answer.indices)
        return answer
