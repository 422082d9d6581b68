"""Checkpoints that read pictures: their text alone, and prompts whose pictures arrive pixel by pixel.

python -m pytest plugins/sglang/tests/test_pictures.py -v      # the last test wants a GPU and SGLang
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import numpy as np
import pytest
import torch
from attrs import evolve
from PIL import Image
from transformers import AutoModelForImageTextToText

from benchmarks.runs import sglang
from corerl.config import ModelConfig
from corerl.engines import SamplingParams
from corerl.errors import ConfigError, EngineFailed
from corerl.models import load_tokenizer
from corerl.pictures import Picture
from corerl.weights import bit_sums
from corerl_sglang.arguments import TRANSPORT, server_arguments
from corerl_sglang.config import SglangConfig
from corerl_sglang.engine import SglangEngine
from corerl_sglang.pictures import IN_TEXT, body_of, contracted, files_of, shown, write_processor
from corerl_sglang.start import start_engine
from corerl_vision.processor import VisionInputs
from plugins.sglang.tests.checkpoints import LARGER, SHOWN, processor_files, write_larger, write_readable
from plugins.sglang.tests.picture_rows import Row, request_of, rows_of, squares, tensors_of
from plugins.sglang.tests.test_engine import given_to_server, push, said
from tests.end_to_end.command import metrics
from tests.engines.models import context
from tests.pictured import apart
from tests.pictures import FAMILIES, of_pictures, pictures_config, tensors_in, write_pictures

RUN = """
[run]
dir = "run"
steps = 2
[model]
path = "model"
tokenizer = "characters:0123456789>s"
[data]
source = "sort-digits"
[reward]
name = "position-match"
processes = 0
[rollout]
prompts = 8
samples = 8
max_tokens = 8
[train.optimizer]
lr = 1e-3
weight_decay = 0.1
[checkpoint]
export = true
[eval]
every = 0
"""
SERVE = """
import json, sys
import sglang

if __name__ == "__main__":
    asked = json.load(sys.stdin)
    engine = sglang.Engine(
        model_path=asked["model"], skip_tokenizer_init=True, enable_multimodal=False, mem_fraction_static=0.3,
        max_total_tokens=4096,
        disable_cuda_graph=True, sampling_backend="pytorch", grammar_backend="none", log_level="error",
        attention_backend=asked["attention"], dtype="bfloat16",
    )
    found = engine.generate(
        input_ids=asked["prompts"], sampling_params={"max_new_tokens": 1, "temperature": 1.0},
        return_logprob=True, logprob_start_len=0,
    )
    print("FOUND" + json.dumps([[each[0] for each in one["meta_info"]["input_token_logprobs"][1:]] for one in found]))
    engine.shutdown()
