"""What a config with pictures is planned as."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from corerl.config.schema import Config, LoraConfig
from corerl.engines.service import EngineService
from corerl.errors import DataError, PluginError
from corerl.models.tokenizer import load_tokenizer
from corerl.plan.check import contradictions
from corerl.plan.data import plan_rollout, with_prompt_check
from corerl.plan.processes import against_engine, plan_engines
from corerl.plan.resolve import plugins_of, resolve_tables
from corerl.plan.roles import cluster_of, needed
from corerl.plugin.capabilities import Capability, check_capabilities
from corerl.plugin.registry import Kind, load
from corerl.plugin.spec import ACTOR
from tests.driver.saved import DATA, make_config
from tests.tiny_pictures import TinyReader

SPEC = "tests.tiny_pictures:SPEC"
TOKENIZER = "characters:0*|!123456789>"
ROWS = [{"prompt": "1<image>", "images": ["2x2:9"]}, {"prompt": "2<image>", "images": ["2x2:8"]}, {"prompt": "34"}]


def config_of(tmp_path: Path, rows: list[dict[str, Any]], **model: Any) -> Config:
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = {"config": DATA["model"]["config"], "tokenizer": TOKENIZER, "pictures": SPEC, "tower": "trained", **model}
    return make_config(
        model=model, data={"source": str(data), "held_out": 1}, rollout={"engine": "fake", "max_tokens": 4}
    )


def planned(config: Config) -> Any:
    config = resolve_tables(config)
    tokenizer = load_tokenizer(tokenizer=config.model.tokenizer, path="")
    return plan_rollout(config, plugins_of(config), tokenizer, context=20, vocab_size=16)


def test_rows_have_pictures_and_answers_end_at_placeholders(tmp_path: Path) -> None:
    config = config_of(tmp_path, ROWS)
    plan = planned(config)
    assert isinstance(plan.pictures, TinyReader)
    assert plan.params.stop_tokens == (2, 5)
    prompts = {plan.prompts.where(i)[-1]: plan.prompts.prompt(i) for i in range(3)}
    assert {line: [str(each.size) for each in prompt.pictures] for line, prompt in prompts.items()} == {
        "1": ["(2, 2)"],
        "2": ["(2, 2)"],
        "3": [],
    }
    assert prompts["1"].text == "1*"
    # The same question of two pictures is two rows; but for its pictures, data is divided as ever.
    assert len(set(plan.prompts.asked.tolist())) == 3


def test_a_broken_picture_is_named_with_its_row_or_skipped(tmp_path: Path) -> None:
    rows = [*ROWS, {"prompt": "5<image>", "images": ["9x9:broken"]}]
    config = config_of(tmp_path, rows)
    with pytest.raises(DataError, match=r"rows.jsonl:4: the picture 9x9:broken ends early; correct the row, or"):
        with_prompt_check(planned(config), resolve_tables(config))
    skipping = evolve(config, data=evolve(config.data, refused="skip"))
    plan = with_prompt_check(planned(skipping), resolve_tables(skipping))
    (line,) = [each for each in plan.prompts.notices if "skipped" in each]
    assert line.startswith("data: 1 of the first 4 prompts are skipped; ") and "rows.jsonl:4" in line
    assert plan.check is not None and plan.check.pictures is plan.pictures


def test_towers_of_random_weights_that_never_learn_are_refused(tmp_path: Path) -> None:
    assert contradictions(config_of(tmp_path, ROWS)) == []
    (line,) = contradictions(config_of(tmp_path, ROWS, tower="frozen"))
    assert line.startswith("model.tower: 'frozen', but with model.config the tower starts from random weights")
    adapters = evolve(config_of(tmp_path, ROWS), lora=LoraConfig())
    (line,) = contradictions(adapters)
    assert line.startswith("model.tower: 'trained', but lora trains adapters of the text half alone; set it to")
    (line,) = contradictions(config_of(tmp_path, ROWS, pictures=""))
    assert line == "model.tower: 'trained' needs model.pictures, which is ''; set that, or remove this"


def test_backends_and_engines_are_asked_for_pictures(tmp_path: Path) -> None:
    config = resolve_tables(config_of(tmp_path, ROWS))
    plugins = plugins_of(config)
    asked = needed(ACTOR, config, plugins, cluster_of(ACTOR, config, plugins, device="cpu"))
    assert asked[Capability.PICTURES] == f"model.pictures = '{SPEC}'"
    text = config_of(tmp_path, ROWS, pictures="", tower="frozen")
    assert Capability.PICTURES not in needed(ACTOR, text, plugins, cluster_of(ACTOR, text, plugins, device="cpu"))
    silent = evolve(load(Kind.BACKENDS, "plain").spec, capabilities={})
    with pytest.raises(Exception, match="requires 'pictures', which the backend .* its spec does not declare it"):
        check_capabilities(silent, {Capability.PICTURES: asked[Capability.PICTURES]})
    (line,) = against_engine(config, load(Kind.ENGINES, "fake"))
    assert line.startswith(f"model.pictures: {SPEC!r}, but the engine 'fake' shows the model no pictures; set rollout.")


def test_processes_are_asked_for_the_drivers_reader(tmp_path: Path) -> None:
    config = resolve_tables(config_of(tmp_path, ROWS))
    plugins = evolve(plugins_of(config), transport=load(Kind.TRANSPORTS, "ipc"))
    cluster = cluster_of(ACTOR, config, plugins, device="cpu")
    plan = plan_engines(config, plugins, cluster, {}, context_length=0, run_dir="")
    assert [origin.what for origin in plan.assignments[0].origins][-1] == f"reader {SPEC!r}"
    EngineService(plan.assignments[0])  # finds the same
    *others, reader = plan.assignments[0].origins
    other = evolve(plan.assignments[0], origins=(*others, evolve(reader, value="other:SPEC")))
    with pytest.raises(PluginError, match=f"reader '{SPEC}' is {SPEC}, but the driver's is other:SPEC"):
        EngineService(other)
