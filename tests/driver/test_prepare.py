from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import ray
import torch
from attrs import evolve

from corerl.config.schema import (
    AlgorithmConfig,
    BackendChoice,
    ModelConfig,
    RewardConfig,
    RunConfig,
    WeightsConfig,
)
from corerl.data.prompts import PromptStream
from corerl.driver.prepare import (
    prepare,
    require_same_source,
    resolve_device,
    title,
)
from corerl.driver.sampling import make_sampler, unseen_tokens
from corerl.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    ModelError,
    PluginIncompatible,
    Unsupported,
)
from corerl.models.config import hf_config
from corerl.models.tokenizer import character_tokenizer
from corerl.testing.models import tiny_fields
from tests.driver.saved import CRITIC, DATA, config_in, make_config, make_model, save


def test_a_sound_config_is_prepared_without_a_process_or_a_file(tmp_path: Path) -> None:
    config = config_in(tmp_path / "run", rollout={"engine": "fake", "prompts": 8, "samples": 4, "replicas": 2})
    prepared = prepare(evolve(config, cluster=evolve(config.cluster, device="cpu", placement="disaggregated")))
    assert (prepared.device, prepared.run_dir, prepared.resume, prepared.state) == ("cpu", tmp_path / "run", None, {})
    assert prepared.plan.seating.places == {"actor": (0,), "engines": (1, 2)}
    assert prepared.tokenizer("0>")["input_ids"] == [1, 4, 14]
    assert prepared.params.stop_tokens == (2,)
    assert len(prepared.prompts.held_out) == 16
    assert prepared.plan.roles["actor"].assignments[0].config.resume == ""
    assert title(prepared) == "grpo on sort-digits: qwen3 from scratch, 1 plain rank, 2 fake engines, cpu"
    assert not ray.is_initialized() and not (tmp_path / "run").exists()


def test_a_mix_is_titled_by_the_names_of_its_sources(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "0>"}\n{"prompt": "1>"}\n')
    sources = [{"source": "sort-digits"}, {"source": str(tmp_path / "rows.jsonl"), "name": "mine"}]
    prepared = prepare(config_in(tmp_path / "run", data={"held_out": 1, "sources": sources}))
    assert title(prepared).startswith("grpo on sort-digits + mine: qwen3 from scratch")


def test_a_resumed_run_is_told_where_its_checkpoint_stands(tmp_path: Path) -> None:
    config = config_in(tmp_path, "auto")
    checkpoint = save(tmp_path, config, make_model(config, seed=1), step=4)
    prepared = prepare(config)
    assert prepared.resume == checkpoint
    assert prepared.state["rollout_step"] == 4
    assert prepared.plan.roles["actor"].assignments[0].config.resume == str(checkpoint / "actor")


def test_versions_that_do_not_fit_are_told_before_anything_starts_beside_the_other_problems(old_pluggy: str) -> None:
    with pytest.raises(PluginIncompatible) as alone:
        prepare(make_config())
    assert alone.value.message == old_pluggy
    with pytest.raises(ConfigError) as caught:
        prepare(make_config(reward={"name": "none-such"}))
    assert caught.value.message.splitlines()[0].startswith("reward.name: unknown reward 'none-such'")
    assert caught.value.message.splitlines()[1:] == [old_pluggy]


# ---- prompts and the model's context ---------------------------------------------------------------------------------


def prompts_of(tmp_path: Path, *digits: int) -> dict[str, Any]:
    """A data set of prompts of so many digits, none of them held out."""
    path = tmp_path / "digits.jsonl"
    path.write_text("".join(json.dumps({"prompt": "7" * n}) + "\n" for n in digits))
    return {"source": str(path), "held_out": 0}


