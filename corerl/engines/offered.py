"""Check that the tensors offered by a trainer match an engine's model."""

from __future__ import annotations

from collections.abc import Mapping

Shapes = Mapping[str, tuple[int, ...]]


def shape_mismatch(offered: Shapes, wanted: Shapes) -> str:
    """Why `offered` cannot be loaded into a model that holds `wanted`, both by HF name; "" if it can."""
    if missing := sorted(wanted.keys() - offered.keys()):
        return f"the trainer does not send {len(missing)} of the model's {len(wanted)} tensors, such as {missing[0]!r}"
    if unknown := sorted(offered.keys() - wanted.keys()):
        return f"the model lacks {len(unknown)} of the {len(offered)} tensors that were sent, such as {unknown[0]!r}"
    for name, shape in offered.items():
        if tuple(shape) != wanted[name]:
            return f"the trainer sends {name!r} with shape {list(shape)}, but the model requires {list(wanted[name])}"
    return ""
