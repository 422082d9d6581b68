"""What holds for the tree as a whole: core names neither backends nor algorithms, light imports stay light, tests
mirror packages."""

import ast
import importlib
import inspect
import json
import pkgutil
import re
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points, packages_distributions
from pathlib import Path

import pytest

import corerl
from tests.public import PUBLIC, imports_of, is_public

ROOT = Path(__file__).resolve().parent.parent
CORE = ROOT / "corerl"
PEFT_FIELD = '"megatron_core"'  # of PEFT's adapter_config.json
BACKEND_NAMES = re.compile(r"megatron|fsdp|deepspeed|zero-?[123]\b", re.IGNORECASE)
ALGORITHMS = {  # those of core and of the wheel of algorithms, by name: the module of each
    point.name: point.value.partition(":")[0]
    for point in entry_points(group="corerl.algorithms")
    if point.value.startswith(("corerl.", "corerl_algorithms."))
}


def algorithm_names() -> re.Pattern[str]:
    """Names of algorithms and of their modules, however their words are joined. Entry points tell them, so that none is
    forgotten."""
    names = {*ALGORITHMS, *(module.rpartition(".")[2] for module in ALGORITHMS.values())}
    parts = ("[ ._-]*".join(map(re.escape, re.split(r"[-_]", name))) for name in sorted(names, key=len, reverse=True))
    return re.compile(rf"\b({'|'.join(parts)})(?!\w)", re.IGNORECASE)


ALGORITHM_NAMES = algorithm_names()
DEFAULT = 'default="grpo",'  # of algorithm.name
PEFT_FIELD = '"megatron_core"'  # of an adapter_config.json
# `corerl_testing` tests workers, groups and files of core with a backend, so it may import all of it; its tests import
# public names of core, and all of the wheel.
INSIDE, ITS_TESTS = ROOT / "plugins/testing/src", ROOT / "plugins/testing/tests"
# What comes with torch or an engine where there is a GPU, and what users build for theirs; its absence is caught.
GUESTS = {"triton", "transformer_engine", "pynvml", "torch_memory_saver"}
BY_OTHERS = {"tensorboard", "httptools"}  # imported by torch, and by uvicorn
NINE = {"attrs", "numpy", "packaging", "ray", "safetensors", "tomli-w", "torch", "transformers", "xxhash"}
DOORS = [
    "driver/engines.py:start",
    "driver/export.py:export",
    "loop.py:train",
    "trainer/group.py:start",
]  # where users come in with a config
HINTS = ("plugin/registry.py", "EXTRAS")  # the one table that tells how to install what is not there


def documentation_and_hints(tree: ast.Module, *, hints: str) -> set[int]:
    """Line numbers of docstrings, and of the value given to the name `hints`."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        named: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            named = node.targets
        elif isinstance(node, ast.AnnAssign):
            named = [node.target]
        is_hints = any(isinstance(target, ast.Name) and target.id == hints for target in named)
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and type(node.value.value) is str
        if isinstance(node, ast.stmt) and (is_hints or is_text):
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def names_in(text: str, names: re.Pattern[str], *, hints: str = "") -> list[int]:
    """Lines of a Python file that have one of these names where only core's own words belong."""
    allowed = documentation_and_hints(ast.parse(text), hints=hints)
    return [
        number for number, line in enumerate(text.splitlines(), start=1) if number not in allowed and names.search(line)
    ]


def hints_in(path: Path) -> str:
    return HINTS[1] if path.relative_to(CORE).as_posix() == HINTS[0] else ""


def holders_of_a_config(text: str) -> list[str]:
    """Functions and classes of a Python file with an argument or a field that is all of a run's config."""

    def named(annotation: ast.expr | None) -> bool:
        return annotation is not None and re.search(r"(?<![.\w])Config\b", ast.unparse(annotation)) is not None

    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            if any(named(each.annotation) for each in given):
                found.append(node.name)
        elif isinstance(node, ast.ClassDef) and any(
            isinstance(each, ast.AnnAssign) and named(each.annotation) for each in node.body
        ):
            found.append(node.name)
    return found


def loaded_by(code: str, *watched: str) -> list[str]:
    """Which of the watched packages a fresh interpreter has loaded after `code`."""
    program = f"{code}\nimport json, sys\nprint('\\n' + json.dumps([m for m in {watched!r} if m in sys.modules]))"
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    loaded: list[str] = json.loads(finished.stdout.splitlines()[-1])
    return loaded