def test_prompts_that_leave_no_room_for_a_response_are_left_out_and_told(tmp_path: Path) -> None:
    model = {**DATA["model"], "config": {**DATA["model"]["config"], "max_position_embeddings": 30}}
    rollout = {"engine": "fake", "prompts": 2, "samples": 4, "max_tokens": 20}
    data = prompts_of(tmp_path, 9, 10, 9, 15)  # <bos> before them
    prepared = prepare(config_in(tmp_path / "run", model=model, data=data, rollout=rollout))
    assert prepared.longest_prompt == 10
    assert {prompt.index for prompt in PromptStream(prepared.prompts, 0).take(4)} == {0, 2}
    assert prepared.too_long == (
        "data: 2 of 4 prompts are skipped: they have up to 16 tokens, but at most 10 fit with rollout.max_tokens=20 "
        "(the model has max_position_embeddings=30)"
    )
    more = prepare(config_in(tmp_path / "run", model=model, data=data, rollout={**rollout, "context_length": 36}))
    assert (more.longest_prompt, more.too_long) == (16, "")


def test_a_context_that_no_prompt_fits_into_is_refused(tmp_path: Path) -> None:
    rollout = {"engine": "fake", "prompts": 2, "samples": 4, "max_tokens": 20, "context_length": 20}
    data = prompts_of(tmp_path, 9, 10)
    with pytest.raises(ConfigError, match=r"^rollout.max_tokens: 20 leaves no room for a prompt, rollout.con"):
        prepare(config_in(tmp_path / "run", data=data, rollout=rollout))
    with pytest.raises(
        DataError, match=r"^data.source: all 2 training prompts .*: they have up to 11 tokens, but at most 9 fit"
    ):
        prepare(config_in(tmp_path / "run", data=data, rollout={**rollout, "context_length": 29}))


# ---- chats -----------------------------------------------------------------------------------------------------------


def chats_of(tmp_path: Path, *, bad: int) -> dict[str, Any]:
    """A model and 20 chats, of which its tokenizer's template refuses one."""
    tokenizer = character_tokenizer("0123456789>s")
    tokenizer.chat_template = (
        "{% if messages | length > 1 %}{{ raise_exception('one at a time') }}{% endif %}{{ messages[0].content }}>"
        "{% if brief %}s{% endif %}"
    )
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    rows = [{"prompt": [{"role": "user", "content": "7"}] * (1 + (n == bad))} for n in range(20)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "model": {**DATA["model"], "tokenizer": str(tmp_path / "tokenizer")},
        "data": {"source": str(tmp_path / "chats.jsonl"), "held_out": 2},
    }


def test_a_chat_that_the_template_refuses_is_an_error_or_left_out_before_anything_starts(tmp_path: Path) -> None:
    tables = chats_of(tmp_path, bad=13)
    why = r"chats.jsonl:14: the tokenizer's chat template rejects its messages \(TemplateError: one at a time\); "
    with pytest.raises(DataError, match=rf"^data.source: .*{why}.*correct the row, or set data.refused='skip'"):
        prepare(config_in(tmp_path / "run", **tables))
    tables["data"]["refused"] = "skip"
    prepared = prepare(config_in(tmp_path / "run", **tables))
    assert prepared.prompts.left_out == {13}
    assert prepared.chats.finish().startswith("data: 1 of 20 prompts are skipped, because the chat template refuses")


def test_many_chats_are_checked_after_a_run_is_prepared_and_by_a_mere_check_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("corerl.driver.chats.FEW", 10)
    config = config_in(tmp_path / "run", **chats_of(tmp_path, bad=13))
    prepared = prepare(config)
    with pytest.raises(DataError, match=r"chats.jsonl:14: "):
        prepared.chats.finish()  # before the first prompt is drawn
    with pytest.raises(DataError, match=r"chats.jsonl:14: "):
        prepare(config, starting=False)


def test_arguments_of_the_template_reach_every_prompt_that_is_sampled(tmp_path: Path) -> None:
    tables = chats_of(tmp_path, bad=99)
    tables["data"]["chat_template_options"] = {"brief": True}
    prepared = prepare(config_in(tmp_path / "run", **tables))
    sampler = make_sampler(prepared, Mock(), None, Mock())
    request = sampler.request([prepared.prompts.prompt(0)], rollout_step=0, samples=1, params=prepared.params)
    assert prepared.tokenizer.decode(request.tokens) == "7>s"
    tables["data"]["chat_template_options"] = {"breif": True}
    with pytest.raises(ConfigError, match="^data.chat_template_options.breif: the tokenizer's chat template never"):
        prepare(config_in(tmp_path / "run", **tables))


