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
REPLAYS = "models are replayed whose routers ask torch once for their top-k; set algorithm.routing_replay to 'none'"


def routers(model: PreTrainedModel) -> list[nn.Module]:
    """The modules that choose experts, layer by layer; none where transformers does not say which these are."""
    recorded = (getattr(model, "_can_record_outputs", None) or {}).get("router_logits")
    router = getattr(recorded, "target_class", None)
    return [] if router is None else [module for module in model.modules() if isinstance(module, router)]


class Routers:
    """Those of one model, whose choice this takes over. A model without experts has none.

    Each family of models makes its own scores, and its own weights of them; what most have in common is that a router
    asks torch once for the highest `topk` of `experts` numbers. That is where it hears of other experts: their scores
    take the place of the highest, with their gradient, and whatever the family does to them follows. One that asks in
    several steps, for groups of experts first, is refused: it would have left others out by then.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        modules = routers(model)
        self._name = type(model).__name__
        self.layers = len(modules)
        self.experts = experts(model.config)
        self.topk = int(getattr(model.config, "num_experts_per_tok", 0) or 0)  # of a token
        self._listening = False
        self._told: Tensor | None = None
        self._chosen: list[Tensor] | None = None  # of each layer, where it is to be kept
        for layer, module in enumerate(modules):
            module.forward = self._asking(layer, module.forward)

    @contextmanager
    def told(self, experts: Tensor | None, *, keep: bool = False) -> Iterator[None]:
        """Until the end of the block tokens go through `experts` [T, layers, k], or through those that the routers
        choose where that is -1, or None. A backward pass that computes layers again belongs into it. With `keep` the
        experts of one pass are `chosen` afterwards."""
        self._told, self._chosen = experts, [] if keep else None
        self._listening = keep or experts is not None
        try:
            yield
        finally:
            self._told, self._chosen, self._listening = None, None, False

    @property
    def chosen(self) -> Tensor:
        """[T, layers, k] int16: where the tokens of the block's pass went."""
        if not self._chosen or len(self._chosen) != self.layers:
            raise self.silent()
        return torch.stack(self._chosen, dim=1).to(torch.int16)

    def silent(self) -> ModelError:
        """What there is to say where none of them can be heard."""
        return ModelError(f"{self._name} does not tell its experts; {REPLAYS}")

    def _asking(self, layer: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        @torch.compiler.disable  # traced, it would be compiled for every layer
        def heard(*args: Any, **kwargs: Any) -> Any:
            told = None if self._told is None else self._told[:, layer].long()
            with _Topk(told, of=self.experts) as asked:
                output = forward(*args, **kwargs)
            if told is not None and not (asked.steps == 1 and asked.replaced):
                raise ModelError(f"{self._name} does not choose its experts by one top-k; {REPLAYS}")
            if self._chosen is not None and asked.steps == 1:
                self._chosen.append(asked.chosen)
            return output

        def ask(*args: Any, **kwargs: Any) -> Any:
            # A compiled layer has its router inside until somebody listens. It must not look at a list that grows.
            return (heard if self._listening else forward)(*args, **kwargs)

        return ask


class _Topk(TorchFunctionMode):
    """Answers the question for the highest of so many numbers by those that are `told` [t, k]."""

    def __init__(self, told: Tensor | None, *, of: int) -> None:
        super().__init__()
        self._told, self._of = told, of
        self.steps = 0
        self.replaced = False
        self.chosen = torch.empty(0)  # [t, k] in the last step

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = func(*args, **(kwargs or {}))
        if func not in TOPK:
            return answer
        self.steps += 1
        scores = args[0] if args else kwargs["input"]
        if self._told is not None and scores.shape[-1] == self._of and answer.indices.shape == self._told.shape:
            index = torch.where(self._told < 0, answer.indices, self._told)
            answer = torch.return_types.topk((scores.gather(-1, index), index))
            self.replaced = True
        self.chosen = answer.indices
        return answer
