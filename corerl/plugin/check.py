"""Check what a run asks of a plugin against what the plugin declares."""

from __future__ import annotations

from collections.abc import Mapping

from corerl.errors import Unsupported
from corerl.plugin.capabilities import Capability, refusal
from corerl.plugin.spec import BackendSpec


def check_capabilities(spec: BackendSpec, needs: Mapping[Capability, str], *, name: str = "") -> None:
    """Check what a run needs of a backend (capability -> the setting that needs it) against what the spec declares.

    Raises Unsupported with one line for each missing capability. `name` is the backend's, for the message.
    """
    lines = []
    for capability, asked_by in needs.items():
        support = spec.support(capability)
        if not support.full:
            lines.append(refusal(capability, support, asked_by=asked_by, backend=name or spec.implementation))
    if lines:
        raise Unsupported("\n".join(lines))