def test_special_tokens_that_texts_leave_out_are_those_that_end_nothing(tmp_path: Path) -> None:
    tokenizer = character_tokenizer("0123456789>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<stop>", "<think>"]})
    tokenizer.save_pretrained(tmp_path)
    model = {"tokenizer": str(tmp_path), "config": {**DATA["model"]["config"], "vocab_size": 17}}
    rollout = {**DATA["rollout"], "stop": ["<stop>"]}
    for kept, unseen in ((False, {16: "<think>"}), (True, {})):
        reward = {"special_tokens": kept}
        config = config_in(tmp_path / "run", model=model, rollout=rollout, reward=reward)
        assert unseen_tokens(prepare(config)) == unseen


# ---- several problems ------------------------------------------------------------------------------------------------


def test_what_builds_on_a_setting_that_is_wrong_is_left_out(tmp_path: Path) -> None:
    checkpoint = str(tmp_path / "no-checkpoint")
    config = config_in(tmp_path / "run", checkpoint, rollout={"engine": "fake", "prompts": 8, "stop": ["no token"]})
    with pytest.raises(ConfigError) as caught:
        prepare(
            evolve(
                config,
                model=ModelConfig(path="no/model"),
                backend=BackendChoice(name="plian"),
                reward=RewardConfig(name="exakt-match"),
                weights=WeightsConfig(transport="colective"),
            )
        )
    beginnings = [line[:40] for line in caught.value.message.splitlines()]
    assert beginnings == [
        "model.path: no directory 'no/model'; set",
        "checkpoint.resume: no directory '" + checkpoint[:7],
        "reward.name: unknown reward 'exakt-match",
        "weights.transport: unknown weight transp",
        "backend.name: unknown backend 'plian'; i",
    ]


def test_an_unknown_transport_is_answered_with_the_nearest_one(tmp_path: Path) -> None:
    config = evolve(config_in(tmp_path), weights=WeightsConfig(transport="colective"))
    with pytest.raises(ConfigError, match=r"'colective'; known: collective, .*, ipc; did you mean 'collective'?"):
        prepare(config)


def test_every_unknown_plugin_is_named(tmp_path: Path) -> None:
    config = config_in(tmp_path, backend={"name": "plian"}, rollout={"engine": "fakee"}, extensions=[{"name": "jsnol"}])
    with pytest.raises(ConfigError) as caught:
        prepare(config)
    assert [line.split(";")[0] for line in caught.value.message.splitlines()] == [
        "backend.name: unknown backend 'plian'",
        "rollout.engine: unknown engine 'fakee'",
        "extensions[0].name: unknown extension 'jsnol'",
    ]


# ---- the model -------------------------------------------------------------------------------------------------------


def test_a_models_directories_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_in(tmp_path / "run")
    make_model(config, seed=0).save_pretrained(tmp_path / "model")
    character_tokenizer("0123456789>s").save_pretrained(tmp_path / "tokens")
    monkeypatch.chdir(tmp_path)
    prepared = prepare(evolve(config, model=ModelConfig(path="model", tokenizer="tokens")))
    assert prepared.config.model == ModelConfig(path=f"{tmp_path}/model", tokenizer=f"{tmp_path}/tokens")
    assert prepared.plan.roles["actor"].assignments[0].config.model == prepared.config.model
    characters = prepare(evolve(config, model=ModelConfig(path="model", tokenizer="characters:0123456789>")))
    assert characters.config.model == ModelConfig(path=f"{tmp_path}/model", tokenizer="characters:0123456789>")
    assert prepare(config).config.model == config.model


