"""What differs between runs before they begin: settings and installed versions, of those whose files say them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attrs import frozen

from corerl_page.runs import Run

OWN = ("run.dir",)  # settings that every run has for itself


@frozen(kw_only=True)
class Difference:
    name: str  # of the setting, dotted, or of the package
    values: Sequence[str | None]  # of each run: None where it has none


def differences(runs: Sequence[Run]) -> list[Difference]:
    """Settings first, then versions. A run without config.toml, or without versions.json, is equal to all in those."""
    settings = [dict(_flat(run.config(), "")) for run in runs]
    versions = [{f"version of {name}": found for name, found in run.versions().items()} for run in runs]
    return [each for side in (settings, versions) for each in _differing(side) if each.name not in OWN]


def _flat(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for name, value in table.items():
        if isinstance(value, list) and value and all(isinstance(each, Mapping) and "name" in each for each in value):
            value = {each["name"]: {key: own for key, own in each.items() if key != "name"} for each in value}
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value if isinstance(value, str) and value else json.dumps(value, default=str)


def _differing(sides: Sequence[Mapping[str, str]]) -> Iterator[Difference]:
    for name in sorted({name for side in sides for name in side}):
        if len({side.get(name) for side in sides if side}) > 1:
            yield Difference(name=name, values=[side.get(name) for side in sides])
