"""One input of a fuzz run, as plain data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from attrs import asdict, frozen

KINDS = ("config", "data", "model", "checkpoint")
SECRET = "sk-do-not-show"  # no output may hold it


@frozen(kw_only=True)
class Case:
    """One input: `corerl COMMAND` in a directory with these edits. `runs`: a run follows a check that finds nothing."""

    kind: str
    command: tuple[str, ...]
    edits: tuple[Any, ...] = ()
    runs: bool = False

    def to_json(self) -> dict[str, Any]:
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return plain


def case_of(data: Mapping[str, Any]) -> Case:
    return Case(
        kind=data["kind"], command=tuple(data["command"]), edits=tuple(data["edits"]), runs=data.get("runs", False)
    )
