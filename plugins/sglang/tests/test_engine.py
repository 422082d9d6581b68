"""The engine against a server that speaks SGLang's endpoints, compared with transformers on the same weights."""

from __future__ import annotations

import gc
import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from attrs import evolve, frozen

from corerl.config import LoraConfig, ModelConfig, WeightsConfig
from corerl.engines import UNLIMITED, CacheUse, Engine, GenerateRequest, Received, SamplingParams
from corerl.errors import ConfigError, EngineFailed, WorkerDied
from corerl.weights import Address, bit_sums, build_manifest
from corerl_sglang import engine as module
from corerl_sglang.adapters import Adapters
from corerl_sglang.arguments import VOCABULARY, adapter_misfits
from corerl_sglang.config import SglangConfig
from corerl_sglang.engine import SglangEngine
from corerl_sglang.read import Cut, Sample, read_samples
from corerl_sglang.start import start_engine
from corerl_testing import Stops, character_tokenizer, until_stop
from corerl_transformers.engine import TransformersEngine
from corerl_transformers.spec import TransformersConfig
from tests.engines.models import (
    MOE,
    TIED,
    context,
    drawn_adapters,
    hf_tensors,
    plain_logprobs,
    random_model,
    sequences,
    update,
)
from tests.engines.stopping import assert_cut_at

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("forked_servers")]

STAND_IN = "plugins.sglang.tests.stand_in"
REQUEST = GenerateRequest(
    tokens=np.array([3, 4, 5, 3, 4, 5, 9, 1, 2, 8, 8, 8]),
    offsets=np.array([0, 3, 6, 7, 9, 12]),
    noise_keys=np.array([11, -12, 13, 14, 15]),
    params=SamplingParams(max_tokens=6, stop_tokens=(9,), greedy=True),
)
PLAIN = WeightsConfig()
CONTEXT = 2100  # tokens of a row at most
Start = Callable[..., SglangEngine]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory, forked_servers: None) -> Iterator[Start]:
    """Engines that are closed at the end."""
    engines = []

    def started(
        fields: Mapping[str, Any],
        *,
        ranks: int = 1,
        weights: WeightsConfig = PLAIN,
        stand_in: Mapping[str, Any] = {},
        context_length: int = 0,
        lora: LoraConfig | None = None,
        server: Mapping[str, Any] = {},
        **more: Any,
    ) -> Any:
        own = {"stand_in": dict(stand_in), **server}
        options = SglangConfig(launcher=STAND_IN, tensor_parallel=ranks, requests=2, server=own, **more)
        given = evolve(context(), bundles=ranks, weights=weights, lora=lora, context_length=context_length)
        given = evolve(given, run_dir=str(tmp_path_factory.mktemp("run")))
        engines.append(start_engine(ModelConfig(config=fields), options, given))
        return engines[-1]

    yield started
    for engine in engines:
        engine.close()


@frozen
class Given:
    """What a server would be started with."""

    arguments: dict[str, Any]
    config: dict[str, Any]
    files: set[str]
    engine: SglangEngine


def given_to_server(model: ModelConfig, directory: Path, weights: WeightsConfig = PLAIN) -> Given:
    found: list[tuple[dict[str, Any], dict[str, Any], set[str]]] = []

    def configure(arguments: dict[str, Any]) -> None:
        at = Path(arguments["model_path"])
        found.append((arguments, json.loads((at / "config.json").read_text()), {file.name for file in at.iterdir()}))

    directory.mkdir()
    server = mock.Mock(directory=directory, configure=configure)
    server.get.return_value = {"internal_states": [{"memory_usage": {"weight": 1, "kvcache": 1, "token_capacity": 1}}]}
    engine = SglangEngine(model, SglangConfig(), evolve(context(), weights=weights), server)
    return Given(*found[0], engine)


