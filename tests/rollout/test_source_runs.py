"""Runs in this process whose steps are sampled one step ahead, or prompt by prompt."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import frozen

from corerl.checkpoint.commit import read_state
from corerl.checkpoint.reader import CheckpointSource
from corerl.data.prompts import Prompt, PromptStream, SortDigits
from corerl.driver.run import Summary
from corerl.ops.noise import gumbel, hash_keys
from corerl.rollout.recorded import read_rollout, saved_rollouts
from corerl_testing.compare import weights_apart
from corerl_testing.tolerances import GRAD_NORM, LOSS, WEIGHTS_L2
from tests import reference
from tests.end_to_end.command import numbers
from tests.engines.models import plain_logprobs, random_model
from tests.in_process import execute_here, small


def masters(run_dir: Path, step: int) -> dict[str, np.ndarray]:
    source = CheckpointSource(run_dir / f"checkpoints/step-{step:08d}/actor", "master")
    return {name: source.read(name, (0,) * len(shape), shape).numpy() for name, shape in source.shapes.items()}


# ---- one step ahead ----

STEPS, PROMPTS, SAMPLES, TEMPERATURE, LR, SEED = 5, 4, 4, 0.8, 1e-3, 3
CHARACTERS = "0123456789>s"
FIELDS = {
    "model_type": "qwen3",
    "vocab_size": 16,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "tie_word_embeddings": True,
    "initializer_range": 0.1,
}


def overrides(model: Path) -> list[str]:
    """Of the settings that `tests.reference` has."""
    return [
        *(f"model.path={model}", "model.config={}", f"run.steps={STEPS}", f"run.seed={SEED}"),
        *("rollout.source=one-step-off", "rollout.save=true", f"rollout.temperature={TEMPERATURE}"),
        *(f"rollout.prompts={PROMPTS}", f"rollout.samples={SAMPLES}", "rollout.replicas=2"),
        *(f"algorithm.entropy_coef={reference.ENTROPY}", f"algorithm.kl_coef={reference.KL}"),
        *(f"algorithms.grpo.clip_low={reference.CLIP_LOW}", f"algorithms.grpo.clip_high={reference.CLIP_HIGH}"),
        *(f"train.optimizer.lr={LR}", f"train.optimizer.betas={list(reference.BETAS)}"),
        *(f"train.optimizer.eps={reference.EPS}", f"train.optimizer.weight_decay={reference.DECAY}"),
        *(f"train.optimizer.clip_norm={reference.CLIP_NORM}", "train.schedule={}"),
        *("checkpoint.every=2", "checkpoint.keep=0"),
    ]


@frozen
class Ran:
    model: Path  # what it began with
    directory: Path
    summary: Summary


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    directory = tmp_path_factory.mktemp("one-step-off")
    model = directory / "model"
    random_model(FIELDS, seed=1).save_pretrained(model)
    return Ran(model, directory / "run", execute_here(small(directory, *overrides(model))))


# ---- against a loop written out --------------------------------------------------------------------------------------


def by_hand(model: Any, prompts: list[Prompt], step: int) -> list[tuple[list[int], list[int], list[float], float]]:
    """(prompt, response, log-probs, reward) of each sample, token by token and without a cache."""
    found = []
    for prompt, sample in itertools.product(prompts, range(SAMPLES)):
        key = torch.tensor(hash_keys(SEED, step, np.array([prompt.index]), np.array([sample])))
        start = [1, *(4 + CHARACTERS.index(character) for character in prompt.text)]
        response: list[int] = []
        logprobs: list[float] = []
        while len(response) < 7 and response[-1:] != [2]:
            # Of the last entry, that of one more token, whichever it is.
            logprob = plain_logprobs(model, [*start, *response, 0], TEMPERATURE)[-1]
            response.append(int((logprob + gumbel(key, len(response), 16)[0]).argmax()))
            logprobs.append(float(logprob[response[-1]]))
        text = "".join(CHARACTERS[token - 4] for token in response if token >= 4)
        right = sum(got == wanted for got, wanted in zip(text, sorted(prompt.text[:5]), strict=False))
        found.append((start, response, logprobs, right / max(len(text), 5)))
    return found


def test_one_step_off_samples_with_the_previous_weights(ran: Ran) -> None:
    stream = PromptStream(SortDigits(held_out=16, seed=SEED), seed=SEED)
    start = random_model(FIELDS, seed=1)
    batches: list[list[reference.Sample]] = []
    rollouts = saved_rollouts(ran.directory)
    assert len(rollouts) == STEPS
    for step, kept in enumerate(map(read_rollout, rollouts)):
        model = random_model(FIELDS, seed=1)
        before = batches[: max(step - 1, 0)]
        weights = reference.train(ran.model, before, [LR] * len(before), [TEMPERATURE] * len(before)).weights
        model.load_state_dict({name: torch.tensor(value) for name, value in weights.items()}, strict=False)
        drawn = by_hand(model, stream.take(PROMPTS), step)
        rewards = np.array([reward for *_, reward in drawn]).reshape(PROMPTS, SAMPLES)
        apart = rewards.std(axis=1, ddof=1, keepdims=True)
        advantages = ((rewards - rewards.mean(axis=1, keepdims=True)) / (apart + 1e-6)).ravel()
        batches.append(
            [
                reference.Sample(
                    tokens=torch.tensor(prompt + response),
                    chosen=torch.tensor([False] * len(prompt) + [True] * len(response)),
                    advantages=torch.full((len(prompt + response),), float(advantage)),
                    old=torch.tensor([0.0] * len(prompt) + logprobs),
                    reference=torch.cat(
                        [
                            torch.zeros(1),
                            plain_logprobs(start, prompt + response, TEMPERATURE)[
                                torch.arange(len(prompt + response) - 1), torch.tensor((prompt + response)[1:])
                            ],
                        ]
                    ),
                )
                for (prompt, response, logprobs, _), advantage in zip(drawn, advantages, strict=True)
            ]
        )
        batch = kept.rollout.batch
        assert batch.tokens.tolist() == [token for prompt, response, *_ in drawn for token in prompt + response]
        assert set(batch.columns["versions"][batch.columns["loss_mask"]]) == {max(step - 1, 0)}
        np.testing.assert_allclose(kept.rewards, rewards.ravel(), rtol=1e-6)
    bare = reference.train(ran.model, batches, [LR] * STEPS, [TEMPERATURE] * STEPS)
    lines = numbers(ran.directory)
    assert [line["train/loss"] for line in lines] == pytest.approx(bare.losses, rel=LOSS.relative, abs=LOSS.absolute)
    assert [line["rollout/staleness_max"] for line in lines] == [0.0, 1.0, 1.0, 1.0, 1.0]
    assert weights_apart(masters(ran.directory, STEPS), bare.weights) < WEIGHTS_L2


# ---- resume ----------------------------------------------------------------------------------------------------------


def test_a_resumed_run_equals_the_uninterrupted_one(ran: Ran, tmp_path: Path) -> None:
    step = 2
    checkpoint = ran.directory / f"checkpoints/step-{step:08d}"
    assert read_state(checkpoint)["source"].keys() == {"rollout_step", "prompts", "sampled"}
    execute_here(small(tmp_path, *overrides(ran.model), f"checkpoint.resume={checkpoint}"))
    assert numbers(tmp_path / "run") == numbers(ran.directory)[step:]
    for number in range(step, STEPS):
        name = f"rollouts/step-{number:08d}.npz"
        with np.load(tmp_path / "run" / name) as found, np.load(ran.directory / name) as wanted:
            differ = {each for each in wanted.files if not np.array_equal(found[each], wanted[each])}
            assert differ <= {"columns/engines"}  # which engine samples a row is chance
    last = f"checkpoints/step-{STEPS:08d}/actor/rank-00000.safetensors"
    assert (tmp_path / "run" / last).read_bytes() == (ran.directory / last).read_bytes()


# ---- prompt by prompt ------------------------------------------------------------------------------------------------

PENALTIES = ["algorithm.kl_coef=0.1", "algorithm.overlong=penalty", "algorithm.overlong_buffer=1"]
WHOLE = [*PENALTIES, "run.steps=3", "rollout.prompts=8", "rollout.samples=4", "train.tokens_per_micro_batch=64"]
# Some steps of a batch have no loss tokens, and some batches; samples of a constant length count without them too.
MASKED = ["algorithm.overlong=mask", "algorithm.on_mismatch=off", "run.steps=8", "rollout.prompts=4"]
MASKED += ["rollout.samples=2", "rollout.max_tokens=2", "train.mini_batches=2", "train.epochs=2"]


@pytest.mark.parametrize(
    "own",
    [
        [*WHOLE, "algorithm.aggregation=token-mean", "train.mini_batches=4"],
        [*WHOLE, "algorithm.aggregation=constant-length", "train.epochs=2", "algorithm.old_logprobs=recompute"],
        [*MASKED, "algorithm.aggregation=token-mean"],
        [*MASKED, "algorithm.aggregation=constant-length"],
    ],
    ids=["mini-batches", "epochs", "masked", "masked-constant-length"],
)
def test_a_streamed_run_equals_the_synchronous_one_up_to_rounding(tmp_path: Path, own: list[str]) -> None:
    rows = {}
    for name in ("synchronous", "streamed"):
        settings = [*own, "cluster.offload=never", f"rollout.source={name}", f"run.dir={tmp_path / name}"]
        steps = execute_here(small(tmp_path, *settings)).steps_done
        rows[name] = numbers(tmp_path / name)
        assert len(rows[name]) == steps > 0
    skipped = ["train/loss" not in row for row in rows["streamed"]]
    assert any(skipped) == ("algorithm.overlong=mask" in own) and not all(skipped)
    for found, wanted in zip(rows["streamed"], rows["synchronous"], strict=True):
        assert found.keys() == wanted.keys()
        for key in ("rollout/reward", "rollout/tokens", "train/lr", "train/skipped_steps", "rollout/staleness_max"):
            assert found.get(key) == wanted.get(key), key
        if "train/loss" in found:
            assert found["train/loss"] == pytest.approx(wanted["train/loss"], rel=LOSS.relative, abs=LOSS.absolute)
            norm = pytest.approx(wanted["train/grad_norm"], rel=GRAD_NORM.relative, abs=1e-9)
            assert found["train/grad_norm"] == norm
    assert weights_apart(*[masters(tmp_path / name, steps) for name in rows]) < WEIGHTS_L2
