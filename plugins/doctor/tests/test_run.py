"""What the doctor asks of a config's nodes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from corerl.plan.resolve import Selection
from corerl.plugin.registry import Kind
from corerl_doctor.run import named_by


def test_nodes_need_no_sampler_and_no_extension_of_the_driver() -> None:
    chosen = [
        Selection(kind=kind, path="", name=name, used=True)
        for kind, name in (
            (Kind.BACKENDS, "fsdp"),
            (Kind.SAMPLERS, "episodes"),
            (Kind.EXTENSIONS, "elastic"),
            (Kind.TRANSPORTS, "delta"),
        )
    ]
    ranks: Any = SimpleNamespace(assignments=[SimpleNamespace(extensions=[SimpleNamespace(name="nan-guard")])])
    processes: Any = SimpleNamespace(roles={"actor": ranks})
    assert named_by(processes, chosen) == [
        (Kind.BACKENDS, "fsdp"),
        (Kind.TRANSPORTS, "delta"),
        (Kind.EXTENSIONS, "nan-guard"),
    ]