@pytest.mark.parametrize("raises", ["save_pretrained", "server_arguments", "Popen"])
def test_an_engine_without_a_server_leaves_nothing_behind(
    raises: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    places = {
        "save_pretrained": "transformers.PreTrainedConfig.save_pretrained",
        "server_arguments": "corerl_sglang.engine.server_arguments",
        "Popen": "corerl_sglang.server.subprocess.Popen",
    }
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    options = SglangConfig(launcher=STAND_IN)
    with mock.patch(places[raises], side_effect=OSError("disk full")), pytest.raises(OSError, match="disk full"):
        start_engine(ModelConfig(config=TIED), options, context())
    gc.collect()
    assert list(tmp_path.iterdir()) == []
    assert not [warning for warning in recwarn if warning.category is ResourceWarning]  # of an open socket


def test_the_server_is_given_no_code_of_the_models_directory(tmp_path: Path) -> None:
    code = {"AutoConfig": "poison.Config", "AutoModelForCausalLM": "poison.Model"}
    (tmp_path / "config.json").write_text(json.dumps({**TIED, "auto_map": code}))
    (tmp_path / "poison.py").write_text("raise RuntimeError('imported')")
    given = given_to_server(ModelConfig(path=str(tmp_path), vocabulary=7), tmp_path / "own")
    assert given.arguments[VOCABULARY] == 7
    assert given.arguments["trust_remote_code"] is False and given.arguments["skip_tokenizer_init"] is True
    assert "auto_map" not in given.config and given.files == {"config.json"}


def push(engine: Engine, tensors: Mapping[str, torch.Tensor], version: int, path: Path, **how: Any) -> Received:
    """What the engine says of one update."""
    (received,) = update([engine], tensors, version=version, path=path, **how)
    return received


def said(engine: SglangEngine) -> dict[str, Any]:
    told: dict[str, Any] = engine._server.get("/server_info")
    return told


def await_number(engine: SglangEngine, name: str, number: int) -> None:
    """Until the stand-in counts as many."""
    while said(engine)["stand_in"][name] < number:
        time.sleep(0.05)


def test_it_samples_what_transformers_samples(start: Start, tmp_path: Path) -> None:
    """One server for all that does not end it: starting one takes seconds."""
    engine = start(TIED, deterministic=True, context_length=CONTEXT, stand_in={"retractions": 3})
    assert said(engine)["stand_in"]["log"] == ["freeze"]  # once, before it serves
    with pytest.raises(EngineFailed, match="no weights have arrived yet"):
        engine.generate(REQUEST)

    assert engine.cache_use() == CacheUse(capacity=1000, tokens=120, retracted=0)

    # Greedy, on the first weights: the tokens and log-probs of transformers.
    model = random_model(TIED, seed=1)
    tensors = hf_tensors(model, tmp_path / "one")
    assert "lm_head.weight" not in tensors  # tied
    received = push(engine, tensors, 0, tmp_path / "weights")
    assert received.error == ""
    assert received.bytes == sum(tensor.nbytes for tensor in tensors.values())
    # What it says of its weights is what was sent: all of it, and the whole of each tensor.
    assert engine.weight_sums("float32") == bit_sums(tensors)
    drawn = engine.generate(REQUEST)
    assert engine.cache_use().retracted == 3 * len(REQUEST)
    reference = TransformersEngine(ModelConfig(config=TIED), TransformersConfig(), context())
    assert push(reference, tensors, 0, tmp_path / "reference").error == ""
    expected = reference.generate(REQUEST)
    assert drawn.tokens.tolist() == expected.tokens.tolist()
    assert drawn.offsets.tolist() == expected.offsets.tolist()
    assert drawn.truncated.tolist() == expected.truncated.tolist()
    assert 0 < drawn.truncated.sum() < len(REQUEST)  # both kinds of ending are there
    np.testing.assert_allclose(drawn.logprobs, expected.logprobs, atol=1e-5)
    assert set(drawn.versions) == {0}
    assert drawn.routed_experts is None

    # Sampled: log-probs are of logits / temperature, before top-p, and a row depends on its key alone.
    sampled = evolve(REQUEST, params=evolve(REQUEST.params, greedy=False, temperature=0.7, top_p=0.9, top_k=4))
    drawn = engine.generate(sampled)
    for prompt, response, logprobs in sequences(sampled, drawn):
        plain = plain_logprobs(model, prompt + response, temperature=0.7)
        at = range(len(prompt) - 1, len(prompt) + len(response) - 1)
        np.testing.assert_allclose(logprobs, [float(plain[t, k]) for t, k in zip(at, response, strict=True)], atol=1e-5)
    alone = engine.generate(sampled.row_range(3, 4))
    assert alone.tokens.tolist() == drawn.tokens[drawn.offsets[3] : drawn.offsets[4]].tolist()

    # Watched, a row ends soon after it has enough, and is the same until then.
    stop: tuple[str, ...] = ("1", "27")
    asked_for: list[tuple[int, Sequence[int]]] = []

    def first_is_enough(row: int, tokens: Sequence[int]) -> bool:
        asked_for.append((row, tokens))
        return row % 2 == 0

    longer = evolve(sampled, params=evolve(sampled.params, max_tokens=80, stop_tokens=()))
    drawn = engine.generate(longer)
    with mock.patch.object(module, "LOOK", 3):
        raw = engine.generate_watched(longer, first_is_enough)
        found = until_stop(engine.generate_watched, longer, Stops(character_tokenizer("0123456789>s"), stop))
    sizes, whole = np.diff(raw.offsets), np.diff(drawn.offsets)
    assert (sizes[1::2] == whole[1::2]).all() and (sizes[::2] <= whole[::2]).all() and sizes.sum() < whole.sum()
    for row in range(len(REQUEST)):
        seen = [token for index, tokens in asked_for for token in tokens if index == row]
        kept = raw.tokens[raw.offsets[row] : raw.offsets[row + 1]].tolist()
        assert kept[: len(seen)] == seen and kept == drawn.tokens[drawn.offsets[row] :][: len(kept)].tolist()
    assert any(assert_cut_at(stop, found, drawn, character_tokenizer("0123456789>s")))

    # A row may have all tokens of the context, its last one drawn for an input of all others.
    for begins in (CONTEXT - 1, CONTEXT - 12):
        whole = GenerateRequest(
            tokens=np.arange(begins) % 14 + 2,
            offsets=np.array([0, begins]),
            noise_keys=np.array([1]),
            params=SamplingParams(max_tokens=CONTEXT - begins, greedy=True),
        )
        drawn_whole = engine.generate(whole)
        assert drawn_whole.truncated.all() and len(drawn_whole.tokens) == CONTEXT - begins

    # Other weights; no key or value of the old ones is left to be used.
    model = random_model(TIED, seed=2)
    assert said(engine)["stand_in"]["cached"] > 0
    received = push(engine, hf_tensors(model, tmp_path / "two"), 5, tmp_path / "weights")
    assert received.error == ""
    assert said(engine)["stand_in"]["cached"] == 0
    drawn = engine.generate(REQUEST)
    assert set(drawn.versions) == {5}
    check_greedy(model, drawn)

    # Other tensors load nothing, but then nothing is served until a full set has come.
    wrong = {name: tensor for name, tensor in tensors.items() if name != "model.norm.weight"}
    received = push(engine, wrong, 6, tmp_path / "weights")
    assert received.error.startswith(f"the trainer does not send 1 of the model's {len(tensors)} tensors, such as ")
    with pytest.raises(EngineFailed, match="the update to weights version 6 did not complete .*'model.norm.weight'"):
        engine.generate(REQUEST)

    # What fails in the server's rank is told.
    manifest = build_manifest([(name, tuple(tensor.shape)) for name, tensor in tensors.items()], dtype="float32")
    received = engine.receive(manifest, 7, Address(transport="pigeon", engines=("engine-0",)))
    assert received.error.startswith("unknown transport 'pigeon'") and not received.died

    # Asleep it has no memory and no weights; awake it has the weights' memory alone, until it generates.
    received = push(engine, tensors, 8, tmp_path / "weights")
    assert received.error == ""
    weights, cache = received.bytes, 2**29
    before = len(said(engine)["stand_in"]["log"])
    assert engine.sleep() == weights + cache
    assert engine.sleep() == 0
    with pytest.raises(EngineFailed, match="its weights were put to sleep"):
        engine.generate(REQUEST)
    received = push(engine, tensors, 9, tmp_path / "weights")
    assert received.error == "the engine's weights are asleep; wake it up first"
    assert engine.wake_up() == weights
    assert engine.wake_up() == 0
    with pytest.raises(EngineFailed, match="no weights have arrived since it woke up"):
        engine.generate(REQUEST)
    received = push(engine, tensors, 10, tmp_path / "weights")
    assert received.error == ""
    check_greedy(random_model(TIED, seed=1), engine.generate(REQUEST))
    engine.sleep()
    engine.wake_up()
    engine.sleep()  # the caches still sleep
    engine.wake_up()
    push(engine, tensors, 11, tmp_path / "weights")
    assert set(engine.generate(REQUEST).versions) == {11}
    sleep, wake, caches = "release cuda_graph kv_cache weights", "resume weights", "resume cuda_graph kv_cache"
    assert said(engine)["stand_in"]["log"][before:] == [
        *(sleep, wake, "update", caches),
        *(sleep, wake, "release weights", wake, "update", caches),
    ]

    # A prompt that the server refuses ends the request in its words, and the others are not drawn to their end; nor are
    # those of other calls, which say why.
    long = evolve(
        REQUEST,
        tokens=np.arange(CONTEXT + 10) % 16,
        offsets=np.array([0, 10, CONTEXT + 10]),
        noise_keys=np.array([1, 2]),
        picture=np.zeros(CONTEXT + 10, dtype=np.int32),
    )
    too_long = "refused /generate with status 400: The input is longer than"
    endless = evolve(REQUEST.row_range(0, 1), params=evolve(REQUEST.params, max_tokens=2000, stop_tokens=()))
    with ThreadPoolExecutor(2) as others:
        calls = [others.submit(engine.generate, endless) for _ in range(2)]
        await_number(engine, "running", 2)
        with pytest.raises(EngineFailed, match=too_long):
            engine.generate(long)
        for call in calls:
            with pytest.raises(EngineFailed, match=too_long):
                call.result()
    assert said(engine)["stand_in"]["log"][-1] == "abort"
    assert set(engine.generate(REQUEST).versions) == {11}
    # Nor is a part that reaches the server only after that.
    late: list[Sample] = []
    aborted, post = threading.Event(), engine._server.post

    def delayed(path: str, body: Mapping[str, Any], **how: Any) -> bytes:
        if path == "/generate" and body["input_ids"][0] == [5]:
            aborted.wait()
            answer = post(path, body)
            late.extend(read_samples(answer))
            return answer
        try:
            return post(path, body, **how)
        finally:
            if path == "/abort_request":
                aborted.set()

    refused = evolve(long.row_range(1, 2), params=endless.params)
    parted = GenerateRequest.concatenate([refused, *[endless] * 7, *[evolve(endless, **one_token(5))] * 8])
    with mock.patch.object(engine._server, "post", delayed), pytest.raises(EngineFailed, match=too_long):
        engine.generate(parted)
    assert [sample.meta_info.finish_reason["type"] for sample in late] == ["abort"] * 8
    assert set(engine.generate(REQUEST).versions) == {11}
    with pytest.raises(ConfigError, match="engines.sglang.routed_experts: false"):
        engine.generate(evolve(REQUEST, params=evolve(REQUEST.params, routed_experts=True)))

    # Paused it answers at once, and with nothing.
    engine.pause()
    cut = engine.generate(REQUEST)
    assert (cut.tokens.tolist(), cut.unfinished.tolist(), cut.truncated.any()) == ([], [True] * len(REQUEST), False)
    engine.resume()
    assert set(engine.generate(REQUEST).versions) == {11}

    # Killed while it generates it is a dead replica; an update says so at once.
    threading.Timer(0.3, os.kill, [engine._server.pid, signal.SIGKILL]).start()
    with pytest.raises(WorkerDied, match=r"its server was killed by SIGKILL; its log .* \(during /generate"):
        engine.generate(evolve(REQUEST, params=evolve(REQUEST.params, max_tokens=2000, stop_tokens=())))
    received = push(engine, tensors, 12, tmp_path / "weights")
    assert "engine-0: its server was killed by SIGKILL; its log " in received.error
    assert received.died and "\n" in received.details  # the log's last lines


def test_reported_experts_are_those_of_transformers(start: Start, tmp_path: Path) -> None:
    fields = {**MOE, "num_hidden_layers": 3, "mlp_only_layers": [1]}  # a layer without experts
    reference = TransformersEngine(ModelConfig(config=fields), TransformersConfig(), context())
    engine = start(fields, routed_experts=True)
    asked = evolve(REQUEST, params=evolve(REQUEST.params, routed_experts=True))
    tensors = hf_tensors(random_model(fields, seed=1), tmp_path / "model")
    for each in (engine, reference):
        assert push(each, tensors, 0, tmp_path / "weights").error == ""
    found, expected = engine.generate(asked), reference.generate(asked)
    assert found.tokens.tolist() == expected.tokens.tolist()
    np.testing.assert_array_equal(found.routed_experts, expected.routed_experts)


@pytest.mark.parametrize(
    ("aborts", "what"),
    [
        ("unanswered", r"did not respond for 1 s \(engines.sglang.health_timeout\) and was killed"),
        ("ignored", "had not ended requests 1.5 s after they were aborted and was killed"),
    ],
)
def test_a_server_that_does_not_abort_does_not_block_pause(
    start: Start, tmp_path: Path, aborts: str, what: str
) -> None:
    misbehaviour = {"held_at": 3, "aborts": aborts}
    engine = start(TIED, stand_in=misbehaviour, health_timeout=1.0, server={"watchdog_timeout": 0.5})
    received = push(engine, hf_tensors(random_model(TIED, seed=1), tmp_path / "model"), 0, tmp_path / "w")
    assert received.error == ""
    with ThreadPoolExecutor(1) as others:
        call = others.submit(engine.generate, REQUEST)
        await_number(engine, "holding", 1)
        engine.pause()
        with pytest.raises(WorkerDied, match=f"engine-0: its server {what}"):
            call.result()


def one_token(token: int) -> dict[str, Any]:
    """The prompt of a row."""
    return {"tokens": np.array([token]), "offsets": np.array([0, 1])}


def check_greedy(model: Any, drawn: Any) -> None:
    """Each token is transformers' likeliest after those before it, with its log-prob."""
    for prompt, response, logprobs in sequences(REQUEST, drawn):
        plain = plain_logprobs(model, prompt + response)[len(prompt) - 1 :]
        assert plain.argmax(dim=-1).tolist() == response
        np.testing.assert_allclose(logprobs, plain.max(dim=-1).values.numpy(), atol=1e-5)


LORA = LoraConfig(rank=3, alpha=7.0, rslora=True).settled({})  # SGLang itself knows alpha / rank alone


def adapters_on(weights: Mapping[str, torch.Tensor], seed: int) -> tuple[dict[str, torch.Tensor], ...]:
    return drawn_adapters(ModelConfig(config=TIED), LORA, weights, scale=7 / 3**0.5, seed=seed)


def test_adapters_of_each_version_have_their_own_name(start: Start, tmp_path: Path) -> None:
    held = {"5": "Aborted", "6": "Abort in waiting queue"}
    engine = start(TIED, ranks=2, lora=LORA, stand_in={"held_in_lookup": [2, 3], "held": held})
    path, weights = tmp_path / "weights", hf_tensors(random_model(TIED, seed=1), tmp_path / "one")
    made, _ = adapters_on(weights, 0)
    for version in (1, 2, 3):
        sent = {**weights, **made} if version == 1 else made
        received = push(engine, sent, version, path, ranks=2)
        assert (received.error, received.bytes) == ("", sum(tensor.nbytes for tensor in sent.values()))
    loads = [line for line in said(engine)["stand_in"]["log"] if "load" in line]
    assert loads == ["load v1", "load v2", "load v3", "unload v1"]
    found = engine.generate(REQUEST)

    # Aborted before the scheduler has it, a request is refused: where the engine is paused, nothing has been drawn.
    with ThreadPoolExecutor(1) as others:
        call = others.submit(engine.generate, REQUEST)
        await_number(engine, "holding", 1)
        engine.pause()
        cut = call.result()
        assert (cut.tokens.tolist(), cut.unfinished.tolist()) == ([], [True] * len(REQUEST))
        engine.resume()
        call = others.submit(engine.generate, REQUEST)
        await_number(engine, "holding", 2)
        engine._server.post("/abort_request", {"rid": "", "abort_all": True})
        with pytest.raises(Cut, match="engine-0: its server refused /generate with status 400: Request 3 was aborted"):
            call.result()
    assert engine.generate(REQUEST).tokens.tolist() == found.tokens.tolist()

    # What waited when it was aborted, as it did twice of version 3 and once of 5, keeps its adapters in the server.
    with ThreadPoolExecutor(1) as others:
        for version in range(4, 9):
            assert push(engine, made, version, path, ranks=2).error == ""
            if version < 6:
                call = others.submit(engine.generate, REQUEST)
                await_number(engine, "holding", version - 1)
                engine.pause()
                assert call.result().unfinished.any()
                engine.resume()
    loads = [line for line in said(engine)["stand_in"]["log"] if "load" in line]
    assert [line for line in loads if line.startswith("un")] == [f"unload v{number}" for number in (1, 2, 4, 6)]

    engine.sleep()
    engine.wake_up()
    received = push(engine, made, 9, path, ranks=2)
    assert "send all weights first" in received.error


def test_each_version_held_is_sampled_as_if_alone(start: Start, tmp_path: Path) -> None:
    engine = start(TIED, ranks=2, lora=LORA, weights=WeightsConfig(versions=2))
    assert said(engine)["max_loras_per_batch"] == 3
    reference = TransformersEngine(ModelConfig(config=TIED), TransformersConfig(), context())
    weights, expected, first = hf_tensors(random_model(TIED, seed=1), tmp_path / "one"), {}, {}
    for version, held in {1: (1,), 2: (1, 2), 3: (2, 3), 4: (2, 4), 5: (4, 5)}.items():
        if version == 4:
            engine.forget(3)
        made, merged = adapters_on(weights, version)
        received = push(engine, {**weights, **made} if version == 1 else made, version, tmp_path / "weights", ranks=2)
        assert (received.error, received.held) == ("", held)
        push(reference, merged, version, tmp_path / f"reference-{version}")
        expected[version] = reference.generate(REQUEST)
        for each in (*held, held[0]):
            found = engine.generate(evolve(REQUEST, version=each))
            assert set(found.versions) == {each}
            assert found.tokens.tolist() == expected[each].tokens.tolist()
            np.testing.assert_allclose(found.logprobs, expected[each].logprobs, atol=1e-5)
            assert found.logprobs.tobytes() == first.setdefault(each, found.logprobs.tobytes())
        assert engine.generate(REQUEST).versions.tolist() == [version] * len(expected[version].tokens)
    assert len(set(first.values())) == 5
    loads = [line for line in said(engine)["stand_in"]["log"] if "load" in line]
    assert loads == [*(f"load v{number}" for number in range(1, 5)), "unload v1", "load v5", "unload v2"]
    with pytest.raises(EngineFailed, match="cannot sample from weights version 2: it holds 4, 5"):
        engine.generate(evolve(REQUEST, version=2))


@pytest.mark.parametrize(("last", "top"), [(UNLIMITED, 3), (1, 2), (2, 0)])
def test_prompts_are_scored_as_transformers_scores_them(last: int, top: int, scoring: tuple[Any, Any]) -> None:
    engine, reference = scoring
    asked = evolve(REQUEST, params=evolve(REQUEST.params, scored=last, scored_top=top))
    found, expected = engine.generate(asked), reference.generate(asked)
    assert found.tokens.tolist() == expected.tokens.tolist()
    for name in ("logprobs", "top_logprobs", "top_tokens"):
        np.testing.assert_allclose(getattr(found.scores, name), getattr(expected.scores, name), atol=1e-5)
    assert engine.generate(REQUEST).scores is None


@pytest.fixture(scope="module")
def scoring(start: Start, tmp_path_factory: pytest.TempPathFactory) -> tuple[SglangEngine, TransformersEngine]:
    """Of the same weights."""
    model, at = ModelConfig(config=TIED), tmp_path_factory.mktemp("scoring")
    engine = start(TIED)
    reference = TransformersEngine(model, TransformersConfig(), context())
    tensors = hf_tensors(random_model(TIED, seed=1), at / "one")
    assert push(engine, tensors, 0, at / "weights").error == ""
    push(reference, tensors, 0, at / "reference")
    return engine, reference


def test_adapters_of_an_aborted_version_stay_loaded() -> None:
    posted: list[tuple[str, str]] = []

    class Server:
        def post(self, path: str, body: Mapping[str, Any]) -> bytes:
            posted.append((path, body["lora_name"]))
            return b""

    lora = LoraConfig(rank=2).settled({})
    held = Adapters(Server(), lora, ["q_proj"], ranks=1)  # type: ignore[arg-type]
    manifest, files = build_manifest([], dtype="float32"), []
    for version in range(5):
        room = held.room(manifest)
        files.append(os.stat(room.path).st_ino)
        held.load(version, room, [version])
        if version == 1:
            held.keep(version)
    assert files[3] == files[0] and len(set(files)) == 4  # what the server still has is not written over
    held.close()
    assert not os.path.exists(room.path)
    assert [name for path, name in posted if path == "/unload_lora_adapter"] == ["v0", "v2"]


@pytest.mark.parametrize(
    ("modules", "told"),
    [
        (["v_proj"], "SGLang holds q_proj, k_proj, v_proj as one, but only v_proj would have adapters"),
        (["up_proj", "down_proj"], "SGLang holds gate_proj, up_proj as one, but only up_proj would have adapters"),
        (["in_proj_qkv", "o_proj"], "SGLang has no adapters of in_proj_qkv; leave them out of lora.targets"),
        (["q_proj", "k_proj", "v_proj", "down_proj"], ""),
    ],
)
def test_targets_that_sglang_would_silently_leave_out_are_refused(modules: list[str], told: str) -> None:
    assert next(adapter_misfits(modules), "").startswith(told) and bool(list(adapter_misfits(modules))) == bool(told)
