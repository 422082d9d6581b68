"""The same with ranks and engines as processes of Ray."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from corerl import Engines
from corerl.config import config_of
from corerl_tinker.options import ServeOptions
from corerl_tinker.requests import Refused
from corerl_tinker.training import ServedPolicy
from plugins.tinker.tests.served import (
    CONFIG,
    LORA,
    MODEL,
    Served,
    publish,
    run,
    save,
    serving,
    supervised,
    train,
)

FSDP = config_of({**CONFIG, **LORA, "roles": {"actor": {"ranks": 2}}, "backend": {"name": "fsdp"}})


@pytest.mark.usefixtures("forked_python")
def test_a_model_is_trained_saved_sampled_and_resumed(shared_ray: None, tmp_path: Path) -> None:
    with Engines.start(FSDP) as engines:
        policy = ServedPolicy(engines, ServeOptions(name=MODEL, directory=str(tmp_path)), FSDP)
        served = Served(policy, engines)
        served.new_model("a:train:0", rank=4)
        reference = policy.sampler(None, MODEL)
        before = served.logprobs(reference, [1, 2, 3])
        run(policy, supervised([1, 20, 21, 22]))
        policy.discard()
        losses = train(policy, 2)
        path = publish(served, "two").model_path
        assert path is not None
        sampler = policy.sampler(path, "")
        made = tmp_path / "a:train:0"
        state, model = str(made / "sampler_weights/two/state"), str(tmp_path / "model")
        words = ["export", state, model, "--config", str(made / "config.toml"), "--merge"]
        subprocess.run([sys.executable, "-m", "corerl", *words], check=True)
        tokens = torch.tensor([[1, 2, 3]])
        logits = AutoModelForCausalLM.from_pretrained(model, local_files_only=True)(tokens).logits.log_softmax(-1)
        exported = logits[0, :-1].gather(-1, tokens[0, 1:, None])[:, 0].detach()
        np.testing.assert_allclose(served.logprobs(sampler, [1, 2, 3])[1:], exported, atol=1e-5)
        drawn = served.draw(sampler, [1, 7], seed=1)
        losses += train(policy, 2)
        assert served.logprobs(reference, [1, 2, 3]).tobytes() == before.tobytes()

        served.new_model("a:train:1", rank=4)
        policy.load(path, optimizer=True)
        np.testing.assert_allclose(train(policy, 2), losses[2:], rtol=1e-6)
        assert len(served.draw(publish(served), [1, 7]).sequences[0].tokens) == 6
        with pytest.raises(Refused, match="are gone: ranks hold version"):
            served.draw(sampler, [1, 7])
        policy.release()
        again = served.draw(policy.sampler(path, ""), [1, 7], seed=1).sequences[0]
        assert again.tokens == drawn.sequences[0].tokens
        np.testing.assert_allclose(again.logprobs, drawn.sequences[0].logprobs, atol=1e-6)


def test_a_model_goes_on_in_another_backend_with_more_ranks(shared_ray: None, tmp_path: Path) -> None:
    """From a checkpoint of an earlier server, with its moments."""
    with serving(tmp_path, LORA) as before:
        before.new_model("a:train:0", rank=4)
        losses = train(before.policy, 2)
        path = save(before.policy, "two").tinker_path
        losses += train(before.policy, 3)
    with Engines.start(FSDP) as engines:
        served = Served(ServedPolicy(engines, ServeOptions(name=MODEL, directory=str(tmp_path)), FSDP), engines)
        assert [saved.tinker_path for saved in served.policy.checkpoints.of("a:train:0")] == [path]
        served.new_model("b:train:0", rank=4)
        served.policy.load(path, optimizer=True)
        np.testing.assert_allclose(train(served.policy, 3), losses[2:], rtol=1e-4)
