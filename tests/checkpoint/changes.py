"""Change the files of a checkpoint as a bad disk does, or as another writer would."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any


def flip(file: Path, tensor: str = "", bit: int = 3) -> None:
    """Flip one bit of a file's last byte, or of a tensor's in it; the size and the header stay."""
    content = bytearray(file.read_bytes())
    end = len(content)
    if tensor:
        header = int.from_bytes(content[:8], "little")
        end = 8 + header + json.loads(content[8 : 8 + header])[tensor]["data_offsets"][1]
    content[end - 1] ^= 1 << bit
    file.write_bytes(content)


def rewrite(checkpoint: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Change checkpoint.json, with the checksum that it then must have; returns its path."""
    file = checkpoint / "checkpoint.json"
    content = json.loads(file.read_text())
    change(content)
    del content["crc32"]
    content["crc32"] = zlib.crc32(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
    file.write_text(json.dumps(content, indent=1))  # how it is laid out does not matter
    return file
