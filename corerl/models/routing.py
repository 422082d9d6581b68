"""Read or override the experts that the routers of a transformers model choose for each token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from attrs import define, field
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from corerl.errors import ModelError
from corerl.kinds import experts_of
from corerl.models.config import topk_of

TOPK = (torch.topk, Tensor.topk)
PROBABILITIES = ("gemma4_text",)  # types of text decoders whose routers record these as their logits
REPLAYS = "replay requires routers that call torch.topk exactly once; set algorithm.routing_replay to 'none'"


def routers(model: PreTrainedModel) -> list[nn.Module]:
    """The modules that choose experts, layer by layer; empty if transformers does not say which they are."""
    classes = _recorded(model)
    return [module for module in model.modules() if isinstance(module, classes)] if len(classes) == 1 else []


def choosers(model: PreTrainedModel) -> list[nn.Module]:
    """`routers`, and those of a model whose layers have several, of which attention may be one: transformers then names
    modules around them too."""
    classes = _recorded(model)
    found = [module for module in model.modules() if isinstance(module, classes)]
    return [each for each in found if not any(isinstance(inner, classes) for inner in list(each.modules())[1:])]


def _recorders(model: PreTrainedModel) -> list[Any]:
    """What transformers records as the logits of routers: each with the class of a module, and the index of its
    output."""
    # In a model that reads pictures, only the text decoder may say so.
    known = [(getattr(each, "_can_record_outputs", None) or {}) for each in (model, model.get_decoder())]
    recorded = next((each["router_logits"] for each in known if "router_logits" in each), None)
    several = recorded if isinstance(recorded, list) else [recorded]
    return [each for each in several if getattr(each, "target_class", None) is not None]


def _recorded(model: PreTrainedModel) -> tuple[type[nn.Module], ...]:
    return tuple(each.target_class for each in _recorders(model))


@define(eq=False)
class Routed:
    """What routers make of the tokens of a pass, layer by layer."""

    logits: list[Tensor] = field(factory=list)  # each [T, experts], with gradient
    chosen: list[Tensor] = field(factory=list)  # each [T, k]; none of routers whose choice is no top-k over all experts


class Routers:
    """Controls the routers of one model; `layers` is 0 for a model without known routers.

    Model families compute scores and turn them into weights in different ways, but most routers call torch's top-k
    once, for the `topk` highest of `experts` scores. That call is intercepted: it returns the given experts with their
    own scores, gradient included, and the rest of the router runs unchanged. A router that selects in several steps,
    such as groups of experts first, is refused: it would have excluded some experts before.
    """

    can_record = True  # whether training may record what routers do; False where they are part of compiled layers

    def __init__(self, model: PreTrainedModel) -> None:
        modules = routers(model)
        self._name = type(model).__name__
        self.layers = len(modules)
        self.experts = experts_of(model.config.to_dict())
        self.topk = topk_of(model.config)
        self._of_probabilities = model.config.get_text_config().model_type in PROBABILITIES
        self._logits_at = _recorders(model)[0].index if modules else 0
        self._active = False
        self._routed: Routed | None = None  # of the block's first pass, if it is to be recorded
        self._replayed: Tensor | None = None
        self._chosen: list[Tensor] | None = None  # the experts of each layer, if they are to be kept
        self._cells: tuple[Tensor | None, Tensor | None] = (None, None)
        for layer, module in enumerate(modules):
            module.forward = self._controlled(layer, module.forward)

    @contextmanager
    def replaying(self, experts: Tensor | None, *, keep: bool = False, record: bool = False) -> Iterator[None]:
        """Within the block, send tokens through `experts` [T, layers, k]; where that is -1, or None as a whole, the
        routers choose. A backward pass that recomputes layers must be inside the block. With `keep`, `chosen` has the
        experts of the block's one pass; with `record`, `take` returns what routers made of one."""
        self._replayed, self._chosen, self._routed = experts, [] if keep else None, Routed() if record else None
        self._active = keep or record or experts is not None
        try:
            yield
        finally:
            self._replayed, self._chosen, self._routed, self._active = None, None, None, False

    def take(self, *, logits: bool) -> Routed:
        """What routers made of the pass since the block began, which then goes on without recording, so that layers can
        be recomputed. A loss of its `logits`, which are left out unless topk for, has gradients."""
        routed, self._routed = self._routed, None
        if routed is None or (logits and len(routed.logits) != self.layers):
            raise ModelError(f"{self._name} did not pass its {self.layers} routers once; set train.aux_loss_coef to 0")
        _, scatter = self._cells

        def of_tokens(cells: list[Tensor]) -> list[Tensor]:
            flat = [each.flatten(0, -2) for each in cells]
            return flat if scatter is None else [each[scatter] for each in flat]

        found = of_tokens(routed.logits) if logits else []
        if self._of_probabilities:  # whose logarithms are logits, up to a number for each token
            found = [each.clamp_min(torch.finfo(each.dtype).tiny).log() for each in found]
        return Routed(found, of_tokens(routed.chosen))

    def set_cells(self, gather: Tensor | None, scatter: Tensor | None) -> None:
        """From now on the model sees T tokens as cells: `gather` has the token of each cell, `scatter` [T] the cell of
        each token. None for both if cells are tokens."""
        self._cells = gather, scatter

    @property
    def chosen(self) -> Tensor:
        """[T, layers, k] int16 experts of each token in the block's pass."""
        if not self._chosen or len(self._chosen) != self.layers:
            raise self.unreadable()
        return torch.stack(self._chosen, dim=1).to(torch.int16)

    def unreadable(self) -> ModelError:
        """The error for a model whose routers cannot be read."""
        return ModelError(f"{self._name} does not report the experts it chooses; {REPLAYS}")

    def _controlled(self, layer: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        @torch.compiler.disable  # else it would be compiled for every layer
        def controlled_forward(*args: Any, **kwargs: Any) -> Any:
            gather, scatter = self._cells
            replayed = None if self._replayed is None else self._replayed[:, layer].long()
            if replayed is not None and gather is not None:
                replayed = replayed[gather]
            with _Topk(replayed, of=self.experts) as topk:
                output = forward(*args, **kwargs)
            if replayed is not None and not (topk.steps == 1 and topk.replaced):
                raise ModelError(f"{self._name} does not choose its experts with a single top-k; {REPLAYS}")
            if self._chosen is not None and topk.steps == 1:
                self._chosen.append(topk.chosen if scatter is None else topk.chosen[scatter])
            if self._routed is not None:
                # As it is: a layer that is recomputed must do then what it does here.
                self._routed.logits.append(output[self._logits_at] if isinstance(output, tuple) else output)
                if topk.last is not None:
                    self._routed.chosen.append(topk.last)
            return output

        def ask(*args: Any, **kwargs: Any) -> Any:
            # A compiled layer includes its router unless someone listens. The check must not read a growing list.
            return (controlled_forward if self._active else forward)(*args, **kwargs)

        return ask


class _Topk(TorchFunctionMode):
    """Replaces the result of a top-k over `of` scores by the experts `replayed` [t, k]."""

    def __init__(self, replayed: Tensor | None, *, of: int) -> None:
        super().__init__()
        self._replayed, self._of = replayed, of
        self.steps = 0
        self.replaced = False
        self.chosen = torch.empty(0)  # [t, k] in the last step
        self.last: Tensor | None = None  # [t, k] in the last step over all experts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = func(*args, **(kwargs or {}))
        if func not in TOPK:
            return answer
        self.steps += 1
        scores = args[0] if args else kwargs["input"]
        if self._replayed is not None and scores.shape[-1] == self._of and answer.indices.shape == self._replayed.shape:
            index = torch.where(self._replayed < 0, answer.indices, self._replayed)
            answer = torch.return_types.topk((scores.gather(-1, index), index))
            self.replaced = True
        self.chosen = answer.indices
        if scores.shape[-1] == self._of:
            self.last = self.chosen
        return answer
