from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from attrs import evolve

from corerl.config.schema import (
    AlgorithmConfig,
    BackendChoice,
    CheckpointConfig,
    ClusterInfo,
    Config,
    ModelConfig,
    RewardConfig,
    RunConfig,
    WeightsConfig,
)
from corerl.driver.prepare import (
    Problems,
    prepare,
    require_form,
    require_room_for_tokens,
    require_same_source,
    resolve_device,
    resume_from,
    title,
)
from corerl.errors import CheckpointError, ConfigError, ModelError, Unsupported
from corerl.models.config import hf_config
from corerl.models.tokenizer import character_tokenizer
from corerl.plugin.registry import Kind, load
from corerl.testing.models import tiny_fields
from tests.driver.saved import make_config, make_model, save


def config_in(run_dir: Path, resume: str = "never", **tables: Any) -> Config:
    return evolve(make_config(**tables), run=RunConfig(dir=str(run_dir)), checkpoint=CheckpointConfig(resume=resume))


def test_a_sound_config_is_prepared_without_a_process_or_a_file(tmp_path: Path) -> None:
    config = config_in(tmp_path / "run", rollout={"engine": "fake", "prompts": 8, "samples": 4, "replicas": 2})
    prepared = prepare(evolve(config, cluster=evolve(config.cluster, device="cpu", placement="disaggregated")))
    assert (prepared.device, prepared.run_dir, prepared.resume, prepared.state) == ("cpu", tmp_path / "run", None, {})
    assert prepared.seating.places == {"actor": (0,), "engines": (1, 2)}
    assert prepared.tokenizer("0>")["input_ids"] == [1, 4, 14]
    assert prepared.params.stop_tokens == (2,)
    assert len(prepared.prompts.held_out) == 16
    assert prepared.roles["actor"].assignments[0].config.resume == ""
    assert title(prepared) == "grpo on sort-digits: qwen3 from scratch, 1 plain rank, 2 fake engines, cpu"
    assert not ray.is_initialized() and not (tmp_path / "run").exists()


def test_a_resumed_run_is_told_where_its_checkpoint_stands(tmp_path: Path) -> None:
    config = config_in(tmp_path, "auto")
    checkpoint = save(tmp_path, config, make_model(config, seed=1), step=4)
    prepared = prepare(config)
    assert prepared.resume == checkpoint
    assert prepared.state["rollout_step"] == 4
    assert prepared.roles["actor"].assignments[0].config.resume == str(checkpoint / "actor")


# ---- several problems ------------------------------------------------------------------------------------------------


def collect(problems: Problems, setting: str, error: Exception) -> None:
    with problems.stage(setting):
        raise error


def test_one_error_stays_itself_and_several_become_the_lines_of_one() -> None:
    problems = Problems()
    problems.raise_all()
    for _ in range(2):  # said twice is told once
        collect(problems, "a.b", Unsupported("first"))
    assert not problems.none_in("a") and not problems.none_in("c", "a.b")
    assert problems.none_in("a.b.c", "a.bc", "b")
    with pytest.raises(Unsupported, match="^first$"):
        problems.raise_all()
    collect(problems, "c", ModelError("second\nthird"))
    with pytest.raises(ConfigError) as caught:
        problems.raise_all()
    assert caught.value.message == "first\nsecond\nthird"


def test_what_is_no_fault_of_the_users_is_not_collected() -> None:
    with pytest.raises(ZeroDivisionError):
        collect(Problems(), "a", ZeroDivisionError())


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
        "model.path: no directory 'no/model'; giv",
        "checkpoint.resume: no directory '" + checkpoint[:7],
        "reward.name: unknown reward 'exakt-match",
        "weights.transport: unknown weight transp",
        "backend.name: unknown backend 'plian'; i",
    ]


def test_weights_that_the_engine_does_not_take_as_they_travel_are_refused(tmp_path: Path) -> None:
    config = evolve(config_in(tmp_path), weights=WeightsConfig(quantize="fp8"))
    with pytest.raises(
        ConfigError,
        match=r"^weights.quantize: 'fp8', and the engine '\w+', as it is configured, takes 'none'; make them equal$",
    ):
        prepare(config)
    engine = load(Kind.ENGINES, config.rollout.engine)
    quantized = evolve(engine, spec=evolve(engine.spec, quantized=lambda options, cluster: "fp8"))
    require_form(evolve(config, engines={engine.name: None}), quantized, ClusterInfo(device="cpu", ranks=1))


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
    assert prepared.roles["actor"].assignments[0].config.model == prepared.config.model
    characters = prepare(evolve(config, model=ModelConfig(path="model", tokenizer="characters:0123456789>")))
    assert characters.config.model == ModelConfig(path=f"{tmp_path}/model", tokenizer="characters:0123456789>")
    assert prepare(config).config.model == config.model