def test_a_vocabulary_must_have_room_for_the_tokenizer(tmp_path: Path) -> None:
    config = config_in(tmp_path / "run")
    short = evolve(config.model, config={**config.model.config, "vocab_size": 15})
    with pytest.raises(ModelError) as caught:
        prepare(evolve(config, model=short))
    assert caught.value.message == (
        "model.config.vocab_size: the model's vocabulary has 15 tokens, but the tokenizer gives 's' the id 15, which "
        "needs 16; set model.config.vocab_size to at least 16, or set model.tokenizer to the tokenizer of this model"
    )
    hf_config(short).save_pretrained(tmp_path / "model")
    path = ModelConfig(path=str(tmp_path / "model"), tokenizer=config.model.tokenizer)
    with pytest.raises(ModelError) as caught:
        prepare(evolve(config, model=path))
    assert caught.value.message == (
        "model.path: its vocabulary has 15 tokens, but the tokenizer gives 's' the id 15, which needs 16; "
        "set model.tokenizer to the tokenizer of this model"
    )


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"num_attention_heads": 0}, "model.config.num_attention_heads=0, wanted at least 1"),
        ({"vocab_size": 2**62}, "model.config: transformers cannot build a qwen3 model from this config ("),
        ({"hidden_size": 10**9}, "model.config: the model has "),
        ({"hidden_size": 2**60}, "model.config: transformers cannot build a qwen3 model from this config ("),
        ({"hidden_size": -32}, "model.config.hidden_size=-32, wanted at least 1"),
        ({"head_dim": 0}, "model.config.head_dim=0, wanted at least 1"),
        ({"hidden_act": "swish9"}, "model.config: transformers cannot build a qwen3 model from this config ("),
    ],
)
@pytest.mark.parametrize("on_disk", [False, True])
def test_a_model_that_cannot_be_built_or_held_is_one_line(
    fields: dict[str, Any], told: str, on_disk: bool, tmp_path: Path
) -> None:
    model = {**DATA["model"], "config": {**DATA["model"]["config"], **fields}}
    if on_disk:
        (tmp_path / "config.json").write_text(json.dumps(model["config"]))
        model |= {"path": str(tmp_path), "config": {}}
        told = told.replace("model.config.", f"model.path='{tmp_path}': config.json: ").replace(
            "model.config:", "model.path:"
        )
    with pytest.raises(ModelError) as caught:
        prepare(config_in(tmp_path / "run", model=model))
    assert caught.value.message.startswith(told) and "\n" not in caught.value.message


def test_a_context_longer_than_the_models_table_of_positions_is_refused(tmp_path: Path) -> None:
    fields = {"model_type": "gpt2", "vocab_size": 16, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 48}
    model = {**DATA["model"], "config": fields}
    rollout = {**DATA["rollout"], "max_tokens": 8}
    config = config_in(tmp_path / "run", model=model, rollout={**rollout, "context_length": 48})
    assert prepare(config).context_length == 48
    longer = config_in(tmp_path / "run", model=model, rollout={**rollout, "context_length": 49})
    with pytest.raises(ConfigError, match=r"^rollout.context_length: 49, but the model has 48 positions; lower it$"):
        prepare(longer)
    rotary = config_in(tmp_path / "run", rollout={**rollout, "context_length": 10**6})
    assert prepare(rotary).context_length == 10**6


# ---- checkpoints and devices -----------------------------------------------------------------------------------------


def test_one_that_samples_with_another_runs_weights_begins_at_its_own_first_step(tmp_path: Path) -> None:
    config = make_config()
    checkpoint = save(tmp_path / "trained", config, make_model(config, seed=1), step=4)
    steps = {}
    for mode in ("train", "rollout-only", "eval"):
        config = config_in(tmp_path / mode, str(checkpoint))
        steps[mode] = prepare(evolve(config, run=evolve(config.run, mode=mode))).first_step
    assert steps == {"train": 4, "rollout-only": 0, "eval": 4}


def test_a_critics_own_model_must_know_the_actors_tokens(tmp_path: Path) -> None:
    small = {**make_config().model.config, "vocab_size": 3}
    tables = {**CRITIC, "roles": {"critic": {"ranks": 1, "model": {"config": small}}}}
    with pytest.raises(ModelError, match=r"^roles.critic.model.config.vocab_size: the model's vocabulary has 3 tokens"):
        prepare(config_in(tmp_path / "run", **tables))


