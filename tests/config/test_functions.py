from __future__ import annotations

import math
from pathlib import Path

import pytest

from corerl.config.functions import imported, signature_of
from corerl.errors import ConfigError


def test_a_function_is_found_by_module_and_name() -> None:
    assert imported("math:sqrt", setting="rollout.postprocess") is math.sqrt


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sqrt", "a.b: got 'sqrt', wanted 'module:function'"),
        (
            "no_such_module:f",
            (
                "a.b: 'no_such_module:f': cannot import 'no_such_module': ModuleNotFoundError: No module named "
                "'no_such_module'"
            ),
        ),
        ("math:sqr", "a.b: 'math:sqr': module 'math' has no function 'sqr'; did you mean 'sqrt'?"),
        ("math:pi", "a.b: 'math:pi': module 'math' has no function 'pi'"),
    ],
)
def test_what_is_not_there_is_told_with_the_setting(name: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        imported(name, setting="a.b")
    assert caught.value.message == message


def test_a_module_that_fails_when_it_is_asked_for_a_function_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "asks_in_vain.py").write_text("def __getattr__(name):\n    raise RuntimeError(name)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"^a.b: 'asks_in_vain:f': module 'asks_in_vain' raised RuntimeError: f$"):
        imported("asks_in_vain:f", setting="a.b")


def test_a_signature_that_cannot_be_told_is_none() -> None:
    class Odd:
        __signature__ = "no signature"

        def __call__(self) -> None: ...

    assert str(signature_of(lambda a, *, b=1: a)) == "(a, *, b=1)"
    assert signature_of(Odd()) is None and signature_of(max) is None