def test_a_vocabulary_must_have_room_for_the_tokenizer(tmp_path: Path) -> None:
    config = config_in(tmp_path / "run")
    short = evolve(config.model, config={**config.model.config, "vocab_size": 15})
    with pytest.raises(ModelError) as caught:
        prepare(evolve(config, model=short))
    assert caught.value.message == (
        "model.config.vocab_size: the model's vocabulary has 15 tokens, and the tokenizer numbers 's' 15, which wants "
        "16; set model.config.vocab_size to at least 16, or give the tokenizer of this model as model.tokenizer"
    )
    hf_config(short).save_pretrained(tmp_path / "model")
    path = ModelConfig(path=str(tmp_path / "model"), tokenizer=config.model.tokenizer)
    with pytest.raises(ModelError) as caught:
        prepare(evolve(config, model=path))
    assert caught.value.message == (
        "model.path: its vocabulary has 15 tokens, and the tokenizer numbers 's' 15, which wants 16; "
        "give the tokenizer of this model as model.tokenizer"
    )


def test_a_special_token_that_no_sample_has_needs_no_room() -> None:
    model = make_config().model
    tokenizer = character_tokenizer("0123456789>s")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    require_room_for_tokens(hf_config(model), tokenizer, model)  # as Gemma 3's text models have one
    tokenizer.add_special_tokens({"eos_token": "<end>"})
    with pytest.raises(ModelError, match="has 16 tokens, and the tokenizer numbers '<end>' 17, which wants 18"):
        require_room_for_tokens(hf_config(model), tokenizer, model)
    tokenizer = character_tokenizer("0123456789>s")
    tokenizer.add_tokens(["think"])
    with pytest.raises(ModelError, match="numbers 'think' 16, which wants 17"):
        require_room_for_tokens(hf_config(model), tokenizer, model)


# ---- checkpoints and devices -----------------------------------------------------------------------------------------


def test_which_checkpoint_a_run_goes_on_from(tmp_path: Path) -> None:
    config = make_config()
    model = make_model(config, seed=1)
    run, empty = tmp_path / "run", tmp_path / "empty"
    older, newest = (save(run, config, model, step=step) for step in (2, 4))
    assert resume_from(config_in(empty), empty, starting=True) is None
    assert resume_from(config_in(empty, "auto"), empty, starting=True) is None
    assert resume_from(config_in(run, "auto"), run, starting=True) == newest
    assert resume_from(config_in(empty, str(older)), empty, starting=True) == older
    assert resume_from(config_in(run, str(newest)), run, starting=True) == newest
    for resume in ("never", str(older)):
        with pytest.raises(ConfigError, match=r"already holds a run \(step-00000004\)"):
            resume_from(config_in(run, resume), run, starting=True)
    assert resume_from(config_in(run), run, starting=False) is None


@pytest.mark.parametrize("resume", ["never", "auto", "newest"])
@pytest.mark.parametrize(
    ("mode", "advice"),
    [("eval", "give another run.dir, or use: corerl eval "), ("rollout-only", "give another run.dir")],
)
def test_what_only_samples_or_scores_does_not_write_over_a_trained_run(
    tmp_path: Path, mode: Any, advice: str, resume: str
) -> None:
    config = make_config()
    checkpoint = save(tmp_path, config, make_model(config, seed=1), step=4)
    config = config_in(tmp_path, str(checkpoint) if resume == "newest" else resume)
    config = evolve(config, run=evolve(config.run, mode=mode))
    with pytest.raises(ConfigError) as caught:
        prepare(config)
    line = f"run.dir: {tmp_path} already holds a run (step-00000004), whose numbers run.mode={mode!r} would write over"
    assert caught.value.message.startswith(f"{line}; {advice}")
    assert prepare(config, starting=False).first_step == (0 if resume == "never" or mode == "rollout-only" else 4)


def test_one_that_samples_with_another_runs_weights_begins_at_its_own_first_step(tmp_path: Path) -> None:
    config = make_config()
    checkpoint = save(tmp_path / "trained", config, make_model(config, seed=1), step=4)
    steps = {}
    for mode in ("train", "rollout-only", "eval"):
        config = config_in(tmp_path / mode, str(checkpoint))
        steps[mode] = prepare(evolve(config, run=evolve(config.run, mode=mode))).first_step
    assert steps == {"train": 4, "rollout-only": 0, "eval": 4}


