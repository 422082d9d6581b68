import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from transformers import AutoModelForImageTextToText

from corerl.config import LoraConfig, ModelConfig, WeightsConfig
from corerl.engines import (
    UNLIMITED,
    GenerateRequest,
    Generation,
    PromptScores,
    SamplingParams,
    Stops,
    append,
    continued,
    split,
)
from corerl.errors import EngineFailed
from corerl.ops import hash_keys
from corerl.weights import bit_sums, build_manifest, converted_manifest
from corerl_testing import character_tokenizer, convert_bucket, drawn_model, smallest_config, until_stop
from corerl_transformers.engine import TransformersEngine, keep_likeliest
from corerl_transformers.spec import TransformersConfig
from tests.engines.models import (
    MOE,
    TIED,
    UNTIED,
    VOCAB,
    context,
    drawn_adapters,
    hf_tensors,
    pause_after,
    plain_logprobs,
    random_model,
    sequences,
    spread,
    update,
)
from tests.pictures import FAMILIES, of_pictures, tensors_in, write_pictures

PARAMS = SamplingParams(temperature=0.8, max_tokens=6, stop_tokens=(2, 9))


def engine(fields: Mapping[str, Any], *, index: int = 0, batch_size: int = 512) -> TransformersEngine:
    return TransformersEngine(ModelConfig(config=fields), TransformersConfig(batch_size=batch_size), context(index))


def request(rows: int, params: SamplingParams = PARAMS, *, step: int = 0) -> GenerateRequest:
    """Prompts of 1 to 7 tokens, so that nearly every row is padded."""
    rng = np.random.default_rng(3)
    lengths = rng.integers(1, 8, size=rows)
    return GenerateRequest(
        tokens=rng.integers(4, VOCAB, size=lengths.sum()),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        noise_keys=hash_keys(0, step, np.arange(rows), np.zeros(rows, dtype=np.int64)),
        params=params,
    )


def same_prompt(rows: int, params: SamplingParams) -> GenerateRequest:
    """One prompt, `rows` samples."""
    prompt = np.array([1, 5, 8])
    return GenerateRequest(
        tokens=np.tile(prompt, rows),
        offsets=np.arange(rows + 1) * len(prompt),
        noise_keys=hash_keys(0, 0, np.zeros(rows, dtype=np.int64), np.arange(rows)),
        params=params,
    )


def assert_same_samples(a: Generation, b: Generation) -> None:
    assert a.tokens.tolist() == b.tokens.tolist()
    assert a.offsets.tolist() == b.offsets.tolist()
    assert a.truncated.tolist() == b.truncated.tolist()
    np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5, rtol=0)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> tuple[TransformersEngine, Any]:
    """An engine at version 3 of a plain model's weights, and that model; nobody changes the engine."""
    model = random_model(TIED, seed=1)
    served = engine(TIED)
    tensors = hf_tensors(model, tmp_path_factory.mktemp("hf"))
    (received,) = update([served], tensors, version=3, path=tmp_path_factory.mktemp("w"))
    assert received.error == ""
    return served, model


def assert_logprobs_of(
    model: Any, asked: GenerateRequest, generation: Generation, *, known: int | None = None, atol: float = 1e-5
) -> None:
    """Those of the generation are those of this model, over the first `known` tokens where others are none."""
    for prompt, response, logprobs in sequences(asked, generation):
        whole = plain_logprobs(model, prompt + response, asked.params.temperature)[len(prompt) - 1 :]
        expected = whole[:, :known].log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(logprobs), expected, atol=atol, rtol=0)


