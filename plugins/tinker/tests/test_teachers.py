"""Frozen models that are asked for log-probs, while another one is trained."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from corerl.errors import ConfigError
from plugins.tinker.tests.served import CONFIG, LORA, MODEL, save, serving, train

ROW = [1, 7, 8, 9, 4]
TEACHER = "teacher"


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(7)
    directory = tmp_path_factory.mktemp("models") / TEACHER
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG["model"]["config"])).save_pretrained(directory)
    return directory


def test_a_teachers_logprobs_are_those_of_transformers(teacher: Path, tmp_path: Path) -> None:
    """Also once the model has changed, and ranks have restarted for another one."""
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(teacher)(torch.tensor([ROW])).logits[0, :-1]
    wanted = logits.log_softmax(-1)[torch.arange(len(ROW) - 1), torch.tensor(ROW[1:])]
    with serving(tmp_path, teachers={TEACHER: str(teacher)}) as served:
        for model_id in ("a:train:0", "a:train:1"):
            served.new_model(model_id)
            sampler = served.policy.sampler(None, TEACHER)
            train(served.policy, 2)
            np.testing.assert_allclose(served.logprobs(sampler, ROW)[1:], wanted, atol=1e-5)
            assert np.abs(served.logprobs(served.policy.sampler(None, MODEL), ROW)[1:] - wanted.numpy()).max() > 0.1
        served.policy.release()
        before, start = served.policy.sampler(None, TEACHER), served.policy.sampler(None, MODEL)
        of_start = served.logprobs(start, ROW)
        served.new_model("a:train:2")
        train(served.policy, 1)
        path = save(served.policy, "one").tinker_path
        served.policy.load(path, optimizer=True)  # by other ranks
        np.testing.assert_allclose(served.logprobs(before, ROW)[1:], wanted, atol=1e-5)
        assert served.logprobs(start, ROW).tobytes() == of_start.tobytes()
        drawn = served.draw(sampler, ROW, max_tokens=2)
        scored = served.logprobs(sampler, [*ROW, *drawn.sequences[0].tokens])
        np.testing.assert_allclose(drawn.sequences[0].logprobs, scored[len(ROW) :], atol=1e-5)


def test_ranks_with_adapters_have_no_room_for_a_teacher(teacher: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="serve.teachers: with a table"):
        serving(tmp_path, LORA, teachers={TEACHER: str(teacher)}).__enter__()
