"""Stop texts of any length: every engine keeps exactly the tokens up to the one that completes the text."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from attrs import evolve
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from corerl.config.schema import ModelConfig
from corerl.engines import continuation as module
from corerl.engines.base import Engine, GenerateRequest, Generation, SamplingParams
from corerl.engines.continuation import append, continued, in_parts
from corerl.engines.service import EngineAssignment, EngineService
from corerl.engines.stops import Stops, stops_of, until_stop
from corerl.models.tokenizer import character_tokenizer
from corerl.ops.noise import hash_keys
from corerl.plugin.origins import origins_of
from corerl.plugin.registry import Kind, load
from corerl_testing.fake_engine import FakeEngine
from corerl_testing.fake_spec import FakeConfig
from corerl_transformers.engine import TransformersEngine
from corerl_transformers.spec import TransformersConfig
from tests.engines.models import MOE, context, hf_tensors, pause_after, random_model, update
from tests.engines.services import generation_of
from tests.engines.stopping import assert_cut_at

CHARACTERS = character_tokenizer("0123456789>s")  # 4 = "0" ... 13 = "9"


def byte_level(*merged: str) -> PreTrainedTokenizerBase:
    """A token for each byte, and for each of `merged`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(models.BPE({char: n for n, char in enumerate([*alphabet, *merged])}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>", additional_special_tokens=["<think>"])


@pytest.mark.parametrize(
    ("pieces", "stop", "kept", "text"),
    [
        (["a", "</", "ans", "wer>", "b"], "</answer>", 4, "a"),
        (["a</", "answer>\u010a"], "</answer>", 2, "a"),  # the token says a line's end more
        (["x", "stop", "stop"], "stop", 2, "x"),
        (["xst", "op"], "stop", 2, "x"),
        (["sto", "sto", "p"], "stop", 3, "sto"),
        (["a", "b"], "stop", None, "ab"),
        ([], "stop", None, ""),
    ],
)
def test_a_stop_text_ends_with_its_completing_token(pieces: list[str], stop: str, kept: int | None, text: str) -> None:
    ours = byte_level(*dict.fromkeys(piece for piece in pieces if len(piece) > 1))
    tokens = ours.convert_tokens_to_ids(pieces)
    stops = Stops(ours, [stop])
    assert stops.end(tokens) == kept
    assert stops.text(tokens[:kept], special_tokens=False) == text


def test_special_tokens_do_not_hide_a_stop_text() -> None:
    ours = byte_level()
    think = ours.convert_tokens_to_ids("<think>")
    tokens = [*ours.encode("a"), think, *ours.encode("b"), *ours.encode("cd")]
    stops = Stops(ours, ["bc"])
    assert stops.end(tokens) == 4
    assert stops.text(tokens, special_tokens=False) == "a"
    assert stops.text(tokens, special_tokens=True) == "a<think>"
    assert Stops(ours, ["hin"]).end(tokens) is None  # of the token's name
    named = Stops(ours, ["<think>b"])
    assert (named.end(tokens), named.text(tokens, special_tokens=True)) == (3, "a")


def test_unused_special_tokens_do_not_hide_a_stop_text() -> None:
    ours = byte_level()
    ours.add_tokens([tokenizers.AddedToken("<call>", special=True)])
    assert "<call>" not in ours.all_special_tokens
    tokens = ours.encode("ab<call>cd", add_special_tokens=False)
    for stop, end, text in ((["<call>c"], 4, "ab"), (["b<call>"], 3, "a"), (["bc"], 4, "a"), (["al"], None, "abcd")):
        stops = Stops(ours, stop)
        assert (stops.end(tokens), stops.text(tokens[:end], special_tokens=False)) == (end, text)
    assert stops_of([">"], ours) == ([ours.convert_tokens_to_ids(">")], [])  # those with a > in their names say none


def test_stop_texts_of_one_token_become_stop_tokens() -> None:
    ours = byte_level("ab", "s>")
    ids = ours.convert_tokens_to_ids
    assert stops_of(["<|end|>", "\n", "<think>"], ours) == ([ids("<|end|>"), ids("\u010a"), ids("<think>")], [])
    assert stops_of(["a", "s", "ab", "\n\n"], ours) == ([], ["a", "s", "ab", "\n\n"])  # others hold an a, an s
    assert stops_of(["\u00e9"], ours) == ([], ["\u00e9"])


# ---- engines ---------------------------------------------------------------------------------------------------------


def request(rows: int, *, max_tokens: int = 24, routed_experts: bool = False) -> GenerateRequest:
    lengths = np.random.default_rng(3).integers(1, 6, size=rows)
    return GenerateRequest(
        tokens=np.random.default_rng(4).integers(4, 16, size=lengths.sum()),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        noise_keys=hash_keys(0, 0, np.arange(rows), np.zeros(rows, dtype=np.int64)),
        params=SamplingParams(max_tokens=max_tokens, stop_tokens=(2,), routed_experts=routed_experts),
    )


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Engine]:
    """Engines with weights, which nobody changes."""
    fake = FakeEngine(ModelConfig(), FakeConfig(), context())
    update([fake], {"w": torch.ones(2)}, version=1, path=tmp_path_factory.mktemp("w"))
    made: dict[str, Engine] = {"fake": fake}
    made["moe"] = TransformersEngine(ModelConfig(config=MOE), TransformersConfig(), context())
    tensors = hf_tensors(random_model(MOE, seed=1), tmp_path_factory.mktemp("hf"))
    update([made["moe"]], tensors, version=1, path=tmp_path_factory.mktemp("w"))
    return made


@pytest.mark.parametrize("part", [1, 5, 64])
@pytest.mark.parametrize("kind", ["fake", "moe"])
@pytest.mark.parametrize("stop", [("12",), ("7", "84", "123"), ("0", "1", "2")])
def test_engines_keep_tokens_up_to_the_stop_texts_end(
    kind: str, stop: tuple[str, ...], part: int, engines: dict[str, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PART", part)
    engine, asked = engines[kind], request(24, routed_experts=kind == "moe")
    whole = engine.generate(asked)
    finished: list[int] = []
    stopping = evolve(asked, params=evolve(asked.params, stop=stop))
    found = until_stop(engine.generate_watched, stopping, Stops(CHARACTERS, stop), finished.append)
    assert sum(finished) == 24
    stopped = assert_cut_at(stop, found, whole, CHARACTERS)
    assert 0 < sum(stopped) < 24 or stop == ("0", "1", "2")
    if kind == "moe":
        assert found.routed_experts is not None and whole.routed_experts is not None
        prompts = np.diff(asked.offsets)
        ours = np.split(found.routed_experts, np.cumsum(prompts + np.diff(found.offsets))[:-1])
        theirs = np.split(whole.routed_experts, np.cumsum(prompts + np.diff(whole.offsets))[:-1])
        for mine, other in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(mine[:-1], other[: len(mine) - 1])
            assert (mine[-1] == -1).all()


@pytest.mark.parametrize("asked_first", [1, 3, 6, 10])
def test_a_stop_text_is_found_across_a_pause(
    asked_first: int, engines: dict[str, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines["fake"]
    stop = ("12", "84")
    asked = evolve(request(24), params=evolve(request(24).params, stop=stop))
    whole = engine.generate(request(24))
    stops = Stops(CHARACTERS, stop)
    monkeypatch.setattr(module, "PART", 4)
    with monkeypatch.context() as patched:
        pause_after(patched, asked_first)
        first = until_stop(engine.generate_watched, asked, stops)
    assert first.unfinished.any()
    more = until_stop(engine.generate_watched, continued(asked, first), stops)
    assert_cut_at(stop, append(asked, first, more), whole, CHARACTERS)


def test_long_responses_are_sampled_in_eighths() -> None:
    asked: list[int] = []

    def generate(request: GenerateRequest) -> Generation:
        size, _ = request.left
        asked.append(int(size))
        return generation_of([[4] * int(size)] * 2, truncated=True)

    wanted = request(2, max_tokens=16_384)
    found = until_stop(partial(in_parts, generate), wanted, Stops(CHARACTERS, ["12"]))
    assert (len(found.tokens), sum(asked), found.truncated.tolist()) == (2 * 16_384, 16_384, [True, True])
    assert asked[:10] == [*[64] * 9, 72]  # 72 of 576
    assert len(asked) == 38  # not 256
    assert all(size <= max(64, sum(asked[:part]) // 8) for part, size in enumerate(asked))


def test_only_the_current_answer_is_searched_for_stop_texts(engines: dict[str, Engine]) -> None:
    engine = engines["fake"]
    first = request(1)
    whole = engine.generate(first)
    text = CHARACTERS.decode(whole.tokens[:2].tolist())
    # The row's last tokens, of an earlier answer or the environment, hold a stop text, or begin one.
    for earlier in ("9" + text[0], text):
        said = CHARACTERS.encode(earlier, add_special_tokens=False)
        tokens = np.concatenate([first.tokens, said])
        asked = evolve(
            first,
            tokens=tokens,
            offsets=np.array([0, len(tokens)]),
            picture=np.zeros(len(tokens), np.int32),
            response_lengths=np.array([2]),
            answered=np.array([0]),
        )
        drawn = engine.generate(asked)
        stop = (earlier, earlier[1:] + CHARACTERS.decode(drawn.tokens[:1].tolist()))
        found = until_stop(engine.generate_watched, asked, Stops(CHARACTERS, stop))
        assert_cut_at(stop, found, drawn, CHARACTERS)


def test_the_engines_process_finds_stop_texts_by_the_tokenizer(tmp_path: Path) -> None:
    assignment = EngineAssignment(
        engine="fake",
        origins=origins_of((Kind.ENGINES, load(Kind.ENGINES, "fake"))),
        model=ModelConfig(tokenizer="characters:0123456789>s", config={"model_type": "qwen3"}),
        options={},
        context=context(),
    )
    service: Any = EngineService(assignment)
    update([service.engine], {"w": torch.ones(2)}, version=1, path=tmp_path)
    asked, stop = request(24), ("12", "7")
    found = service.generate(evolve(asked, params=evolve(asked.params, stop=stop)))
    assert any(assert_cut_at(stop, found, service.generate(asked), CHARACTERS))
