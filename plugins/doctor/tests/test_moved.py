"""The doctor says where is now what a plugin of an earlier API uses: here the backend that `corerl new-backend` wrote
at API 1.0, kept as text."""

from __future__ import annotations

import importlib
import inspect
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from corerl.backend import Backend
from corerl.plugin import API, Finding, Kind, Level
from corerl_doctor.moved import MOVED
from corerl_doctor.plugins import check_plugins

OLD = Path(__file__).parent / "api_1_0"  # its files, unchanged
ROWS = [row for rows in MOVED.values() for row in rows.items() if row[0].startswith(("corerl", "Backend."))]


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The old backend's package on sys.path, under a name of its own in each test."""
    package = tmp_path / re.sub(r"\W", "_", f"mine_{tmp_path.name}")
    package.mkdir()
    for file in OLD.glob("*.txt"):
        text = file.read_text().replace("corerl_mine", package.name)
        (package / f"{file.stem}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    return package


def problems(package: Path) -> list[str]:
    """What the doctor finds wrong with the backend."""
    reports = check_plugins([(Kind.BACKENDS.value, f"{package.name}:SPEC")])
    return [each.what for each in reports if isinstance(each, Finding) and each.level is Level.ERROR]


def edit(file: Path, *changes: tuple[str, str]) -> None:
    text = file.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    file.write_text(text)


def test_an_old_backend_is_refused_with_the_page_of_changes(mine: Path) -> None:
    (finding,) = problems(mine)
    assert (
        f"backend '{mine.name}:SPEC' was written for API 1.0, but this corerl supports 2.2; docs/versioning.md and "
        "`corerl doctor` say what has moved; "
    ) in finding


ADAMW = ("from corerl.backend.adamw import", "from corerl.backend import")
POLICY = ("from corerl.models.policy import CausalPolicy\n", "")
CONTEXT = ("from corerl.plugin.context import", "from corerl.plugin import")
NOWHERE = ("from corerl.models.config import", "from corerl.models.nowhere import")


@pytest.mark.parametrize(
    ("fixed", "said"),
    [
        ([], "; corerl.backend.adamw is corerl.backend: adamw, moments, set_adam_step, set_lr"),
        ([ADAMW], "; corerl.models.policy.CausalPolicy is corerl.models: make_policy(config, ...), which builds its"),
        ([ADAMW, POLICY, NOWHERE], "'corerl.models.nowhere'; docs/versioning.md and `corerl doctor` say what has"),
        ([ADAMW, POLICY, CONTEXT], "; Backend.train is Backend.forward_backward(batch, loss, outputs, last), which "),
    ],
    ids=["module", "name", "never there", "method"],
)
def test_what_an_old_backend_lacks_is_named_with_its_replacement(
    mine: Path, fixed: list[tuple[str, str]], said: str
) -> None:
    edit(mine / "spec.py", ("api=(1, 0)", f"api={API}"))
    edit(mine / "backend.py", *fixed)
    (finding,) = problems(mine)
    assert said in finding


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_each_row_of_the_table_names_what_is_there(row: tuple[str, str]) -> None:
    old, new = row
    module, colon, name = old.partition(":")
    if old.startswith("corerl"):
        there = find_spec(module) is not None if colon or _is_below(module) else False
        assert not there or (colon and not hasattr(importlib.import_module(module), name)) or name == "StepLosses"
    for method, arguments in re.findall(r"Backend\.(\w+)\(([^)]*)\)", new):
        parameters = list(inspect.signature(getattr(Backend, method)).parameters)[1:]
        assert parameters == [argument.partition("=")[0] for argument in arguments.split(", ")]
    if now := re.match(r"(corerl(?:_testing)?(?:\.\w+)?): ((?:\w+, )*\w+)", new):
        face = importlib.import_module(now[1])
        assert [each for each in now[2].split(", ") if not hasattr(face, each)] == []
    elif not new.startswith("Backend"):  # a wheel
        assert find_spec(new.partition(",")[0]) is not None


def _is_below(module: str) -> bool:
    """Whether the package that the module was in is still there, so that it can be looked for."""
    return find_spec(module.rpartition(".")[0]) is not None
