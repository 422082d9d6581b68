"""`corerl new-backend`: what it writes is a package that installs, conforms and trains from the first minute."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tomllib
import venv
from collections.abc import Mapping
from pathlib import Path

import pytest
from attrs import evolve, frozen
from packaging.requirements import Requirement
from packaging.version import Version

import corerl.plugin
from corerl.config import load_config
from corerl.plugin import scan
from corerl_testing import main
from corerl_testing.new_backend import LONGEST, TEMPLATE
from tests.end_to_end.command import Command
from tests.forks.client import Forked

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[3]
NAME = "two-words"
PYTEST = "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"
TRAIN_SHORTLY = ["run.steps=2", "eval.every=1", "data.held_out=8", "rollout.prompts=8", "rollout.samples=4"]


def generated(name: str, directory: Path) -> Path:
    assert main(["new-backend", name, str(directory)]) == 0
    return directory


def texts(directory: Path) -> dict[str, str]:
    """Path in the directory -> content, of all files but compiled ones."""
    files = (path for path in directory.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(directory)): path.read_text() for path in files}


@frozen
class Environment:
    """A virtual environment that the package was installed into, as a user would; what it needs is lent by ours."""

    python: Path
    site: Path  # its site-packages
    package: Path

    def run(self, *arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "CORERL_DEBUG")}
        return subprocess.run(
            [str(self.python), *map(str, arguments)],
            capture_output=True,
            text=True,
            cwd=cwd,
            env={**environment, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
            check=False,
        )

    def pytest(self, *arguments: str, cwd: Path) -> tuple[int, str]:
        """Its exit status and what it prints, where Python finds this environment's packages first."""
        own = {**os.environ, "PYTHONPATH": str(self.site), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        with (self.package.parent / "pytest.txt").open("w") as out:
            process = Forked(["pytest", *arguments], PYTEST, environment=own, directory=cwd, stdout=out, stderr=out)
            status = process.wait()
        return status, Path(out.name).read_text()

    def corerl(self, *arguments: str | Path, cwd: Path) -> Command:
        """The command, where Python finds this environment's packages first."""
        return Command(*arguments, logs=cwd, directory=cwd, packages=self.site)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Without a download: pip sees all dependencies, and the build backend, in the environment of the tests."""
    directory = tmp_path_factory.mktemp("outside")
    package = generated(NAME, directory / "package")
    venv.create(directory / "venv", with_pip=False)
    python = directory / "venv/bin/python"
    (own,) = (directory / "venv/lib").glob("python*/site-packages")
    ours = sysconfig.get_paths()["purelib"]
    (own / "lent.pth").write_text(f"import site; site.addsitedir({ours!r})\n")  # a plain line would skip its .pth files
    environment = Environment(python, own, package)
    done = environment.run("-m", "pip", "install", "--no-index", "--no-build-isolation", package, cwd=directory)
    assert done.returncode == 0, done.stderr
    return environment


# ---- what is written -------------------------------------------------------------------------------------------------


def test_the_template_is_a_package_for_the_name_mine(tmp_path: Path) -> None:
    assert texts(generated("mine", tmp_path / "mine")) == texts(TEMPLATE)


def test_another_name_stands_everywhere_in_the_place_of_mine(tmp_path: Path) -> None:
    files = texts(generated(NAME, tmp_path))
    assert not any("mine" in (path + text).lower() for path, text in files.items())
    assert {path.replace("corerl_two_words", "corerl_mine") for path in files} == set(texts(TEMPLATE))
    project = tomllib.loads(files["pyproject.toml"])["project"]
    assert project["name"] == "corerl-two-words"
    assert project["entry-points"]["corerl.backends"] == {NAME: "corerl_two_words:SPEC"}
    assert "class TwoWordsBackend(Backend):" in files["src/corerl_two_words/backend.py"]


def test_the_package_requires_this_minor_version(tmp_path: Path) -> None:
    project = tomllib.loads(texts(generated("mine", tmp_path))["pyproject.toml"])["project"]
    (wanted,) = [each for each in map(Requirement, project["dependencies"]) if each.name == "corerl"]
    version = Version(corerl.__version__)
    assert version in wanted.specifier and f"{version.major}.{version.minor + 1}.0" not in wanted.specifier


def test_its_quickstart_is_ours_on_the_new_backend(tmp_path: Path) -> None:
    theirs = load_config(generated("mine", tmp_path) / "quickstart.toml")
    ours = load_config(ROOT / "examples/quickstart.toml")
    assert theirs.backend.name == "mine"
    assert theirs.run.dir == "runs/mine-quickstart"
    assert evolve(theirs, run=ours.run, backend=ours.backend, backends=ours.backends) == ours


@pytest.mark.parametrize("name", ["a", NAME, "x" * LONGEST])
def test_names_of_every_length_pass_ruff(name: str, tmp_path: Path) -> None:
    package = generated(name, tmp_path / "package")
    modules = f'lint.isort.known-first-party=["corerl", "corerl_{name.replace("-", "_")}", "corerl_testing"]'
    ours = ["--config", str(ROOT / "pyproject.toml"), "--config", modules]
    ruff = [sys.executable, "-m", "ruff"]
    for command in (["check"], ["check", *ours], ["format", "--check"], ["format", "--check", *ours]):
        done = subprocess.run([*ruff, *command, "--no-cache", "."], cwd=package, capture_output=True, text=True)
        assert done.returncode == 0, (command, done.stdout + done.stderr)


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("Mine", "invalid backend name 'Mine'; use lower-case letters, digits and single hyphens, a letter first"),
        ("x" * 25, f"the name '{'x' * 25}' is 25 characters long; use 24 at most"),
        ("plain", f"a backend 'plain' already exists, in corerl-testing {corerl.__version__}; choose another name"),
        ("megatron", "'megatron' is the name of one of CoreRL's own backends, not installed here; choose another name"),
    ],
)
def test_a_name_that_is_taken_or_invalid_is_refused(
    name: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corerl.plugin, "scan", lambda kind: [each for each in scan(kind) if each.name != "megatron"])
    assert main(["new-backend", name, str(tmp_path / "package")]) == 2
    assert capsys.readouterr() == ("", f"corerl: error: {line}\n")
    assert not (tmp_path / "package").exists()


def test_a_directory_that_is_not_empty_is_left_unchanged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("keep me")
    for taken in (tmp_path, tmp_path / "notes.txt"):
        assert main(["new-backend", "mine", str(taken)]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith(f"corerl: error: {taken} exists and is not an empty directory; ")
    below = tmp_path / "notes.txt/mine"
    assert main(["new-backend", "mine", str(below)]) == 2
    assert capsys.readouterr().err.startswith(f"corerl: error: cannot write to {below}: Not a directory; ")
    assert texts(tmp_path) == {"notes.txt": "keep me"}


# ---- what it is worth ------------------------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.usefixtures("forked_python")
def test_the_backend_conforms_on_one_rank_and_on_two(installed: Environment, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    with installed.corerl("verify", NAME, "--level", "2", "--report", report, cwd=tmp_path) as command:
        assert command.finish() == 0, command.out + command.err
    found = json.loads(report.read_text())
    assert (found["backend"], found["distribution"], found["levels"]) == (NAME, "corerl-two-words", [0, 1, 2])
    lacks = {name for name, support in found["capabilities"].items() if support["grade"] != "full"}
    assert lacks == {"expert-lora", "float16", "lora", "pictures", "recompute", "shared-prefixes"}
    summary: Mapping[str, int] = found["summary"]
    assert summary["passed"] > 0 and summary["failed"] == summary["blocked"] == summary["expected"] == 0
    unsupported = {each["id"] for each in found["checks"] if each["outcome"] == "unsupported"}
    assert unsupported == {"C56", "C57", "C72", "C73", "C74", "C77", "C78", "C79", "C82"}


def test_its_own_tests_run_the_suite(installed: Environment) -> None:
    # Pictures, which the spec does not name, and what they build on: training, saving, sleep.
    suite = ["--corerl-level", "1", "--corerl-check", "C78"]
    status, said = installed.pytest("-p", "no:cacheprovider", *suite, cwd=installed.package)
    assert status == 0, said
    assert all(each in said for each in (" passed", " unsupported")) and " failed" not in said


@pytest.mark.nightly
def test_it_trains_our_quickstart_on_two_ranks(installed: Environment, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    settings = [f"backend.name={NAME}", f"run.dir={run_dir}", *TRAIN_SHORTLY]
    with installed.corerl("train", ROOT / "examples/quickstart.toml", *settings, cwd=tmp_path) as command:
        assert command.finish() == 0, command.out + command.err
    assert load_config(run_dir / "config.toml").roles.actor.ranks == 2
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    norms = [line["train/grad_norm"] for line in lines if "train/grad_norm" in line]
    assert len(norms) == 2 and all(norm > 0 for norm in norms)
    assert (run_dir / "model/model.safetensors").is_file()
