"""Parse JSON that others wrote: whatever is wrong with it is a ValueError."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from corerl.regular import require_regular


def parse_json(text: str | bytes) -> Any:
    """Like `json.loads`, but a ValueError also for what is nested more deeply than Python can read, and for half of a
    pair of surrogates, which is no character: no file, path or tokenizer takes it."""
    try:
        parsed = json.loads(text)
        if (b"\\ud" if isinstance(text, bytes) else "\\ud") in text.lower():  # type: ignore[operator]
            json.dumps(parsed, ensure_ascii=False).encode()
        return parsed
    except UnicodeEncodeError as error:
        raise ValueError(f"it has {error.object[error.start]!r}, which is half of a character") from None
    except RecursionError:  # a RuntimeError
        raise ValueError("it is nested more deeply than can be read") from None


def read_json_file(path: Path) -> Any:
    """The content of a JSON file in UTF-8. Raises OSError, and ValueError for what is no JSON."""
    require_regular(path)
    return parse_json(path.read_text(encoding="utf-8"))
