"""Which graphs `torch.compile` has made in this process, and why anew."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from attrs import define, evolve

from corerl.types import Compilation


@define
class Compilations:
    """Those since they were asked for last, first since this was made. torch remembers the last 64.

    The first time, none has a reason: until then there was no graph for each kind of layer and of pass, and that an
    earlier one is for another kind is no news."""

    _until: int = 0  # microseconds: the end of the last one seen
    _begun: bool = False

    def __attrs_post_init__(self) -> None:
        self._new()

    def take(self) -> tuple[Compilation, ...]:
        found = self._new()
        if not self._begun:
            found = tuple(evolve(each, why="") for each in found)
        self._begun = True
        return found

    def _new(self) -> tuple[Compilation, ...]:
        # Not imported here: it takes a second, and only who compiles has it.
        utils: Any = sys.modules.get("torch._dynamo.utils")
        if utils is None:
            return ()
        found: dict[str, Compilation] = {}
        seen = self._until
        for each in utils.get_compilation_metrics():
            if each.is_runtime or (each.end_time_us or 0) <= seen:
                continue
            self._until = max(self._until, each.end_time_us)
            seconds = (each.duration_us or 0) / 1e6
            if each.is_forward is not False:
                what = f"{each.co_name} in {Path(each.co_filename or '').name}"
                found[each.compile_id] = Compilation(what=what, seconds=seconds, why=each.recompile_reason or "")
            elif each.compile_id in found:  # the backward pass of the same graph
                forward = found[each.compile_id]
                found[each.compile_id] = evolve(forward, seconds=forward.seconds + seconds)
        return tuple(found.values())