"""


@pytest.mark.parametrize("family", FAMILIES)
def test_the_server_is_started_for_text_alone(family: str, tmp_path: Path) -> None:
    directory = write_pictures(family, tmp_path / "model")
    given = given_to_server(ModelConfig(path=str(directory)), tmp_path / "own")
    assert given.arguments["enable_multimodal"] is False  # else it would want the files of a processor
    assert TRANSPORT not in given.arguments
    assert given.files == {"config.json"}
    assert given.config["architectures"] == json.loads((directory / "config.json").read_text())["architectures"]
    held = tensors_in(directory)
    assert given.engine._shapes == {name: tuple(each.shape) for name, each in held.items() if not of_pictures(name)}


@pytest.mark.parametrize("family", SHOWN)
def test_with_pictures_the_server_has_tower_and_processor(family: str, tmp_path: Path) -> None:
    directory = write_readable(family, tmp_path / "model")
    given = given_to_server(ModelConfig(path=str(directory), pictures="vision"), tmp_path / "own")
    assert given.arguments["enable_multimodal"] is True
    assert given.arguments[TRANSPORT] == "cpu"
    # Where the tokens of a picture see each other, by the one attention that has masks, and never in two chunks.
    masked = {"attention_backend": "triton", "chunked_prefill_size": -1}
    found = {name: given.arguments[name] for name in masked if name in given.arguments}
    assert found == (masked if family == "gemma3" else {})
    own = {"tokenizer.json", "tokenizer_config.json", "config.json", *processor_files(family, pictures_config(family))}
    assert own == given.files
    published = {each.replace("vision_tower.vision_model.", "vision_tower.") for each in tensors_in(directory)}
    assert given.engine._shapes.keys() == published and any(map(of_pictures, published))


@pytest.mark.parametrize(
    ("kind", "options", "told"),
    [
        ("gemma3", {"attention_backend": "fa3"}, r"attention_backend: 'fa3', .*; use 'triton'$"),
        ("gemma3", {"server": {"prefill_attention_backend": "fa3"}}, "server.prefill_attention_backend: 'fa3', "),
        ("gemma3", {"server": {"chunked_prefill_size": 8192}}, r"server.chunked_prefill_size: 8192, .*; use -1$"),
        ("gemma3", {"attention_backend": "triton", "server": {"chunked_prefill_size": -1}}, ""),
        ("qwen3_vl", {"attention_backend": "fa3", "server": {"chunked_prefill_size": 8192}}, ""),
        ("", {"attention_backend": "fa3"}, ""),  # a gemma3 that is shown none
    ],
)
def test_settings_without_masks_are_refused_where_pictures_need_them(kind: str, options: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=rf"^engines.sglang.{told}") if told else nullcontext():
        server_arguments(SglangConfig(**options), context(), model=Path("m"), shown=kind)


def test_a_model_without_processor_files_is_refused(tmp_path: Path) -> None:
    directory = write_readable("qwen3_vl", tmp_path / "model")
    for file in directory.glob("*processor_config.json"):
        file.unlink()
    config = json.loads((directory / "config.json").read_text())
    for model in (ModelConfig(path=str(directory)), ModelConfig(config=config)):
        with pytest.raises(ConfigError, match=r"has no preprocessor_config.json; .* rollout.engine='transformers'$"):
            write_processor(evolve(model, pictures="vision"), tmp_path)


@pytest.mark.parametrize("size", [(1, 1), (7, 5), (64, 33)])
def test_pillow_reads_the_pixels_that_were_written(size: tuple[int, int], tmp_path: Path) -> None:
    height, width = size
    noisy = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    smooth = np.add.outer(np.arange(height), np.add.outer(np.arange(width), np.arange(3))).astype(np.uint8)
    pictures = [Picture(pixels) for pixels in (noisy, smooth, noisy[::-1, ::-1])]  # the last is not contiguous
    own = tmp_path / "it's # 100% odd"
    own.mkdir()
    with files_of(pictures, own) as files:
        assert list(files) == pictures
        for picture, address in files.items():
            found = Image.open(unquote(urlparse(address).path))  # as SGLang opens it
            assert found.mode == "RGB"
            np.testing.assert_array_equal(np.asarray(found), picture.pixels)
    assert not list(own.iterdir())


PROMPTS = (
    ("how many?", ()),
    ("<image>a+b=", (squares(16, 16, seed=0),)),
    ("a<image>b<image>", (squares(16, 8, seed=1), squares(16, 16, seed=0))),
    ("<image><image>", (squares(16, 16, seed=2), squares(16, 16, seed=2))),
)


@pytest.mark.parametrize("family", SHOWN)
def test_each_picture_is_contracted_to_one_placeholder(family: str, tmp_path: Path) -> None:
    model = ModelConfig(path=str(write_readable(family, tmp_path)), pictures="vision")
    tokenizer = load_tokenizer(tokenizer="", path=model.path)
    rows = rows_of(model, PROMPTS)
    assert [shown(row.column) for row in rows] == [[], [1], [1, 2], [1, 2]]
    for row in rows:
        # As the template writes it, except that Gemma's has only the token that begins a picture.
        text = tokenizer.decode(list(row.ids))
        if family == "gemma3":
            around = "\n\n<start_of_image><image_soft_token><end_of_image>\n\n"
            text = text.replace("<start_of_image>", around)
        wanted = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert contracted(row.tokens, row.column, 5, in_text=family in IN_TEXT) == wanted
        sampled = np.array([20, 21])  # behind a prompt whose last token may be a picture's
        tokens, column = np.append(row.tokens, sampled), np.append(row.column, [0, 0])
        assert contracted(tokens, column, 5, in_text=family in IN_TEXT) == [*wanted, 20, 21]


def test_a_placeholder_outside_of_pictures_is_refused() -> None:
    text = Row(ids=(), tokens=np.array([1, 20, 5, 21]), column=np.zeros(4, np.int32), pictures=())
    picture = Picture(np.zeros((8, 16, 3), np.uint8))
    seen = Row(ids=(), tokens=np.array([1, 7, 5, 5, 8]), column=np.array([0, 0, 1, 1, 0]), pictures=(picture,))
    more = evolve(seen, tokens=np.append(seen.tokens, [5]), column=np.append(seen.column, [0]))
    files = {picture: "file:///0.ppm"}
    blank = evolve(text, tokens=text.tokens[:2], column=text.column[:2])
    body = body_of(request_of([blank, seen], PARAMS), files, 5, in_text=False, engine="engine-3")
    assert body == {"input_ids": [[1, 20], [1, 7, 5, 8]], "image_data": [[], ["file:///0.ppm"]]}
    for rows, message in (
        ([seen, text], "engine-3: the row of noise key 1 has 0 pictures, none, but the token .*, 5, 1"),
        ([more, text], f"engine-3: the row of noise key 0 has 1 pictures, {picture}, but .*, 5, 2 times"),
    ):
        with pytest.raises(EngineFailed, match=message.replace("(", r"\(").replace(")", r"\)")):
            body_of(request_of(rows, PARAMS), files, 5, in_text=False, engine="engine-3")


# ---- over the stand-in -----------------------------------------------------------------------------------------------

PARAMS = SamplingParams(max_tokens=6, stop_tokens=(5, 6, 7, 8), greedy=True)


@contextmanager
def served(model: ModelConfig, directory: Path) -> Iterator[tuple[SglangEngine, Any]]:
    """An engine that has the checkpoint's weights, and the checkpoint in transformers."""
    options = SglangConfig(launcher="plugins.sglang.tests.stand_in", requests=2)
    engine = start_engine(model, options, evolve(context(), run_dir=str(directory)))
    try:
        own = AutoModelForImageTextToText.from_pretrained(model.path, dtype=torch.float32).eval()
        tensors = tensors_of(own, model)
        assert push(engine, tensors, 0, directory / "weights").error == ""
        assert engine.weight_sums("float32") == bit_sums(tensors)
        yield engine, own
    finally:
        engine.close()


