"""Share data that many processes read: put it into the object store once, pass it as a reference."""

from __future__ import annotations

import pickle
from typing import Any

import ray
from ray.exceptions import ObjectStoreFullError, OutOfDiskError

from corerl.errors import CorerlError


def put(value: Any) -> Any:
    """Return a reference that process calls accept in place of the value; its arrays are then read without a copy.

    If the store is full, Ray moves older objects to disk; raises CorerlError if the disk is full too.
    """
    try:
        return ray.put(value)
    except (ObjectStoreFullError, OutOfDiskError) as error:
        there = sum(node["Resources"].get("object_store_memory", 0.0) for node in ray.nodes() if node["Alive"])
        buffers: list[pickle.PickleBuffer] = []
        asked = len(pickle.dumps(value, protocol=5, buffer_callback=buffers.append))
        asked += sum(buffer.raw().nbytes for buffer in buffers)
        raise CorerlError(
            f"Ray's object store has no room for {asked / 2**20:.0f} MiB: the cluster's stores have "
            f"{there / 2**20:.0f} MiB in total, and the disk they spill to is full (see df and `ray memory`); "
            "free disk space, use a smaller rollout batch, or start Ray with more --object-store-memory"
        ) from error
