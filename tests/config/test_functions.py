from __future__ import annotations

import sys
from pathlib import Path

import pytest

from corerl.config.functions import imported
from corerl.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sqrt", "a.b: got 'sqrt', wanted 'module:function'"),
        ("math.sqrt", "a.b: got 'math.sqrt', wanted 'module:function'; did you mean 'math:sqrt'?"),
        ("math:", "a.b: got 'math:', wanted 'module:function'"),
        ("math:sqr", "a.b: 'math:sqr': module 'math' has no function 'sqr'; did you mean 'sqrt'?"),
        ("math:pi", "a.b: 'math:pi': module 'math' has no function 'pi'"),
    ],
)
def test_a_missing_function_is_an_error_of_the_setting(name: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        imported(name, setting="a.b")
    assert caught.value.message == message


def test_a_missing_module_is_answered_with_the_nearest_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    failed = "a.b: 'no_such_module:f': cannot import 'no_such_module': ModuleNotFoundError: No module named 'no_such_m"
    with pytest.raises(ConfigError) as caught:
        imported("no_such_module:f", setting="a.b")
    assert caught.value.message == (
        f"{failed}odule'; there is no no_such_module.py in {tmp_path}, and no such module is installed"
    )
    (tmp_path / "no_such_modules.py").touch()
    with pytest.raises(ConfigError) as caught:
        imported("no_such_module:f", setting="a.b")
    assert caught.value.message == f"{failed}odule'; did you mean 'no_such_modules'?"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("rewards.py:correct", "; did you mean 'rewards:correct'?"),
        ("./sub/rewards.py:correct", "; did you mean 'sub.rewards:correct'?"),
        ("sub/rewards:correct", "; did you mean 'sub.rewards:correct'?"),
        ("/far/away/rewards.py:correct", "; did you mean 'rewards:correct', with PYTHONPATH=/far/away?"),
    ],
)
def test_the_path_of_a_file_is_answered_with_its_module(name: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        imported(name, setting="a.b")
    assert caught.value.message.startswith(f"a.b: {name!r}: cannot import ") and caught.value.message.endswith(hint)


@pytest.mark.parametrize("name", ["logging:score", "time:score", "json.rewards:score"])
def test_a_module_that_hides_the_users_own_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for own in ("logging", "time"):  # the latter without a file
        (tmp_path / f"{own}.py").touch()
    (tmp_path / "json").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # and even so: what Python has loaded is not looked for
    module = sys.modules[name.partition(":")[0].partition(".")[0]]
    found = getattr(module, "__file__", "built into Python")
    own = module.__name__ if module.__name__ == "json" else f"{module.__name__}.py"
    with pytest.raises(ConfigError) as caught:
        imported(name, setting="a.b")
    assert caught.value.message.endswith(f"; it is {found}: installed modules come first, rename your {own}")
