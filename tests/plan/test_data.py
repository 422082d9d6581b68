"""What a run is given, as `prepare` loads and checks it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM

from corerl.config.schema import ModelConfig
from corerl.driver.sampling import Sampling
from corerl.errors import ConfigError, DataError, ModelError
from corerl.models.config import hf_config
from corerl.models.tokenizer import character_tokenizer
from corerl.plan.make import make_plan
from corerl.plan.plan import Plan
from tests.driver.saved import DATA, TEACHER, chats_of, config_in, make_config, make_model

# ---- models ----------------------------------------------------------------------------------------------------------


def test_a_teacher_must_have_the_actors_tokens(tmp_path: Path) -> None:
    fields = {**make_config().model.config, "hidden_size": 16}

    def planned(model: dict[str, Any], vocab_size: int = 16) -> None:
        actor = {**DATA["model"], "config": {**DATA["model"]["config"], "vocab_size": vocab_size}}
        tables = {**TEACHER, "model": actor, "roles": {"teacher": {"ranks": 1, "model": model}}}
        make_plan(config_in(tmp_path / "run", **tables))

    planned({"config": fields})
    with pytest.raises(ModelError) as caught:
        planned({"config": {**fields, "vocab_size": 32}})
    assert caught.value.message.startswith(
        "roles.teacher.model.config.vocab_size: a vocabulary of 32 tokens, and no tokenizer to compare them by, but "
        "the actor's model has 16"
    )
    directory = tmp_path / "teacher"
    with torch.random.fork_rng(devices=[]):
        AutoModelForCausalLM.from_config(hf_config(ModelConfig(config={**fields, "vocab_size": 32}))).save_pretrained(
            directory
        )
    character_tokenizer("0123456789>sabc").save_pretrained(directory)
    planned({"path": str(directory)})  # the same tokens, and others behind them
    planned({"path": str(directory)}, vocab_size=33)  # padded differently
    character_tokenizer("9876543210>s").save_pretrained(directory)
    with pytest.raises(ModelError) as caught:
        planned({"path": str(directory)})
    assert caught.value.message.startswith(
        "roles.teacher.model.path: its tokenizer has '9' for the token 4, but the actor's has '0', so that log-probs "
    )


# ---- prompts and the model's context ---------------------------------------------------------------------------------


def notices(plan: Plan) -> tuple[str, ...]:
    return tuple(line for line in plan.notices if "skipped" in line)


@pytest.mark.parametrize(
    ("fields", "rollout", "noted"),
    [
        (
            {"repetition_penalty": 1.05, "top_k": 20, "eos_token_id": 2, "do_sample": True},
            {},
            "repetition_penalty=1.05, top_k=20",
        ),
        ({"suppress_tokens": [7], "min_new_tokens": 0, "repetition_penalty": 1.0}, {}, "suppress_tokens=[7]"),
        ({"temperature": 0.6, "top_p": 0.9, "top_k": 9}, {"temperature": 0.6, "top_p": 0.9, "top_k": 9}, ""),
        ({"temperature": 1.0, "top_p": 1.0, "top_k": None}, {"temperature": 0.7}, ""),
    ],
)
def test_sampling_that_a_models_files_ask_for_is_noted(
    tmp_path: Path, fields: dict[str, Any], rollout: dict[str, Any], noted: str
) -> None:
    make_model(make_config(), seed=0).save_pretrained(tmp_path / "model")
    (tmp_path / "model/generation_config.json").write_text(json.dumps(fields))
    model = {"path": str(tmp_path / "model"), "tokenizer": DATA["model"]["tokenizer"]}
    plan = make_plan(config_in(tmp_path / "run", model=model, rollout={**DATA["rollout"], **rollout}))
    line = f"model.path: generation_config.json has {noted}, which is ignored: sampling follows [rollout]"
    assert [each for each in plan.notices if "generation_config.json" in each] == ([line] if noted else [])


def test_a_context_longer_than_the_position_table_is_refused(tmp_path: Path) -> None:
    fields = {"model_type": "gpt2", "vocab_size": 16, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 48}
    model = {**DATA["model"], "config": fields}
    rollout = {**DATA["rollout"], "max_tokens": 8}
    config = config_in(tmp_path / "run", model=model, rollout={**rollout, "context_length": 48})
    assert make_plan(config).rollout.context_length == 48
    longer = config_in(tmp_path / "run", model=model, rollout={**rollout, "context_length": 49})
    with pytest.raises(
        ConfigError, match=r"^rollout.context_length: 49, but the model has 48 positions; set it to that$"
    ):
        make_plan(longer)
    critic = {"algorithm": {"name": "ppo"}, "roles": {"critic": {"ranks": 1, "model": {"config": fields}}}}
    actor = {**DATA["model"], "config": {**DATA["model"]["config"], "max_position_embeddings": 512}}
    with pytest.raises(
        ConfigError, match="_length: 0, which is the 512 of the actor's model, but the critic's model has 48"
    ):
        make_plan(config_in(tmp_path / "run", model=actor, **critic))
    rotary = config_in(tmp_path / "run", rollout={**rollout, "context_length": 10**6})
    assert make_plan(rotary).rollout.context_length == 10**6


# ---- chats -----------------------------------------------------------------------------------------------------------


def test_a_chat_that_the_template_refuses_is_reported_or_skipped(tmp_path: Path) -> None:
    tables = chats_of(tmp_path, bad=13)
    why = r"chats.jsonl:14: the tokenizer's chat template rejects its messages \(TemplateError: one at a time\); "
    with pytest.raises(DataError, match=rf"^data.source: .*{why}.*correct the row, or set data.refused='skip'"):
        make_plan(config_in(tmp_path / "run", **tables))
    tables["data"]["refused"] = "skip"
    plan = make_plan(config_in(tmp_path / "run", **tables))
    assert plan.rollout.prompts.left_out == {13}
    (notice,) = notices(plan)
    assert notice.startswith("data: 1 of the first 20 prompts are skipped; ")


def test_arguments_of_the_template_reach_every_prompt_that_is_sampled(tmp_path: Path) -> None:
    tables = chats_of(tmp_path, bad=99)
    tables["data"]["chat_template_options"] = {"brief": True}
    plan = make_plan(config_in(tmp_path / "run", **tables))
    rewards = (Mock(), [Mock()] * len(plan.eval_sets))
    made = Sampling(plan=plan, fleet=Mock(), loop=Mock(), rewards=rewards, progress=Mock(), stack=Mock())
    sampler = made.sampler_of(plan.rollout.rewarding)
    request = sampler.request([plan.rollout.prompts.prompt(0)], rollout_step=0, samples=1, params=plan.rollout.params)
    assert plan.rollout.tokenizer.decode(request.tokens) == "7>s"
    tables["data"]["chat_template_options"] = {"breif": True}
    with pytest.raises(ConfigError, match="^data.chat_template_options.breif: the tokenizer's chat template never"):
        make_plan(config_in(tmp_path / "run", **tables))
