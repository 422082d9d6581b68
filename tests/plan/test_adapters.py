"""What a run that trains adapters is planned with, and what is refused before a process starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

from corerl.config.schema import LoraConfig
from corerl.driver.export import write_adapters
from corerl.errors import UserError
from corerl.models.config import hf_config
from corerl.models.files import meta_model
from corerl.models.lora import peft_config
from corerl.models.names import shapes_of
from corerl.plan.make import make_plan
from corerl.plan.plan import Plan
from corerl.weights.adapters import is_adapter
from corerl_testing.models import tiny_fields
from tests.driver.saved import DATA, config_in, make_config
from tests.pictures import write_pictures

SAVED = LoraConfig(rank=3, alpha=7.0, targets=("v_proj", "up_proj"), rslora=True)


def planned(tmp_path: Path, resume: str = "never", **tables: Any) -> Plan:
    return make_plan(config_in(tmp_path / "run", resume, **tables))


def lora_of(plan: Plan) -> LoraConfig | None:
    (found,) = {assignment.config.lora for assignment in plan.processes.roles["actor"].assignments}
    return found


def refused(tmp_path: Path, resume: str = "never", **tables: Any) -> list[str]:
    with pytest.raises(UserError) as caught:
        planned(tmp_path, resume, **tables)
    return caught.value.message.splitlines()


@pytest.fixture
def peft(tmp_path: Path) -> Path:
    """Adapters of the model of `make_config`."""
    model = meta_model(hf_config(make_config().model), lora=SAVED)
    tensors = {name: torch.randn(shape) for name, shape in shapes_of(model).items() if is_adapter(name)}
    write_adapters(tmp_path / "peft", tensors, peft_config(SAVED, base="", targets=["v_proj", "up_proj"]))
    return tmp_path / "peft"


# ---- what ranks get --------------------------------------------------------------------------------------------------


def test_adapters_beside_a_tower_name_the_checkpoints_class(tmp_path: Path) -> None:
    base = write_pictures("mistral3", tmp_path / "base")
    model = {"path": str(base), "tokenizer": "characters:0123456789>s"}
    rollout = {**DATA["rollout"], "max_tokens": 8}
    (line,) = [line for line in planned(tmp_path, model=model, rollout=rollout, lora={}).notices if "named for" in line]
    assert line == (
        "lora: adapters are named for the modules of Mistral3ForConditionalGeneration, the class of the checkpoint; "
        "load them onto a model of AutoModelForImageTextToText"
    )
    assert not [line for line in planned(tmp_path, lora={}).notices if "named for" in line]


def test_a_directory_of_peft_says_what_is_left_open(tmp_path: Path, peft: Path) -> None:
    wanted = evolve(SAVED, path=str(peft), targets=("up_proj", "v_proj"))
    assert lora_of(planned(tmp_path, lora={"path": str(peft)})) == wanted
    same = {"path": str(peft), "rank": 3, "alpha": 7, "targets": ["v_proj", "up_proj"], "rslora": True}
    found = lora_of(planned(tmp_path, lora=same))
    assert found is not None and found.scale == wanted.scale == 7 / 3**0.5


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_settings_that_a_directory_of_peft_contradicts_are_all_told(tmp_path: Path, peft: Path) -> None:
    changed = {"path": str(peft), "rank": 4, "alpha": 8, "targets": ["q_proj"], "rslora": False, "init": "gaussian"}
    assert sorted(refused(tmp_path, lora=changed)) == sorted(
        [
            "lora.init: 'gaussian' does not go with lora.path=" + repr(str(peft)) + "; change that, or remove this",
            f"lora.rank: 4, but the adapters in {peft} have 3; remove it",
            f"lora.alpha: 8.0, but the adapters in {peft} have 7.0; remove it",
            f"lora.targets: ('q_proj',), but the adapters in {peft} have ('up_proj', 'v_proj'); remove it",
            f"lora.rslora: False, but the adapters in {peft} have True; remove it",
        ]
    )


def test_adapters_of_experts_are_sent_merged_only(tmp_path: Path) -> None:
    model, rollout = (
        {**DATA["model"], "config": tiny_fields("qwen3-moe")},
        {**DATA["rollout"], "engine": "transformers"},
    )
    lora, apart = {"targets": ["experts"]}, {"weights": {"lora": "adapter"}}
    assert lora_of(planned(tmp_path, model=model, rollout=rollout, lora=lora)) is not None
    (line,) = refused(tmp_path, model=model, rollout=rollout, lora=lora, **apart)
    assert line.startswith("weights.lora: 'adapter', but [lora] has the target 'experts', whose adapters no engine")
