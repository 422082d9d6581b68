from __future__ import annotations

import gc
import importlib
import os
import pickle
import sys
import typing
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from corerl.imports import importable, uncollected


class Loop:
    """Garbage that only a collection finds."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_nothing_is_collected_within_and_what_was_there_is_passed_over_after() -> None:
    with uncollected():
        assert not gc.isenabled()
        kept = weakref.ref(Loop())
    assert gc.isenabled()
    gc.collect()
    assert kept() is not None
    later = weakref.ref(Loop())
    gc.collect()
    assert later() is None


def test_an_import_that_fails_leaves_collections_on_and_one_without_them_leaves_them_off() -> None:
    with pytest.raises(ImportError), uncollected():
        raise ImportError("a library that is not there")
    assert gc.isenabled()
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_can_be_imported_differs_after_something_is_put_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = importable()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "nothing")
    os.utime(tmp_path, ns=(0, 1))  # else the clock of a file system may be too coarse to tell
    there = importable()
    (tmp_path / "module.py").touch()
    assert set(there) - set(before) == {(str(tmp_path), 1), (str(tmp_path / "nothing"), 0)}
    assert importable() != there


MODULES = {
    "__init__": """
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lazy_house.broken import door as door
    from lazy_house.missing import key as key
    from lazy_house.sound import Room as Room
    from lazy_house.sound import rooms as rooms
else:
    from corerl.imports import on_demand

    __getattr__, __dir__ = on_demand(__name__, __file__)
""",
    "sound": """
class Room: ...

def rooms(of: "Room") -> "list[Room]":
    return [of]
""",
    "broken": "import sys\n\ndoor = sys.door",
    "missing": "import a_library_that_is_not_there\n\nkey = 1",
}


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a package with public names."""
    (tmp_path / "lazy_house").mkdir()
    for name, text in MODULES.items():
        (tmp_path / "lazy_house" / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield "lazy_house"
    for name in [each for each in sys.modules if each.partition(".")[0] == "lazy_house"]:
        del sys.modules[name]


def test_a_public_name_is_imported_when_it_is_asked_for_and_no_other_is(house: str) -> None:
    package = importlib.import_module(house)
    assert dir(package) == package.__all__ == ["Room", "door", "key", "rooms"]
    assert not any(name.startswith(f"{house}.") for name in sys.modules)
    room = package.Room()
    assert package.rooms(room) == [room] and vars(package)["rooms"] is package.rooms
    assert {name for name in sys.modules if name.startswith(f"{house}.")} == {f"{house}.sound"}
    assert type(pickle.loads(pickle.dumps(room))) is package.Room
    assert typing.get_type_hints(package.rooms) == {"of": package.Room, "return": list[package.Room]}


def test_a_module_that_cannot_be_imported_says_why_by_whichever_way_it_is_reached(house: str) -> None:
    importlib.import_module(house)
    with pytest.raises(ModuleNotFoundError, match="a_library_that_is_not_there"):
        exec(f"from {house} import key")
    with pytest.raises(ImportError, match="lazy_house.broken cannot be imported: module 'sys' has no attribute 'door'"):
        exec(f"from {house} import door")


def test_a_name_that_is_not_public_is_none_of_the_package_but_its_modules_are(house: str) -> None:
    package = importlib.import_module(house)
    with pytest.raises(AttributeError, match="module 'lazy_house' has no attribute 'rom'"):
        _ = package.rom
    scope: dict[str, object] = {}
    exec(f"from {house} import sound", scope)
    assert scope["sound"] is sys.modules[f"{house}.sound"]
    with pytest.raises(ImportError, match="cannot import name 'rom' from 'lazy_house'"):
        exec(f"from {house} import rom")