CRITIC = {"algorithm": {"name": "ppo"}, "roles": {"critic": {"ranks": 1}}}


def test_a_critic_is_a_role_with_a_plan_of_its_own(tmp_path: Path) -> None:
    prepared = prepare(config_in(tmp_path / "run", **CRITIC))
    assert list(prepared.roles) == ["actor", "critic"]
    actor, critic = (plan.assignments[0].config for plan in prepared.roles.values())
    assert (actor.value_head, critic.value_head, critic.model) == (False, True, actor.model)
    assert prepared.seating.places == {"actor": (0,), "critic": (0,), "engines": (0,)}
    assert "1 plain rank, 1 plain rank for the critic, 1 fake engine" in title(prepared)
    own = {**CRITIC, "roles": {"critic": {"ranks": 1, "devices": "own"}}}
    apart = prepare(config_in(tmp_path / "run", **own))
    assert apart.seating.places == {"actor": (0,), "critic": (1,), "engines": (0,)}


def test_a_critics_own_model_must_know_the_actors_tokens(tmp_path: Path) -> None:
    small = {**make_config().model.config, "vocab_size": 3}
    tables = {**CRITIC, "roles": {"critic": {"ranks": 1, "model": {"config": small}}}}
    with pytest.raises(ModelError, match=r"^roles.critic.model.config.vocab_size: the model's vocabulary has 3 tokens"):
        prepare(config_in(tmp_path / "run", **tables))


# ---- what backends are asked ----------------------------------------------------------------------------------------


def test_samples_are_split_over_the_groups_that_the_backend_makes_of_its_ranks(tmp_path: Path) -> None:
    name = "tests.trainer.fakes:SPEC"

    def given(ranks: int, shards: int) -> Config:
        tables = {
            "backend": {"name": name},
            "backends": {name: {"shards": shards}},
            "roles": {"actor": {"ranks": ranks}},
            "rollout": {"engine": "fake", "prompts": 9, "samples": 4},
        }
        return config_in(tmp_path / "run", **tables)

    assert prepare(given(8, 2)).roles["actor"].data_parallel == 4
    with pytest.raises(ConfigError) as caught:
        prepare(given(8, 1))
    assert caught.value.message.startswith("rollout.prompts: 9 x rollout.samples=4 / train.mini_batches=1 makes 36 ")
    with pytest.raises(ConfigError) as caught:
        prepare(given(16, 2))
    assert "over the 8 data-parallel groups that the backend makes of roles.actor.ranks=16;" in caught.value.message
    with pytest.raises(ConfigError) as caught:  # no groups, and so nothing to be said of them
        prepare(given(8, 3))
    assert caught.value.message == f'backends."{name}".shards: 3 does not divide 8 ranks; use a divisor'


def test_backends_are_asked_with_the_fields_of_each_roles_model(tmp_path: Path) -> None:
    fields = make_config().model.config
    small = {**fields, "num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 8}
    roles = {"critic": {"backend": "tests.trainer.fakes:CHOOSY", "model": {"config": small}}}
    with pytest.raises(ConfigError) as caught:
        prepare(config_in(tmp_path / "run", **{**CRITIC, "roles": roles}))
    assert caught.value.message == "roles.critic.model.config.num_key_value_heads: 2 more than a multiple of 4"
    hf_config(make_config().model).save_pretrained(tmp_path / "model")
    tables = {"backend": {"name": "tests.trainer.fakes:CHOOSY"}, "model": {"path": str(tmp_path / "model")}}
    with pytest.raises(ConfigError) as caught:
        prepare(config_in(tmp_path / "run", **{**tables, "model": {**tables["model"], "tokenizer": "characters:01"}}))
    assert (
        "model.path: num_key_value_heads in its config.json: 2 more than a multiple of 4"
        in caught.value.message.splitlines()
    )


def test_engines_are_asked_with_the_actors_model_and_their_own_number(tmp_path: Path) -> None:
    prepared = prepare(config_in(tmp_path / "run", rollout={"engine": "fake", "prompts": 8, "replicas": 3}))
    assert (prepared.engines.device, prepared.engines.ranks) == ("cpu", 3)
    assert prepared.engines.model["num_key_value_heads"] == 2
    assert prepared.engines.train == prepared.config.train


# ---- modes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "mode", "line"),
    [
        ({"prompts": {}}, "train-only", "sampled its batches, and run.mode='train-only' does not"),
        ({"files": 3}, "train", "read saved batches, and run.mode='train' does not"),
    ],
)
def test_a_run_that_samples_goes_on_from_one_that_sampled(source: dict[str, Any], mode: str, line: str) -> None:
    config = make_config(run={"mode": mode})
    with pytest.raises(CheckpointError, match=rf"^step-2 is of a run that {line}; resume with the run.mode"):
        require_same_source({"source": source}, config, "step-2")
    require_same_source({"source": source}, make_config(run={"mode": "train" if mode != "train" else "train-only"}), "")


