"""Pages that are made from the code say all of it: hooks with their arguments, tables of the config, pictures."""

import ast
import importlib.util
import re
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import attrs
import pytest

from corerl import types
from corerl.config.schema import Config
from corerl.plugin import hooks as hook_module
from corerl.plugin.capabilities import Capability
from corerl.plugin.registry import Kind, load
from tests.public import PUBLIC

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def module_at(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"_of_docs_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def page(name: str) -> str:
    """Markdown, as it is in the repository."""
    return (DOCS / name).read_text()


def specified() -> dict[str, tuple[list[str], str]]:
    """Each hook's arguments, and its signature as text, by parsing the file that specifies them."""
    tree = ast.parse(Path(hook_module.__file__).read_text())
    (hooks,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Hooks"]
    found = {}
    for function in hooks.body:
        if isinstance(function, ast.FunctionDef):
            arguments = function.args.args[1:]
            typed = ", ".join(f"{each.arg}: {ast.unparse(each.annotation)}" for each in arguments if each.annotation)
            assert function.returns is not None
            signature = f"{function.name}({typed}) -> {ast.unparse(function.returns)}"
            found[function.name] = ([each.arg for each in arguments], signature)
    return found


def test_every_hook_has_a_heading_with_its_arguments() -> None:
    text = page("reference/hooks.md")
    section = text.partition("\n## The hooks\n")[2].partition("\n## ")[0]
    headings = re.findall(r"^### `(.*)`$", section, re.MULTILINE)
    assert headings == [f"{name}({', '.join(arguments)})" for name, (arguments, _) in specified().items()]
    assert re.findall(r"^```text\n(.*)\n```$", section, re.MULTILINE) == [each for _, each in specified().values()]


def test_every_type_of_a_hook_is_shown_with_its_fields() -> None:
    text = page("reference/hooks.md")
    shown = dict(re.findall(r"^### `(\w+)`\n\n`[\w.]+`\n\n```python3\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    assert {verb.result.__name__ for verb in hook_module.VERBS.values() if verb.result} < shown.keys()
    assert {"RoleConfig", "Context", "PackedBatch", "MicroBatch", "LossSpec", "Step", "StepFinished"} < shown.keys()
    for name, code in shown.items():
        cls = getattr(types, name, None)
        if cls is not None and attrs.has(cls):
            assert [field.name for field in attrs.fields(cls) if f"\n    {field.name}: " not in code] == []


def test_every_table_of_the_config_has_its_heading() -> None:
    text = page("configuration.md")
    headings = re.findall(r"^## `\[\[?([\w.]+)\]\]?`$", text, re.MULTILINE)
    tables = {field.name for field in attrs.fields(attrs.resolve_types(Config)) if attrs.has(field.type)}
    assert tables - {heading.partition(".")[0] for heading in headings} == set()
    assert {"extensions", "engines.transformers", "engines.fake", "backends.fsdp"} <= set(headings)
    for option in attrs.fields(load(Kind.ENGINES, "transformers").spec.config):
        assert f"| `{option.name}` |" in text


@pytest.mark.parametrize("path", [DOCS / "loop.svg", *sorted((DOCS / "pictures").glob("*.svg"))], ids=str)
def test_a_picture_has_a_title_and_a_background(path: Path) -> None:
    root = ElementTree.parse(path).getroot()
    ns = {"svg": "http://www.w3.org/2000/svg"}
    assert root.findtext("svg:title", namespaces=ns) and root.findtext("svg:desc", namespaces=ns)
    _, _, width, height = root.attrib["viewBox"].split()
    paper = root.find("svg:rect[@class='paper']", ns)
    assert paper is not None and (paper.get("width"), paper.get("height")) == (width, height)


def test_every_page_is_in_a_table_of_contents() -> None:
    listed = set(re.findall(r"^[\w/-]+$", (DOCS / "index.md").read_text(), re.MULTILINE))
    pages = {str(path.relative_to(DOCS).with_suffix("")) for path in DOCS.rglob("*.md") if "_build" not in path.parts}
    assert pages - listed == {"index"}


def test_every_capability_is_in_the_table_for_backend_authors() -> None:
    text = (DOCS / "write-a-backend.md").read_text()
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    named = [name for cell in cells for name in re.findall(r"`([a-z0-9-]+)`", cell) if name in set(Capability)]
    assert sorted(named) == sorted(Capability)


def test_circles_of_public_names_are_small_and_apart() -> None:
    found: dict[str, list[str]] = {}
    for part in re.split(r"^<!-- reference: ", page("reference/public.md"), flags=re.MULTILINE)[1:]:
        circle, _, text = part.partition(" -->")
        for package in re.split(r"^### `", text, flags=re.MULTILINE)[1:]:
            names = re.findall(r"^\| `(\w+)` \|", package, re.MULTILINE)
            found.setdefault(circle, []).extend(f"{package.partition('`')[0]}.{name}" for name in names)
    assert found.keys() == {"users", "authors", "testers", "wheels"}
    assert len(found["users"]) <= 25 and len(found["authors"]) < 115
    everything = [name for names in found.values() for name in names]
    listed = [f"{package}.{name}" for package, names in PUBLIC.items() for name in names]
    assert sorted(everything) == sorted(listed)
    of_authors = {"corerl.backend.Backend", "corerl.plugin.StepFinished", "corerl.weights.WeightSender"}
    assert of_authors < {*found["authors"]} and "corerl.train" in found["users"]
    assert "corerl.models.parts_of" in found["wheels"]  # of the DeepSpeed backend