@pytest.mark.processes
@pytest.mark.usefixtures("forked_servers")
@pytest.mark.parametrize("family", SHOWN)
def test_it_samples_what_transformers_says_of_these_pictures(family: str, tmp_path: Path) -> None:
    tower = "trained" if family == "qwen3_vl" else "frozen"
    model = ModelConfig(path=str(write_readable(family, tmp_path / "model")), pictures="vision", tower=tower)
    rows = rows_of(model, PROMPTS)
    inputs = VisionInputs(model)
    with served(model, tmp_path) as (engine, own):
        # Features of a tower that changes must not be kept.
        assert said(engine)["stand_in"]["features_cached"] == ("0" if tower == "trained" else None)
        request = request_of([*rows, rows[1], rows[1]], PARAMS)
        drawn = engine.generate(request)
        sent = said(engine)["stand_in"]["pictures"]
        assert len(sent) == 7 and len(set(sent)) == len(request.pictures) == 3  # one file, however many rows show it
        assert not list(engine._directory.glob("pictures-*"))
        for found in apart(own, inputs, request, drawn):
            assert len(found) and found.max() < 1e-5
        # It sees: of the same words about another picture it says something else.
        (other,) = rows_of(model, [("<image>a+b=", (squares(16, 16, seed=9),))])
        blind = engine.generate(request_of([other], PARAMS))
        assert abs(blind.logprobs[0] - drawn.logprobs[drawn.offsets[1]]) > 1e-4
        # A tower that slept is sent again, also if nobody trains it.
        engine.sleep()
        engine.wake_up()
        again = push(engine, tensors_of(own, model), 1, tmp_path / "weights")
        assert again.error == ""
        again = engine.generate(request)
        assert again.tokens.tolist() == drawn.tokens.tolist()
        np.testing.assert_allclose(again.logprobs, drawn.logprobs, atol=1e-6)


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and SGLang")
@pytest.mark.processes
@pytest.mark.parametrize("family", LARGER)
def test_sglang_serves_what_was_trained_with_it(family: str, tmp_path: Path) -> None:
    attention = os.environ.get("ATTENTION", "triton")
    write_larger(family, tmp_path / "model")
    engine = sglang(attention_backend=attention, memory=0.3)
    train_two_steps(tmp_path, "cluster.device=cuda", "backend.name=fsdp", *engine, apart=0.02)
    export = tmp_path / "run/model"
    prompts = [[7, 4, 9, 5, 3, 14, 3, 4, 5, 7, 9, 2], list(range(3, 15))]
    asked = json.dumps({"model": str(export), "prompts": prompts, "attention": attention})
    (tmp_path / "serve.py").write_text(SERVE)
    call = [sys.executable, str(tmp_path / "serve.py")]
    done = subprocess.run(call, input=asked, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("FOUND"))[5:])
    model: Any = AutoModelForImageTextToText.from_pretrained(export, dtype=torch.float32).eval()
    for prompt, logprobs in zip(prompts, found, strict=True):
        tokens = torch.tensor([prompt])
        with torch.no_grad():
            wanted = model(input_ids=tokens).logits[0, :-1].log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]
        apart = (torch.tensor(logprobs) - wanted).abs()
        assert apart.mean() < 0.05, f"{apart.tolist()}"  # bfloat16 beside float32


def train_two_steps(directory: Path, *settings: str, apart: float) -> None:
    """Train the model in a directory; engine and trainer agree, and the export is the start but for its text."""
    (directory / "run.toml").write_text(RUN)
    call = [sys.executable, "-m", "corerl", "train", str(directory / "run.toml"), *settings]
    done = subprocess.run(call, cwd=directory, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    steps = [line for line in metrics(directory / "run") if "train/loss" in line]
    assert len(steps) == 2
    assert all(step["rollout/logprob_diff"] < apart for step in steps)
    before, after = tensors_in(directory / "model"), tensors_in(directory / "run/model")
    assert before.keys() == after.keys()
    same = {name for name in before if torch.equal(before[name].to(after[name].dtype), after[name])}
    frozen = {name for name in before if of_pictures(name)}
    assert frozen and frozen <= same
    # In bfloat16 a step may be less than the rounding of a few vectors.
    assert all(before[name].dim() == 1 for name in same - frozen)