@pytest.mark.parametrize(
    ("fields", "precision", "atol"),
    [(TIED, "float32", 1e-5), (UNTIED, "float32", 1e-5), (MOE, "float32", 1e-5), (UNTIED, "float16", 2e-2)],
    ids=["tied", "untied", "moe", "float16"],
)
def test_logprobs_equal_a_plain_forward_pass(
    fields: Mapping[str, Any], precision: str, atol: float, tmp_path: Path
) -> None:
    model = random_model(fields, seed=1)
    tensors = {name: each.to(getattr(torch, precision)) for name, each in hf_tensors(model, tmp_path / "hf").items()}
    own = evolve(context(), precision=precision)
    served = TransformersEngine(ModelConfig(config=fields), TransformersConfig(), own)
    (received,) = update([served], tensors, version=0, path=tmp_path / "weights")
    assert received.error == "" and received.bytes == sum(tensor.nbytes for tensor in tensors.values())
    asked = request(24)
    assert_logprobs_of(model, asked, served.generate(asked), atol=atol)


@pytest.mark.parametrize("model_type", ["gemma2", "gpt_oss", "qwen3_next", "falcon_h1", "bloom"])
def test_greedy_samples_of_special_attentions_equal_generate(model_type: str, tmp_path: Path) -> None:
    config = smallest_config(model_type)
    model, params = drawn_model(config), SamplingParams(temperature=1.0, max_tokens=12, stop_tokens=(2,), greedy=True)
    tensors = hf_tensors(model, tmp_path / "hf")
    served = TransformersEngine(ModelConfig(path=str(tmp_path / "hf")), TransformersConfig(), context())
    assert [each.error for each in update([served], tensors, version=0, path=tmp_path / "weights")] == [""]
    asked = request(6, params)
    generation = served.generate(asked)
    for prompt, response, _ in sequences(asked, generation):
        options = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": 2, "pad_token_id": 0}
        assert prompt + response == model.generate(torch.tensor([prompt]), **options)[0].tolist()  # type: ignore[operator]
    assert_logprobs_of(model, asked, generation)


def test_it_tells_of_each_row_as_it_ends(tied: tuple[TransformersEngine, Any]) -> None:
    served, _ = tied
    finished: list[int] = []
    sizes = np.diff(served.generate(request(12), finished.append).offsets)
    assert finished == [int((sizes == size).sum()) for size in range(1, PARAMS.max_tokens + 1) if (sizes == size).any()]
    assert sum(finished) == 12 and len(finished) > 1


def test_a_row_ends_at_its_own_limit(tied: tuple[TransformersEngine, Any]) -> None:
    served, _ = tied
    asked = request(12)
    whole = served.generate(asked)
    limits = np.random.default_rng(0).integers(1, PARAMS.max_tokens + 1, size=12)
    cut = served.generate(evolve(asked, limits=limits))
    rows = zip(sequences(asked, whole), sequences(asked, cut), limits, strict=True)
    assert all(shorter == response[:limit] for (_, response, _), (_, shorter, _), limit in rows)
    ended = np.isin(cut.tokens[cut.offsets[1:] - 1], PARAMS.stop_tokens)
    assert cut.truncated.tolist() == (~ended).tolist() and not cut.unfinished.any()


def test_reported_experts_equal_a_plain_forward_pass(tmp_path: Path) -> None:
    model = random_model(MOE, seed=1)
    served = engine(MOE, batch_size=10)
    update([served], hf_tensors(model, tmp_path / "hf"), version=0, path=tmp_path / "weights")
    asked = request(24)
    routed = served.generate(evolve(asked, params=evolve(PARAMS, routed_experts=True)))
    experts = routed.routed_experts
    assert experts is not None and experts.dtype == np.int16
    assert len(set(np.diff(routed.offsets).tolist())) > 1  # some rows go on where others have ended
    start = 0
    for prompt, response, _ in sequences(asked, routed):
        tokens = torch.tensor([prompt + response])
        logits = model(input_ids=tokens, output_router_logits=True).router_logits  # of each layer: [tokens, experts]
        wanted = torch.stack([layer.topk(2).indices for layer in logits], dim=1)
        wanted[-1] = -1  # was sampled, and went through nothing
        assert experts[start : start + len(wanted)].tolist() == wanted.tolist()
        start += len(wanted)
    assert start == len(experts)
    assert_same_samples(routed, served.generate(asked))
    assert served.generate(asked).routed_experts is None


