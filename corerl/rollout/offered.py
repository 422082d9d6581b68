"""Check that the tensors offered by a trainer match an engine's model."""

from __future__ import annotations

from collections.abc import Mapping

Shapes = Mapping[str, tuple[int, ...]]


def misfit(offered: Shapes, wanted: Shapes) -> str:
    """Why `offered` cannot be loaded into a model that holds `wanted`, both by HF name; "" if it can."""
    if missing := sorted(wanted.keys() - offered.keys()):
        return f"{len(missing)} of the model's {len(wanted)} tensors are not sent, the first is {missing[0]!r}"
    if unknown := sorted(offered.keys() - wanted.keys()):
        return f"{len(unknown)} tensors are not the model's, the first is {unknown[0]!r}"
    for name, shape in offered.items():
        if tuple(shape) != wanted[name]:
            return f"{name!r} is sent as {list(shape)}, the model wants {list(wanted[name])}"
    return ""
