"""A worker's place in its run: its role, rank, device and run directory."""

from __future__ import annotations

from attrs import frozen

from corerl.fields import explain


@frozen(kw_only=True)
class Context:
    """Which rank of which role a backend is, and where its run is kept."""

    role: str  # actor, ...
    rank: int
    world_size: int
    local_rank: int  # index of the device on this machine
    run_dir: str


explain(__name__)