def test_samples_do_not_depend_on_batches_or_engines(tmp_path: Path) -> None:
    tensors = hf_tensors(random_model(TIED, seed=1), tmp_path / "hf")
    engines = [engine(TIED), engine(TIED, index=1, batch_size=5), engine(TIED, index=2, batch_size=1)]
    assert [received.error for received in update(engines, tensors, version=1, path=tmp_path / "w")] == ["", "", ""]
    asked = request(31)
    whole = engines[0].generate(asked)
    assert_same_samples(whole, engines[1].generate(asked))
    assert_same_samples(whole, engines[2].generate(asked))
    assert_same_samples(whole, spread(engines, asked))
    other = evolve(asked, noise_keys=request(31, step=1).noise_keys)
    assert whole.tokens.tolist() != engines[0].generate(other).tokens.tolist()


def test_a_sample_ends_at_its_stop_token_or_limit(tied: tuple[TransformersEngine, Any]) -> None:
    served, _ = tied
    asked = request(200)
    generation = served.generate(asked)
    endings = {True: 0, False: 0}
    for (_, response, _), truncated in zip(sequences(asked, generation), generation.truncated, strict=True):
        assert not set(response[:-1]) & {2, 9}
        assert truncated == (response[-1] not in {2, 9})
        assert len(response) == 6 if truncated else 1 <= len(response) <= 6
        endings[bool(truncated)] += 1
    assert min(endings.values()) > 10
    assert generation.versions.tolist() == [3] * len(generation.tokens)
    endless = served.generate(evolve(asked, params=evolve(PARAMS, stop_tokens=())))
    assert np.diff(endless.offsets).tolist() == [6] * 200 and endless.truncated.all()


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Cells that expect fewer than 5 are append into one."""
    expected = probabilities * counts.sum()
    rare = expected < 5
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    return float(((counts - expected) ** 2 / expected.clamp(min=1)).sum())


def test_samples_are_distributed_as_the_softmax_of_logits_over_temperature(
    tied: tuple[TransformersEngine, Any],
) -> None:
    served, model = tied
    params = SamplingParams(temperature=1.5, max_tokens=2)
    tokens = torch.from_numpy(served.generate(same_prompt(6000, params)).tokens).view(-1, 2)
    first = plain_logprobs(model, [1, 5, 8, 0], 1.5)[-1].exp().double()
    assert chi_square(torch.bincount(tokens[:, 0], minlength=VOCAB).double(), first) < 37.7  # 99.9 %, 15 degrees
    likeliest = int(first.argmax())
    then = tokens[tokens[:, 0] == likeliest, 1]
    second = plain_logprobs(model, [1, 5, 8, likeliest, 0], 1.5)[-1].exp().double()
    assert chi_square(torch.bincount(then, minlength=VOCAB).double(), second) < 37.7


@pytest.mark.parametrize("more", [{}, {"top_p": 0.9}, {"greedy": True}], ids=["all", "top_p", "greedy"])
def test_ids_beyond_the_vocabulary_are_never_sampled(tmp_path: Path, more: Mapping[str, Any]) -> None:
    model = random_model(TIED, seed=1)
    served = TransformersEngine(ModelConfig(config=TIED, vocabulary=10), TransformersConfig(), context())
    update([served], hf_tensors(model, tmp_path / "hf"), version=0, path=tmp_path / "weights")
    asked = same_prompt(64, evolve(PARAMS, **more))
    generation = served.generate(asked)
    assert generation.tokens.max() < 10
    assert_logprobs_of(model, asked, generation, known=10)


@pytest.mark.parametrize("more", [{"top_p": 0.7}, {"top_k": 3}], ids=["top_p", "top_k"])
def test_the_likeliest_alone_are_sampled_with_full_logprobs(
    tied: tuple[TransformersEngine, Any], more: Mapping[str, Any]
) -> None:
    served, model = tied
    params = SamplingParams(temperature=1.5, max_tokens=1, **more)
    generation = served.generate(same_prompt(2000, params))
    full = plain_logprobs(model, [1, 5, 8, 0], 1.5)[-1]
    kept = keep_likeliest(full[None], params.top_p, params.top_k)[0].isfinite()
    assert 1 < kept.sum() < VOCAB and set(generation.tokens.tolist()) == set(kept.nonzero()[:, 0].tolist())
    counts = torch.bincount(torch.from_numpy(generation.tokens), minlength=VOCAB).double()
    assert chi_square(counts, torch.where(kept, full.double(), -torch.inf).softmax(-1)) < 37.7
    np.testing.assert_allclose(generation.logprobs, full[torch.from_numpy(generation.tokens)], atol=1e-5, rtol=0)


def test_top_p_and_top_k_keep_the_likeliest_tokens() -> None:
    logprobs = torch.tensor([[0.1, 0.5, 0.3, 0.1], [0.97, 0.01, 0.01, 0.01]]).log()
    for top_p, top_k, expected in [
        (0.4, 0, [[False, True, False, False], [True, False, False, False]]),
        (0.6, 0, [[False, True, True, False], [True, False, False, False]]),
        (1.0, 0, [[True] * 4, [True] * 4]),
        (0.6, 3, [[False, True, True, False], [True, False, False, False]]),
        (0.99, 2, [[False, True, True, False], [True, True, False, False]]),
        (1.0, 9, [[True] * 4, [True] * 4]),
    ]:
        kept = keep_likeliest(logprobs, top_p, top_k)
        # Of equally likely tokens any may be kept.
        assert kept.isfinite().sum(1).tolist() == [sum(row) for row in expected]
        assert torch.where(kept.isfinite(), kept, logprobs).equal(logprobs)
        assert kept[0].isfinite().tolist() == expected[0] and kept[1, 0].isfinite()


def test_a_models_generation_defaults_are_not_applied(tied: tuple[TransformersEngine, Any], tmp_path: Path) -> None:
    served, model = tied
    asked = request(16)
    directory = tmp_path / "model"
    tensors = hf_tensors(model, directory)
    (directory / "generation_config.json").write_text(
        '{"do_sample": true, "top_k": 1, "temperature": 0.1, "repetition_penalty": 3.0, "eos_token_id": [4, 5, 6, 7]}'
    )
    from_directory = TransformersEngine(ModelConfig(path=str(directory)), TransformersConfig(), context())
    (received,) = update([from_directory], tensors, version=3, path=tmp_path / "w")
    assert received.error == ""
    assert_same_samples(served.generate(asked), from_directory.generate(asked))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sums_of_fused_and_wider_weights_equal_those_sent(tmp_path: Path, dtype: str) -> None:
    tensors = hf_tensors(random_model(MOE, seed=1), tmp_path / "hf")
    sent = {name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors.items()}
    served = engine(MOE)
    update([served], sent, version=1, path=tmp_path / "w")
    bits = {"float32": torch.int32, "bfloat16": torch.int16}[dtype]
    wanted = {name: int(tensor.view(bits).long().sum()) for name, tensor in sent.items()}
    assert served.weight_sums(dtype) == wanted
    assert len({*wanted.values()}) > len(wanted) / 2  # norms begin as ones, and are alike
    next(iter(served._views.values())).view(-1)[0] += 1.0
    assert served.weight_sums(dtype) != wanted


def test_sums_are_taken_in_each_tensors_own_dtype(tmp_path: Path) -> None:
    sent = {name: tensor.bfloat16() for name, tensor in hf_tensors(random_model(TIED, seed=1), tmp_path / "hf").items()}
    manifest = build_manifest([(name, tuple(tensor.shape)) for name, tensor in sent.items()], dtype="bfloat16")
    own = converted_manifest(manifest, fp8=False, dtypes={"model.norm.weight": "float32"})
    (bucket,), (as_sent,) = manifest.buckets, own.buckets
    exact = torch.rand(sent["model.norm.weight"].shape)
    flat, out = torch.cat([tensor.flatten() for tensor in sent.values()]), torch.empty(as_sent.numel, dtype=torch.uint8)
    convert_bucket(bucket, flat, as_sent, out, {"model.norm.weight": exact})
    served = engine(TIED)
    served._load(as_sent, out)
    wanted = {name: int(tensor.view(torch.int16).long().sum()) for name, tensor in sent.items()}
    wanted["model.norm.weight"] = int(exact.view(torch.int32).long().sum())
    assert served.weight_sums(own.dtype) == wanted


def test_sleep_frees_parameters_and_waking_needs_fresh_weights(tmp_path: Path) -> None:
    model = random_model(TIED, seed=1)
    tensors = hf_tensors(model, tmp_path / "hf")
    size = sum(tensor.numel() * 4 for tensor in tensors.values())  # a tied embedding is in the file once
    served = engine(TIED)
    update([served], tensors, version=1, path=tmp_path / "w")
    before = served.generate(request(4))
    assert served.sleep() == size and served.sleep() == 0
    with pytest.raises(EngineFailed, match="its weights were put to sleep"):
        served.generate(request(2))
    (received,) = update([served], tensors, version=2, path=tmp_path / "w")
    assert received.error == "the engine's weights are asleep; wake it up first"
    assert served.wake_up() == size and served.wake_up() == 0
    with pytest.raises(EngineFailed, match="no weights have arrived since it woke up"):
        served.generate(request(2))
    missing = {name: tensor for name, tensor in tensors.items() if name != "model.norm.weight"}
    (received,) = update([served], missing, version=3, path=tmp_path / "w")
    assert received.error.startswith("the trainer does not send 1 of the model's ")
    (received,) = update([served], tensors, version=4, path=tmp_path / "w")
    assert received.error == ""
    assert_same_samples(served.generate(request(4)), before)


def test_an_engine_closes_at_once_while_it_generates(tmp_path: Path) -> None:
    served = engine(TIED)
    update([served], hf_tensors(random_model(TIED, seed=1), tmp_path / "hf"), version=1, path=tmp_path / "w")
    long, drawn = evolve(PARAMS, max_tokens=2000, stop_tokens=()), list[Generation]()
    drawing = threading.Thread(target=lambda: drawn.append(served.generate(request(2, long))))
    drawing.start()
    while served._serving._busy.empty(within=0.0):
        assert drawing.is_alive()
    served.close()
    drawing.join()
    assert drawn[0].unfinished.tolist() == [True, True]


# ---- prompts ---------------------------------------------------------------------------------------------------------


def assert_scores_of(model: Any, asked: GenerateRequest, scores: PromptScores | None, *, known: int = VOCAB) -> None:
    """Those of a plain forward pass, in float64 from its logits on."""
    assert scores is not None
    last, top = asked.params.scored, asked.params.scored_top
    for start, row in zip(asked.offsets, asked.by_row(), strict=False):
        count = min(last, len(row) - 1)
        own = scores.part(start, start + len(row))
        assert np.isnan(own.logprobs[: len(row) - count]).all()
        assert np.isnan(own.top_logprobs[: len(row) - count]).all() and own.top_tokens.shape == (len(row), top)
        if count == 0:
            continue
        with torch.no_grad():
            logits = model(input_ids=torch.tensor(row)[None], use_cache=False).logits[0, -count - 1 : -1, :known]
        wanted = logits.double().log_softmax(-1)
        of_tokens = wanted.gather(1, torch.tensor(row[-count:])[:, None])[:, 0]
        np.testing.assert_allclose(own.logprobs[-count:], of_tokens, atol=1e-5)
        best, tokens = wanted.topk(top)
        np.testing.assert_allclose(own.top_logprobs[-count:], best, atol=1e-5)
        assert own.top_tokens[-count:].tolist() == tokens.tolist()


@pytest.mark.parametrize(("last", "top"), [(UNLIMITED, 3), (2, 5), (1, 0)])
def test_scores_of_prompts_equal_a_plain_forward_pass(
    last: int, top: int, tied: tuple[TransformersEngine, Any]
) -> None:
    served, model = tied
    asked = request(12, evolve(PARAMS, temperature=0.7, scored=last, scored_top=top))
    found = served.generate(asked)
    assert_same_samples(found, served.generate(evolve(asked, params=evolve(asked.params, scored=0))))
    assert_scores_of(model, asked, found.scores)
    parts = split(served.generate(GenerateRequest.concatenate(asked.parts(3))), asked.parts(3))
    for part, own in zip(asked.parts(3), parts, strict=True):
        assert_scores_of(model, part, own.scores)


def test_scores_give_padding_of_the_embedding_no_probability(tmp_path: Path) -> None:
    model = random_model(TIED, seed=1)
    padded = TransformersEngine(ModelConfig(config=TIED, vocabulary=11), TransformersConfig(), context())
    update([padded], hf_tensors(model, tmp_path / "hf"), version=0, path=tmp_path / "w")
    asked = request(6, evolve(PARAMS, scored=UNLIMITED, scored_top=11))
    asked = evolve(asked, tokens=asked.tokens % 11)
    assert_scores_of(model, asked, padded.generate(asked).scores, known=11)


def test_scores_are_those_of_whole_prompts_with_stop_texts(tied: tuple[TransformersEngine, Any]) -> None:
    """For which a request is made in parts, each with a longer prompt."""
    served, model = tied
    texts = Stops(character_tokenizer("0123456789>s"), ["00000"])
    asked = request(4, evolve(PARAMS, max_tokens=100, stop_tokens=(), scored=UNLIMITED, scored_top=2))
    assert_scores_of(model, asked, until_stop(served.generate_watched, asked, texts).scores)


# ---- adapters --------------------------------------------------------------------------------------------------------


LORA = LoraConfig(rank=3, alpha=7.0).settled({})
Tensors = dict[str, torch.Tensor]


def adapters_on(weights: Mapping[str, torch.Tensor], seed: int) -> tuple[Tensors, Tensors]:
    return drawn_adapters(ModelConfig(config=TIED), LORA, weights, scale=7 / 3, seed=seed)


@pytest.mark.parametrize(
    "held",  # after each update; the weights that come with the fourth may be others
    [{1: (1,), 2: (2,), 3: (3,), 4: (4,)}, {1: (1,), 2: (1, 2), 3: (2, 3), 4: (4,)}],
    ids=["one version", "two versions"],
)
def test_separate_adapters_sample_as_merged_weights_do(held: dict[int, tuple[int, ...]], tmp_path: Path) -> None:
    own = evolve(context(), lora=LORA, weights=WeightsConfig(versions=max(map(len, held.values()))))
    served, plain = TransformersEngine(ModelConfig(config=TIED), TransformersConfig(), own), engine(TIED)
    weights = hf_tensors(random_model(TIED, seed=1), tmp_path / "hf")
    sent = {version: adapters_on(weights, version) for version in held}
    whole = {version: {**weights, **sent[version][0]} for version in (1, 4)}
    expected, first = {}, {}
    (alone,) = update([served], sent[1][0], version=0, path=tmp_path / "w")
    assert alone.error.startswith("adapters have arrived alone, but the engine lacks the weights that they adapt; ")
    for version, (adapters, merged) in sent.items():
        (received,) = update([served], came := whole.get(version, adapters), version=version, path=tmp_path / "w")
        assert (received.error, received.held) == ("", held[version])
        assert received.bytes == sum(tensor.nbytes for tensor in came.values())
        assert served.weight_sums("float32") == bit_sums({**weights, **adapters})
        update([plain], merged, version=version, path=tmp_path / "plain")
        expected[version] = plain.generate(request(8))
        for each in (*held[version], *reversed(held[version])):
            found = served.generate(evolve(request(8), version=each))
            assert set(found.versions) == {each}
            assert_same_samples(found, expected[each])
            first.setdefault(each, found.logprobs.tobytes())
            assert found.logprobs.tobytes() == first[each]
        assert_same_samples(served.generate(request(8)), expected[version])
        with pytest.raises(EngineFailed, match=rf"cannot sample from weights version 0: it holds .*{version}$"):
            served.generate(evolve(request(8), version=0))
    assert len(set(first.values())) == 4
    served.sleep()
    served.wake_up()
    (alone,) = update([served], sent[2][0], version=5, path=tmp_path / "w")
    assert alone.error.startswith("adapters have arrived alone")
    update([served], {**weights, **sent[2][0]}, version=6, path=tmp_path / "w")
    assert_same_samples(served.generate(evolve(request(8), version=6)), expected[2])
    with pytest.raises(EngineFailed, match="cannot sample from weights version 4: it holds 6"):
        served.generate(evolve(request(8), version=4))


# ---- interrupted -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [TIED, MOE], ids=["tied", "moe"])
def test_interrupted_samples_equal_uninterrupted_ones(
    fields: Mapping[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = engine(fields, batch_size=4)
    update([served], hf_tensors(random_model(fields, seed=1), tmp_path / "hf"), version=1, path=tmp_path / "w")
    asked = request(10, evolve(PARAMS, routed_experts=fields is MOE))
    whole = served.generate(asked)
    asks = 3
    parts: list[tuple[GenerateRequest, Generation]] = []
    left = asked
    while True:
        with monkeypatch.context() as patch:
            pause_after(patch, asks)
            parts.append((left, served.generate(left)))
        if not parts[-1][1].unfinished.any():
            break
        left = continued(*parts[-1])
    assert len(parts) > 3
    first = parts[0][1]
    assert np.diff(first.offsets)[4:].tolist() == [0] * 6 and first.unfinished[4:].all()  # nothing but the first run
    assert not (first.unfinished & first.truncated).any()
    together = parts[-1][1]
    for before, drawn in reversed(parts[:-1]):
        together = append(before, drawn, together)
    assert_same_samples(together, whole)
    assert not together.unfinished.any()
    if fields is MOE:
        np.testing.assert_array_equal(together.routed_experts, whole.routed_experts)


def test_each_token_has_its_own_version_and_logprob(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served, models = engine(TIED), {version: random_model(TIED, seed=version) for version in (1, 2)}

    def push(version: int) -> None:
        update([served], hf_tensors(models[version], tmp_path / f"hf{version}"), version=version, path=tmp_path / "w")

    push(1)
    asked = request(12)
    with monkeypatch.context() as patch:
        pause_after(patch, 3)
        drawn = served.generate(asked)
    push(2)
    together = append(asked, drawn, served.generate(continued(asked, drawn)))
    assert set(together.versions) == {1, 2}
    ends = np.split(together.versions, together.offsets[1:-1])
    for (prompt, response, logprobs), versions in zip(sequences(asked, together), ends, strict=True):
        assert (np.diff(versions) >= 0).all() and len(response) <= PARAMS.max_tokens
        for position, (version, logprob) in enumerate(zip(versions, logprobs, strict=True)):
            wanted = plain_logprobs(models[version], prompt + response, PARAMS.temperature)
            token = len(prompt) + position
            assert logprob == pytest.approx(float(wanted[token - 1, response[position]]), abs=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_of_a_model_that_reads_pictures_it_holds_the_text(family: str, tmp_path: Path) -> None:
    directory = write_pictures(family, tmp_path / "hf")
    tensors = {name: tensor for name, tensor in tensors_in(directory).items() if not of_pictures(name)}
    served = TransformersEngine(ModelConfig(path=str(directory)), TransformersConfig(), context())
    assert [each.error for each in update([served], tensors, version=0, path=tmp_path / "weights")] == [""]
    sums = served.weight_sums("float32")
    assert sums is not None and sums.keys() == tensors.keys()
    asked = request(12)
    model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()
    assert_logprobs_of(model, asked, served.generate(asked))