@pytest.mark.parametrize("kept", [{"run": {"mode": "rollout-only"}}, {"rollout": {"save": True}}])
def test_rollouts_of_two_runs_are_not_mixed(kept: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "run/rollouts").mkdir(parents=True)
    config = make_config(**kept)
    config = evolve(config, run=evolve(config.run, dir=str(tmp_path / "run")))
    checkpoint = save(tmp_path / "other", config, make_model(config, seed=1), step=4)
    for resume in ("never", "auto", str(checkpoint)):
        with pytest.raises(ConfigError, match=r"^run.dir: .* holds rollouts already, which would be mixed with new"):
            prepare(evolve(config, checkpoint=CheckpointConfig(resume=resume)))


def test_a_run_that_keeps_its_rollouts_goes_on_with_them(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    config = evolve(make_config(rollout={"save": True}), run=RunConfig(dir=str(tmp_path)))
    save(tmp_path, config, make_model(config, seed=1), step=4)
    assert prepare(evolve(config, checkpoint=CheckpointConfig(resume="auto"))).first_step == 4


def test_a_model_that_a_run_has_not_written_is_not_replaced_by_its_export(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(
        ConfigError, match=r"^run.dir: .*/model is there already, and the run would put its export in its"
    ):
        prepare(config_in(tmp_path))
    config = config_in(tmp_path)
    assert prepare(config, starting=False).run_dir == tmp_path
    assert prepare(evolve(config, checkpoint=CheckpointConfig(export=False))).run_dir == tmp_path
    save(tmp_path, config, make_model(config, seed=1), step=4)  # then it is its own
    assert prepare(config_in(tmp_path, "auto")).first_step == 4


def test_an_extension_under_two_names_is_one_twice(tmp_path: Path) -> None:
    config = config_in(tmp_path, extensions=[{"name": "jsonl"}, {"name": "corerl:jsonl"}])
    with pytest.raises(ConfigError) as caught:
        prepare(config)
    assert caught.value.message == "extensions: 'corerl:jsonl' and 'jsonl' share a name; keep one"


def test_older_weights_are_refused_where_engines_get_fresh_ones_anyway(tmp_path: Path) -> None:
    tables = {"weights": {"every": 2}, "cluster": {"offload": "always"}, "checkpoint": {"every": 4}}
    config = evolve(make_config(**tables), run=RunConfig(dir=str(tmp_path / "run")))
    with pytest.raises(ConfigError, match=r"^weights.every: 2, and engines that take turns in memory with the ranks"):
        prepare(config)
    prepare(evolve(config, cluster=evolve(config.cluster, offload="never")))


@pytest.mark.parametrize("source", ["one-step-off", "asynchronous"])
def test_engines_that_take_turns_in_memory_cannot_sample_while_ranks_train(tmp_path: Path, source: str) -> None:
    tables = {"rollout": {"engine": "fake", "prompts": 8, "samples": 4, "source": source}}
    config = evolve(make_config(**tables), run=RunConfig(dir=str(tmp_path / "run")))
    turns = evolve(config, cluster=evolve(config.cluster, offload="always"))
    wanted = (
        f"rollout.source: {source!r} has engines sample while ranks train, and here they take turns in memory; "
        "set cluster.placement='disaggregated', or rollout.source='synchronous', or, where both fit, "
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
    wanted = "algorithm.routing_replay: 'engine', and the model has no experts to choose from; set it to 'none'"
    assert caught.value.message == wanted
    experts = evolve(config, model=evolve(config.model, config=tiny_fields("qwen3-moe")))
    assert prepare(experts).params.routed_experts
    with pytest.raises(Unsupported, match="^algorithm.routing_replay = 'engine' asks for 'routing-replay'"):
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