def modules_of(node: ast.AST) -> list[str]:
    """What an import statement imports."""
    if isinstance(node, ast.Import):
        return [each.name for each in node.names]
    return [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []


def test_core_names_no_backend() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted(CORE.rglob("*.py"))
        for line in names_in(path.read_text().replace(PEFT_FIELD, '""'), BACKEND_NAMES, hints=hints_in(path))
    ]
    assert found == []


def test_no_algorithm_is_named_outside_its_own_file() -> None:
    own = {*ALGORITHMS.values(), "corerl.algorithms.__init__"}  # which lists the classes that others build on
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted(CORE.rglob("*.py"))
        if ".".join(path.relative_to(ROOT).with_suffix("").parts) not in own
        for line in names_in(path.read_text().replace(DEFAULT, ""), ALGORITHM_NAMES, hints=hints_in(path))
    ]
    assert found == []


def test_only_reading_and_planning_take_a_whole_config() -> None:
    found = [
        f"{path.relative_to(CORE).as_posix()}:{name}"
        for path in sorted(CORE.rglob("*.py"))
        if path.relative_to(CORE).parts[0] not in ("config", "plan")
        for name in holders_of_a_config(path.read_text())
    ]
    assert found == DOORS


def test_the_search_for_configs_sees_arguments_and_fields() -> None:
    text = """
class Holds:
    config: Config | None
    model: ModelConfig
def takes(train: TrainConfig, *, config: "Config") -> None: ...
def makes(path: str) -> Config:
    config: Config = load(path)
    return config
def asks(config: pytest.Config) -> None: ...
"""
    assert holders_of_a_config(text) == ["Holds", "takes"]


def test_the_search_for_backend_names_skips_documentation() -> None:
    text = '"""Runs under FSDP."""\nTABLE = {\n    "fsdp": "install",\n}\nif name == "megatron":\n    pass\n'
    assert names_in(text, BACKEND_NAMES, hints="TABLE") == [5]
    assert names_in(text, BACKEND_NAMES) == [3, 5]
    assert names_in("x = 1  # as DeepSpeed does\n", BACKEND_NAMES) == [1]
    for name in (*ALGORITHMS, "Dr. GRPO", "reinforce_plus_plus"):
        assert names_in(f"if name == {name!r}:\n    pass\n", ALGORITHM_NAMES) == [1], name


def test_only_functions_import_what_serves_http() -> None:
    """What only reads a config would take a tenth of a second longer."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in [*CORE.rglob("*.py"), *ROOT.glob("plugins/agents/src/**/*.py")]
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        and re.search(r"(import|from) (starlette|uvicorn)\b", ast.unparse(node))
    ]
    assert found == []


@pytest.mark.processes
def test_what_only_reads_loads_no_heavy_package() -> None:
    """Core itself, its public packages, the command's help, all specs, and which checkpoints there are."""
    heavy = ("torch", "ray", "transformers", "uvicorn")
    assert loaded_by("import corerl", *heavy) == []
    code = "\n".join(f"import {package}\ndir({package})" for package in PUBLIC)
    code += "\nimport corerl.config.load\nfrom corerl.config import *\nfrom corerl.plugin import *"
    code += "\nimport corerl.checkpoint.commit\nfrom importlib.metadata import entry_points"
    code += "\nfrom corerl.plugin.registry import Kind\n"
    code += "for kind in Kind:\n    for point in entry_points(group=kind.group):\n        point.load()"
    assert loaded_by(code, *heavy) == []


def test_a_public_name_is_defined_and_documented_once() -> None:
    for package, names in PUBLIC.items():
        module = importlib.import_module(package)
        assert sorted(module.__all__) == sorted(names)
        assert not names.keys() & {each.name for each in pkgutil.iter_modules(module.__path__)}, package
        for name, where in names.items():
            value = getattr(module, name)
            assert value is getattr(importlib.import_module(where), name)
            if inspect.isfunction(value) or inspect.isclass(value):
                assert vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__, f"{package}.{name}"


def test_plugins_their_tests_and_examples_import_public_names() -> None:
    assert "corerl.plugin.host" not in PUBLIC["corerl.plugin"].values()
    files = [*ROOT.glob("plugins/*/src/**/*.py"), *ROOT.glob("plugins/*/tests/**/*.py"), *ROOT.glob("examples/**/*.py")]
    files = [path for path in files if not path.is_relative_to(INSIDE)]
    files += (INSIDE / "corerl_testing/backend_template").rglob("*.py")
    deeper = [
        f"{path.relative_to(ROOT)}: {module} {name}"
        for path in files
        for module, name in imports_of(path.read_text())
        if not (is_public(module, name) or (path.is_relative_to(ITS_TESTS) and module.startswith("corerl_testing")))
    ]
    assert len(files) > 120 and deeper == []


