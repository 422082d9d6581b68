"""Check that the tensors offered by a trainer match an engine's model."""

from __future__ import annotations

from collections.abc import Mapping

from corerl.weights.adapters import is_adapter

Shapes = Mapping[str, tuple[int, ...]]


def shape_mismatch(offered: Shapes, held: Shapes, *, whole: bool = False) -> str:
    """Why `offered` cannot be loaded into a model that holds `held`, both by HF name; "" if it can. If adapters are
    among them, these may arrive alone once the engine has all else, which `whole` says."""
    alone = bool(offered) and all(map(is_adapter, offered))
    if alone and not whole:
        return "adapters have arrived alone, but the engine lacks the weights beside them; send all weights first"
    wanted = {name: shape for name, shape in held.items() if is_adapter(name) or not alone}
    if missing := sorted(wanted.keys() - offered.keys()):
        return f"the trainer does not send {len(missing)} of the model's {len(wanted)} tensors, such as {missing[0]!r}"
    if unknown := sorted(offered.keys() - wanted.keys()):
        return f"the model lacks {len(unknown)} of the {len(offered)} tensors that were sent, such as {unknown[0]!r}"
    for name, shape in offered.items():
        if tuple(shape) != wanted[name]:
            return f"the trainer sends {name!r} with shape {list(shape)}, but the model requires {list(wanted[name])}"
    return ""
