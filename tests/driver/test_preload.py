"""What is there before a run's plan is made; real ones are those of tests/end_to_end with a Ray of their own."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from corerl import loop
from corerl.cluster import runtime
from corerl.driver import preload
from corerl.plan.preload import Preload


@pytest.mark.parametrize(
    ("own_ray", "modules", "imported", "started"),
    [
        (True, ("a", "b"), False, ["forks of a, b", "Ray", "block", "end of Ray", "end of forks"]),
        (True, (), False, ["Ray", "block", "end of Ray"]),
        (True, ("a", "b"), True, ["block"]),
        (False, (), False, ["block"]),
    ],
)
def test_forks_start_before_ray_and_end_after_it(
    own_ray: bool, modules: tuple[str, ...], imported: bool, started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    @contextlib.contextmanager
    def fork_server(modules: tuple[str, ...], environment: dict[str, str]) -> Iterator[None]:
        assert environment == {"A": "1"}
        seen.append(f"forks of {', '.join(modules)}")
        yield
        seen.append("end of forks")

    @contextlib.contextmanager
    def ray_session(**_: Any) -> Iterator[bool]:
        seen.append("Ray")
        yield True
        seen.append("end of Ray")

    monkeypatch.setattr(preload, "fork_server", fork_server)
    monkeypatch.setattr(runtime, "ray_session", ray_session)

    def import_module(_: str) -> None:
        if not imported:
            seen.append("loop")

    monkeypatch.setattr(preload, "import_module", import_module)
    monkeypatch.setitem(sys.modules, "corerl.loop", loop)
    if not imported:
        monkeypatch.delitem(sys.modules, "corerl.loop")
    with preload.preloading(Preload(own_ray=own_ray, modules=modules, environment={"A": "1"})):
        seen.append("block")
    if not imported:
        assert seen.index("loop") < seen.index("block")
        seen.remove("loop")  # imported in a thread
    assert seen == started
