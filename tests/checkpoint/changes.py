"""Change the files of a checkpoint as a bad disk does, or as another writer would."""

from __future__ import annotations

import json
from pathlib import Path


def flip(file: Path, tensor: str = "", bit: int = 3) -> None:
    """Flip one bit of a file's last byte, or of a tensor's in it; the size and the header stay."""
    content = bytearray(file.read_bytes())
    end = len(content)
    if tensor:
        header = int.from_bytes(content[:8], "little")
        end = 8 + header + json.loads(content[8 : 8 + header])[tensor]["data_offsets"][1]
    content[end - 1] ^= 1 << bit
    file.write_bytes(content)
