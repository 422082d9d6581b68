"""Two sides that resolved the same names can tell whether they found the same code."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from attrs import evolve

import corerl
from corerl.errors import PluginIncompatible
from corerl.plugin.fingerprint import Fingerprint, differences, fingerprint, require_same
from corerl.plugin.registry import Kind, load
from corerl.types import LossSpec

Install = Callable[..., Path]


def test_a_fingerprint_says_where_everything_that_runs_in_a_worker_came_from(
    install: Install, backend_spec: str, extension_spec: str
) -> None:
    install("corerl-mine", {"backends": {"mine": "mine_fp:SPEC"}}, version="0.2", mine_fp=backend_spec)
    install("corerl-wrap", {"extensions": {"wrap": "wrap_fp:SPEC"}}, version="0.5", wrap_fp=extension_spec)
    wrap = load(Kind.EXTENSIONS, "wrap")
    own = fingerprint(load(Kind.BACKENDS, "mine"), [wrap], LossSpec(name="clipped", params={"k": 2, "b": "x"}))
    assert own == Fingerprint(
        backend="mine",
        distribution="corerl-mine",
        version="0.2",
        value="mine_fp:SPEC",
        api="1.0",
        extensions=(("wrap", "corerl-wrap", "0.5", "wrap_fp:SPEC"),),
        loss="clipped(b='x', k=2)",
        corerl=corerl.__version__,
    )
    assert pickle.loads(pickle.dumps(own)) == own
    assert fingerprint(load(Kind.BACKENDS, "mine"), [], None).loss == ""


def test_differences_name_the_field_and_both_values() -> None:
    driver = Fingerprint(
        backend="mine",
        distribution="corerl-mine",
        version="0.2",
        value="mine:SPEC",
        api="1.0",
        extensions=(),
        loss="clipped",
        corerl="0.1.0",
    )
    assert differences(driver, driver) == []
    require_same(driver, driver)
    assert differences(driver, evolve(driver, version="0.3", extensions=(("wrap", "w", "1", "w:SPEC"),))) == [
        "corerl-mine version '0.2' against '0.3'",
        "extensions () against (('wrap', 'w', '1', 'w:SPEC'),)",
    ]
    with pytest.raises(PluginIncompatible) as caught:
        require_same(driver, evolve(driver, version="0.3"))
    assert caught.value.message == (
        "its plugins are not the driver's (driver's first): corerl-mine version '0.2' against '0.3'; "
        "install the same corerl and the same plugins on every node"
    )
