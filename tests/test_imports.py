from __future__ import annotations

import gc
import importlib
import pickle
import sys
import typing
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from corerl.imports import uncollected


class Loop:
    """Garbage that only a collection finds."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_imports_are_excluded_from_garbage_collection() -> None:
    with uncollected():
        assert not gc.isenabled()
        kept = weakref.ref(Loop())
    assert gc.isenabled()
    gc.collect()
    assert kept() is not None
    later = weakref.ref(Loop())
    gc.collect()
    assert later() is None


def test_garbage_collection_is_restored_after_imports() -> None:
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


def test_a_public_name_is_imported_on_first_use(house: str) -> None:
    package = importlib.import_module(house)
    assert dir(package) == package.__all__ == ["Room", "door", "key", "rooms"]
    assert not any(name.startswith(f"{house}.") for name in sys.modules)
    room = package.Room()
    assert package.rooms(room) == [room] and vars(package)["rooms"] is package.rooms
    assert {name for name in sys.modules if name.startswith(f"{house}.")} == {f"{house}.sound"}
    assert type(pickle.loads(pickle.dumps(room))) is package.Room
    assert typing.get_type_hints(package.rooms) == {"of": package.Room, "return": list[package.Room]}


def test_a_failing_lazy_import_has_its_cause(house: str) -> None:
    importlib.import_module(house)
    with pytest.raises(ModuleNotFoundError, match="a_library_that_is_not_there"):
        exec(f"from {house} import key")
    with pytest.raises(ImportError, match="lazy_house.broken cannot be imported: module 'sys' has no attribute 'door'"):
        exec(f"from {house} import door")


def test_only_public_names_and_modules_are_found(house: str) -> None:
    package = importlib.import_module(house)
    with pytest.raises(AttributeError, match="module 'lazy_house' has no attribute 'rom'"):
        _ = package.rom
    scope: dict[str, object] = {}
    exec(f"from {house} import sound", scope)
    assert scope["sound"] is sys.modules[f"{house}.sound"]
    with pytest.raises(ImportError, match="cannot import name 'rom' from 'lazy_house'"):
        exec(f"from {house} import rom")