# ---- what backends are asked ----------------------------------------------------------------------------------------


# ---- modes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "mode", "line"),
    [
        ({"prompts": {}}, "train-only", "sampled its batches, but run.mode='train-only' does not"),
        ({"files": 3}, "train", "read saved batches, but run.mode='train' does not"),
    ],
)
def test_a_run_that_samples_goes_on_from_one_that_sampled(source: dict[str, Any], mode: str, line: str) -> None:
    config = make_config(run={"mode": mode})
    with pytest.raises(CheckpointError, match=rf"^step-2 is of a run that {line}; resume with the run.mode"):
        require_same_source({"source": source}, config, "step-2")
    require_same_source({"source": source}, make_config(run={"mode": "train" if mode != "train" else "train-only"}), "")


def test_older_weights_are_refused_where_engines_get_fresh_ones_anyway(tmp_path: Path) -> None:
    tables = {"weights": {"every": 2}, "cluster": {"offload": "always"}, "checkpoint": {"every": 4}}
    config = evolve(make_config(**tables), run=RunConfig(dir=str(tmp_path / "run")))
    with pytest.raises(ConfigError, match=r"^weights.every: 2, but engines that share memory with the ranks in turns"):
        prepare(config)
    prepare(evolve(config, cluster=evolve(config.cluster, offload="never")))


@pytest.mark.parametrize("source", ["one-step-off", "asynchronous"])
def test_engines_that_take_turns_in_memory_cannot_sample_while_ranks_train(tmp_path: Path, source: str) -> None:
    tables = {"rollout": {"engine": "fake", "prompts": 8, "samples": 4, "source": source}}
    config = evolve(make_config(**tables), run=RunConfig(dir=str(tmp_path / "run")))
    turns = evolve(config, cluster=evolve(config.cluster, offload="always"))
    wanted = (
        f"rollout.source: {source!r} samples while ranks train, but here engines and ranks take turns in memory; set "
        "cluster.placement='disaggregated', or rollout.source='synchronous', or, if both fit in memory, "
        "cluster.offload='never'"
    )
    with pytest.raises(ConfigError) as caught:
        prepare(turns)
    assert caught.value.message == wanted
    prepare(evolve(turns, cluster=evolve(turns.cluster, placement="disaggregated")))
    prepare(evolve(turns, run=evolve(turns.run, mode="eval")))
    prepare(config)  # on a CPU both are in memory


def test_experts_are_replayed_of_a_model_that_has_some(tmp_path: Path) -> None:
    config = config_in(tmp_path, algorithm={"routing_replay": "engine"})
    with pytest.raises(ConfigError) as caught:
        prepare(evolve(config, run=evolve(config.run, mode="rollout-only")))
    wanted = "algorithm.routing_replay: 'engine', but the model has no experts; set it to 'none'"
    assert caught.value.message == wanted
    experts = evolve(config, model=evolve(config.model, config=tiny_fields("qwen3-moe")))
    assert prepare(experts).params.routed_experts
    with pytest.raises(Unsupported, match="^algorithm.routing_replay = 'engine' requires 'routing-replay'"):
        prepare(evolve(experts, backend=BackendChoice(name="tests.trainer.fakes:NO_REPLAY")))
    assert prepare(evolve(experts, run=evolve(config.run, mode="rollout-only"))).params.routed_experts
    assert not prepare(evolve(experts, algorithm=AlgorithmConfig())).params.routed_experts


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_cuda_device_auto_takes_the_cpu_and_cuda_is_refused() -> None:
    assert [resolve_device(device) for device in ("auto", "cpu")] == ["cpu", "cpu"]
    with pytest.raises(ConfigError, match="torch sees no CUDA device here; use 'cpu' or 'auto'"):
        resolve_device("cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_of_a_cluster_with_an_address_cuda_is_believed() -> None:
    devices = {device: resolve_device(device, address="10.0.0.1:6379") for device in ("auto", "cpu", "cuda")}
    assert devices == {"auto": "cpu", "cpu": "cpu", "cuda": "cuda"}
