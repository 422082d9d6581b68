"""Parse JSON that others wrote: whatever is wrong with it is a ValueError."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from corerl.regular import require_regular

# Where half a surrogate pair may be: escaped, or raw, which `json.loads` lets pass.
SURROGATE, SURROGATE_BYTES = re.compile(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]"), re.compile(rb"\\u[dD][89a-fA-F]|\xed")


def parse_json(text: str | bytes) -> Any:
    """Like `json.loads`, but a ValueError also for what is nested more deeply than Python can read, and for half a
    surrogate pair, which no tokenizer and no file takes. What Python does not hold is told in words of ours."""
    try:
        value = json.loads(text)
        if SURROGATE.search(text) if isinstance(text, str) else SURROGATE_BYTES.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:  # a RuntimeError
        raise ValueError("it is nested more deeply than can be read") from None
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except UnicodeEncodeError:
        raise ValueError("a text in it has half a surrogate pair, which is no character") from None
    except ValueError:
        raise ValueError(f"a number in it has more than {sys.get_int_max_str_digits()} digits") from None
    return value


def read_json_file(path: Path) -> Any:
    """The content of a JSON file in UTF-8. Raises OSError, and ValueError for what is no JSON."""
    require_regular(path)
    return parse_json(path.read_text(encoding="utf-8"))
