"""What Ray's library reads of the environment once, as it is loaded, and each worker has of its own. A process that has
loaded it can be a worker nevertheless: the two strings are written where the library keeps them (seen in 2.60)."""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Mapping
from pathlib import Path

# What they are as the library is loaded, to be found by; as long as any that is written in their place.
PLACEHOLDERS = {"RAY_JOB_ID": "5ee5ee5e", "RAY_RAYLET_PID": "7077707707"}
# Before the characters of a string, as the library is built: how many, for how many there is room, who shares them.
HEAD = struct.Struct("NNi")
GAP = 4  # bytes between these and the characters, of any value


def find() -> dict[str, int]:
    """Name -> where its string begins. Called where the library was loaded with the placeholders. Raises
    LookupError unless each is found once."""
    found: dict[str, list[int]] = {name: [] for name in PLACEHOLDERS}
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, rights, *rest = line.split()
        if rest[-1] != "[heap]" or not rights.startswith("rw"):
            continue
        start, end = (int(each, 16) for each in span.split("-"))
        memory = ctypes.string_at(start, end - start)
        for name, value in PLACEHOLDERS.items():
            head, characters = HEAD.pack(len(value), len(value), 0), value.encode() + b"\0"
            string = re.compile(re.escape(head) + b".{%d}" % GAP + re.escape(characters), re.DOTALL)
            found[name] += [start + each.start() for each in string.finditer(memory)]
    if any(len(places) != 1 for places in found.values()):
        raise LookupError(
            f"where Ray's library keeps what it has read: {found}, expected one place for each; tests fork its workers "
            "in the version of Ray that constraints-cpu.txt names"
        )
    return {name: place for name, (place,) in found.items()}


def write(places: Mapping[str, int], environment: Mapping[str, str]) -> None:
    """Have the library know what it would have read of this environment."""
    for name, place in places.items():
        value, room = environment.get(name, "").encode(), len(PLACEHOLDERS[name])
        assert len(value) <= room, f"{name}={value!r} has more than {room} characters"
        string = HEAD.pack(len(value), room, 0) + bytes(GAP) + value + b"\0"
        ctypes.memmove(place, string, len(string))