def test_core_imports_modules_not_public_names() -> None:
    unseen = [
        f"{path.relative_to(ROOT)}: {module} {name}"
        for package in PUBLIC.keys() - {"corerl", "corerl_testing"}
        for path in (CORE / package.partition(".")[2]).rglob("*.py")
        for module, name in imports_of(path.read_text())
        if name in PUBLIC.get(module, ()) and module != "corerl"
    ]
    assert unseen == []


def test_every_package_has_tests_at_the_same_place() -> None:
    packages = [path.parent.name for path in CORE.glob("*/__init__.py")]
    without = sorted(package for package in packages if not list((ROOT / "tests" / package).rglob("test_*.py")))
    assert without == []


def test_every_test_file_has_a_package_at_the_same_place() -> None:
    packages = {"/".join(path.parent.relative_to(CORE).parts) for path in CORE.rglob("__init__.py")}
    packages |= {"docs", "end_to_end", "examples", "benchmarks"}
    lost = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if (parent := "/".join(path.parent.relative_to(ROOT / "tests").parts)) and parent not in packages
    ]
    assert lost == []


def test_extras_name_plugins_of_this_minor_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    major, minor, _ = (int(part) for part in corerl.__version__.split("."))
    extras = project["optional-dependencies"]
    for path in ROOT.glob("plugins/*/pyproject.toml"):
        name = path.parent.name
        extra = {"sglang": "[server]", "verifiers": "[library]", "openenv": "[library]"}.get(name, "")
        assert extras[name][0] == f"corerl-{name}{extra}>={major}.{minor},<{major}.{minor + 1}"
    for backend in ("fsdp", "megatron", "deepspeed"):
        assert extras[backend][1:] == ["corerl[transformers,transports,algorithms,observe,doctor,forecast]"]


def test_a_wheel_declares_exactly_what_it_imports() -> None:
    """Required or in an extra."""
    of_import = packages_distributions()
    for file in (ROOT / "pyproject.toml", *ROOT.glob("plugins/*/pyproject.toml")):
        project = tomllib.loads(file.read_text())["project"]
        extras = [each for extra in project.get("optional-dependencies", {}).values() for each in extra]
        required, optional = (
            {re.split(r"[<>=\[ ]", each, maxsplit=1)[0].lower().replace("-", "_") for each in listed}
            for listed in (project["dependencies"], extras)
        )
        source = CORE if file.parent == ROOT else file.parent / "src"
        trees = [ast.parse(path.read_text()) for path in source.rglob("*.py") if "backend_template" not in path.parts]
        imported = {
            next((each for each in names if each in required), names[0])  # several have a part of the module `google`
            for tree in trees
            for node in ast.walk(tree)
            for name in modules_of(node)
            if (top := name.partition(".")[0]) not in sys.stdlib_module_names
            for names in [[each.lower().replace("-", "_") for each in of_import.get(top, [top])]]
        }
        imported.discard(project["name"].replace("-", "_"))
        assert imported - required - optional <= GUESTS, project["name"]
        assert file.parent != ROOT or {each.replace("-", "_") for each in NINE} == required
        if len(trees) > 1:  # else it is still empty
            assert required - imported <= BY_OTHERS, project["name"]


def test_every_direct_dependency_is_pinned_in_the_constraints() -> None:
    def name(requirement: str) -> str:
        return re.split(r"[<>=\[ ]", requirement, maxsplit=1)[0].lower().replace("-", "_")

    lines = (ROOT / "constraints-cpu.txt").read_text().splitlines()
    pinned = {name(line) for line in lines if line and not line.startswith("#")}
    assert all("==" in line for line in lines if line and not line.startswith("#"))
    wanted: set[str] = set()
    for file in (ROOT / "pyproject.toml", *ROOT.glob("plugins/*/pyproject.toml")):
        project = tomllib.loads(file.read_text())["project"]
        extras = project.get("optional-dependencies", {})
        wanted |= {name(requirement) for requirement in project["dependencies"]}
        wanted |= {name(requirement) for extra in ("test", "docs", "dev") for requirement in extras.get(extra, ())}
    assert {each for each in wanted if not each.startswith("corerl")} <= pinned
