"""Where a worker stands: its rank, its device, and the directory of its run."""

from __future__ import annotations

from attrs import frozen


@frozen(kw_only=True)
class Context:
    role: str  # actor, ...
    rank: int
    world_size: int
    local_rank: int  # of the device on this machine
    run_dir: str
