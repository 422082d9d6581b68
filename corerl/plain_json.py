"""Parse JSON that others wrote: whatever is wrong with it is a ValueError."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from corerl.regular import require_regular


def parse_json(text: str | bytes) -> Any:
    """Like `json.loads`, but a ValueError also for what is nested more deeply than Python can read."""
    try:
        return json.loads(text)
    except RecursionError:  # a RuntimeError
        raise ValueError("it is nested more deeply than can be read") from None


def read_json_file(path: Path) -> Any:
    """The content of a JSON file in UTF-8. Raises OSError, and ValueError for what is no JSON."""
    require_regular(path)
    return parse_json(path.read_text(encoding="utf-8"))
