"""What clients ask of the trained model, on a tiny one, against plain torch."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from tinker import types

from corerl.errors import UserError
from corerl_tinker.requests import Datum, Pass, Refused
from corerl_tinker.training import ServedPolicy
from plugins.tinker.tests.served import (
    ADAM,
    MODEL,
    ROWS,
    VOCABULARY,
    Served,
    create,
    datum,
    model_wanted,
    publish,
    run,
    save,
    serving,
    supervised,
    train,
    weights_of,
)

TARGETS = "target_tokens"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("served")) as found:
        yield found


@pytest.fixture
def policy(served: Served) -> ServedPolicy:
    """With a new model."""
    served.new_model("a:train:0")
    return served.policy


# ---- losses ----------------------------------------------------------------------------------------------------------

Tensors = Mapping[str, torch.Tensor]


def _ratio(logprobs: torch.Tensor, inputs: Tensors) -> torch.Tensor:
    return torch.exp(logprobs - inputs["logprobs"])


def _clipped(ratio: torch.Tensor, inputs: Tensors, low: Any, high: Any) -> torch.Tensor:
    bounded = torch.clamp(ratio, low, high)
    return -torch.min(ratio * inputs["advantages"], bounded * inputs["advantages"]).sum()


def _gspo(logprobs: torch.Tensor, inputs: Tensors) -> torch.Tensor:
    inside = inputs["sequence_ratio_mask"] != 0
    mean = (logprobs.detach() - inputs["logprobs"])[inside].mean()
    return _clipped(torch.exp(mean + logprobs - logprobs.detach()), inputs, 0.9, 1.05)


def _cispo(logprobs: torch.Tensor, inputs: Tensors) -> torch.Tensor:
    weight = torch.clamp(_ratio(logprobs, inputs), 0.0, 1.1).detach()
    return -(weight * logprobs * inputs["advantages"]).sum()


def _dro(logprobs: torch.Tensor, inputs: Tensors) -> torch.Tensor:
    quadratic = (logprobs - inputs["logprobs"]) ** 2
    return -(logprobs * inputs["advantages"] - 0.5 * 0.3 * quadratic).sum()


# loss -> (its config, what it is for one row in the words of its documentation)
WRITTEN_OUT: Mapping[str, tuple[Mapping[str, float], Callable[[torch.Tensor, Tensors], torch.Tensor]]] = {
    "cross_entropy": ({}, lambda logprobs, inputs: -(logprobs * inputs["weights"]).sum()),
    "importance_sampling": ({}, lambda logprobs, inputs: -(_ratio(logprobs, inputs) * inputs["advantages"]).sum()),
    "ppo": ({}, lambda logprobs, inputs: _clipped(_ratio(logprobs, inputs), inputs, 0.8, 1.2)),
    "cispo": ({"clip_high_threshold": 1.1}, _cispo),
    "gspo": ({"clip_low_threshold": 0.9, "clip_high_threshold": 1.05}, _gspo),
    "dro": ({"beta": 0.3}, _dro),
}
PROMPT = 2  # targets of each row that are not sampled


def pass_of(loss: str) -> Pass:
    """Ratios on both sides of all bounds, and advantages of both signs; prompts without any."""
    rng, datums = np.random.default_rng(3), []
    for row in ROWS:
        count = len(row) - 1
        sampled = np.arange(count) >= min(PROMPT, count - 1)
        logprobs, advantages = -3.45 + 0.5 * rng.standard_normal(count), rng.standard_normal(count)
        inputs = {"logprobs": np.where(sampled, logprobs, 0.0), "advantages": np.where(sampled, advantages, 0.0)}
        if loss == "cross_entropy":
            inputs = {"weights": np.where(sampled, rng.standard_normal(count), 0.0)}
        if loss == "gspo":
            inputs["sequence_ratio_mask"] = sampled
        datums.append(datum(row, **inputs))
    return Pass(loss=loss, datums=tuple(datums), config=WRITTEN_OUT[loss][0])


def logprobs_of(network: torch.nn.Module, row: Datum) -> torch.Tensor:
    """In the shape of the targets, by transformers' own forward."""
    logits = network(input_ids=torch.tensor(row.tokens)[None]).logits[0].float()
    targets = torch.tensor(row.inputs["target_tokens"])
    return torch.log_softmax(logits, dim=-1).gather(1, targets.view(len(targets), -1)).view(targets.shape)


def in_torch(network: torch.nn.Module, wanted: Pass) -> tuple[float, list[torch.Tensor], dict[str, torch.Tensor]]:
    """The loss, the log-probs of each row, and the gradients by the parameters' names."""
    network = copy.deepcopy(network)
    network.zero_grad()
    rows = [logprobs_of(network, row) for row in wanted.datums]
    _, formula = WRITTEN_OUT[wanted.loss]
    inputs = [{name: torch.tensor(column) for name, column in row.inputs.items()} for row in wanted.datums]
    loss = torch.stack([formula(*each) for each in zip(rows, inputs, strict=True)]).sum()
    loss.backward()
    return float(loss.detach()), [row.detach() for row in rows], gradients_of(network)


def gradients_of(network: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.grad.clone() for name, param in network.named_parameters() if param.grad is not None}


def off_the_row(wanted: Pass) -> Pass:
    """With other tokens as targets than those that come next."""
    rng = np.random.default_rng(5)
    others = [rng.integers(3, VOCABULARY, len(each.tokens)) for each in wanted.datums]
    pairs = zip(wanted.datums, others, strict=True)
    return evolve(wanted, datums=tuple(evolve(each, inputs={**each.inputs, TARGETS: new}) for each, new in pairs))


def of_several() -> Pass:
    """As a teacher's likeliest tokens, with equal ones among them, a different number in each row."""
    rng, datums = np.random.default_rng(5), []
    for several, row in zip((1, 3, 8), ROWS, strict=True):
        shape = (len(row) - 1, several)
        targets = rng.integers(3, 9, shape)
        weights = rng.uniform(-0.2, 1.0, shape).astype(np.float32)
        datums.append(Datum(tokens=np.array(row[:-1]), inputs={TARGETS: targets, "weights": weights}))
    return Pass(loss="cross_entropy", datums=tuple(datums))


PASSES = {
    **{loss: pass_of(loss) for loss in WRITTEN_OUT},
    "cross_entropy of several targets": of_several(),
    "cross_entropy of other targets": off_the_row(pass_of("cross_entropy")),
    "ppo of other targets": off_the_row(pass_of("ppo")),
}


@pytest.mark.parametrize("wanted", PASSES.values(), ids=PASSES.keys())
def test_losses_gradients_and_logprobs_are_those_of_torch(wanted: Pass, served: Served, policy: ServedPolicy) -> None:
    value, logprobs, gradients = in_torch(served.network, wanted)
    without = run(policy, evolve(wanted, forward_only=True))
    done = run(policy, wanted)
    for found in (done, without):
        assert found[1] == pytest.approx(value, rel=1e-5)
        for row, expected in zip(found[0], logprobs, strict=True):
            np.testing.assert_allclose(row, expected, atol=1e-5)
    torch.testing.assert_close(gradients_of(served.network), gradients, rtol=1e-4, atol=1e-5)
    assert max(float(gradient.abs().max()) for gradient in gradients.values()) > 0.1


@pytest.mark.parametrize("wanted", PASSES.values(), ids=PASSES.keys())
def test_passes_add_the_gradients_of_one_alone_or_together(wanted: Pass, served: Served, policy: ServedPolicy) -> None:
    whole = run(policy, wanted)
    gradients = gradients_of(served.network)
    policy.discard()
    parts = [policy.rows(evolve(wanted, datums=[each])) for each in wanted.datums]
    alone = [part.done(policy.run([part])[0]) for part in parts]
    torch.testing.assert_close(gradients_of(served.network), gradients, rtol=1e-5, atol=1e-6)
    assert sum(loss for _, loss in alone) == pytest.approx(whole[1], abs=1e-5)
    policy.discard()
    alike = [list(group) for _, group in itertools.groupby(parts, key=lambda part: part.key)]
    assert len(alike) == (3 if wanted is PASSES["cross_entropy of several targets"] else 1)
    together = [part.done(found) for group in alike for part, found in zip(group, policy.run(group), strict=True)]
    torch.testing.assert_close(gradients_of(served.network), gradients, rtol=1e-5, atol=1e-6)
    for found, expected in zip(together, alone, strict=True):
        assert found[1] == pytest.approx(expected[1], rel=1e-5)
        np.testing.assert_allclose(found[0][0], expected[0][0], atol=1e-5)


def with_adam(**settings: float) -> types.AdamParams:
    return ADAM.model_copy(update=settings)


def in_torch_trained(network: torch.nn.Module, settings: Sequence[types.AdamParams]) -> list[Any]:
    """The loss before each step of torch's own optimizer, as approximations."""
    optimizer, losses = torch.optim.AdamW(network.parameters()), []
    for each in settings:
        matrices = [param for param in network.parameters() if param.ndim > 1]
        for group in optimizer.param_groups:
            group.update(lr=each.learning_rate, betas=(each.beta1, each.beta2), eps=each.eps, weight_decay=0.0)
        optimizer.zero_grad()
        loss = -torch.stack([logprobs_of(network, row).sum() for row in supervised(*ROWS).datums]).sum()
        loss.backward()
        if each.grad_clip_norm:
            torch.nn.utils.clip_grad_norm_(network.parameters(), each.grad_clip_norm)
        with torch.no_grad():
            for param in matrices:  # decoupled, and of matrices alone
                param.mul_(1.0 - each.learning_rate * each.weight_decay)
        optimizer.step()
        losses.append(pytest.approx(loss.item(), rel=1e-4))
    return losses


def test_steps_with_settings_of_their_own_are_those_of_torch(served: Served, policy: ServedPolicy) -> None:
    settings = [
        ADAM,
        with_adam(learning_rate=0.003, beta1=0.8, beta2=0.99, eps=1e-6),
        with_adam(weight_decay=2.0, grad_clip_norm=1.0),
        ADAM,
        ADAM,
    ]
    expected, losses = in_torch_trained(copy.deepcopy(served.network), settings), []
    for each in settings:
        losses.append(run(policy, supervised(*ROWS))[1])
        norm = math.sqrt(sum(float((grad**2).sum()) for grad in gradients_of(served.network).values()))
        assert policy.step(each) == {"grad_norm": pytest.approx(norm, rel=1e-4), "applied": 1.0}
    assert losses == expected


# ---- the model's states ----------------------------------------------------------------------------------------------


WRONG: Sequence[tuple[Callable[[ServedPolicy], Any], str]] = (
    (lambda policy: policy.step(ADAM), "no forward_backward has come since the last step"),
    (lambda policy: passed(policy).step(with_adam(beta2=1.0)), r"betas=\(0.9, 1.0\), expected two numbers, each"),
    (lambda policy: passed(policy).step(with_adam(learning_rate=math.nan)), "learning_rate=nan"),
    (lambda policy: save(passed(policy), "x"), "save after optim_step"),
    (lambda policy: load(passed(policy), "x"), "take optim_step first"),
    (lambda policy: load(policy, "never"), "there is no checkpoint 'tinker://a:train:0/weights/never'"),
)


def passed(policy: ServedPolicy) -> ServedPolicy:
    run(policy, supervised(*ROWS))
    return policy


def load(policy: ServedPolicy, name: str) -> None:
    policy.load(f"tinker://a:train:0/weights/{name}", optimizer=True)


def test_refused_calls_leave_the_model_as_it_is(served: Served, policy: ServedPolicy) -> None:
    expected = train(policy, 3)
    served.new_model("a:train:1")
    losses = train(policy, 1)
    for call, sentence in WRONG:
        with pytest.raises(UserError, match=sentence):
            call(policy)
        policy.discard()
    assert losses + train(policy, 2) == expected


def test_a_step_whose_gradients_overflow_is_not_applied(served: Served, policy: ServedPolicy) -> None:
    expected = train(policy, 2)
    served.new_model("a:train:1")
    losses = train(policy, 1)
    sampler = publish(served)
    run(policy, Pass(loss="cross_entropy", datums=(datum([1, 2, 3], weights=[3e38, 3e38]),)))
    assert policy.step(ADAM)["applied"] == 0.0
    assert len(served.draw(sampler, [1, 2]).sequences) == 1  # its weights are those of now
    assert losses + train(policy, 1) == expected


def test_a_model_that_is_refused_leaves_the_one_before(
    served: Served, policy: ServedPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(*_: Any, **__: Any) -> None:
        raise OSError("no space left")

    expected = train(policy, 3)
    served.new_model("b:train:1")
    losses = train(policy, 2)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "mkdir", no_space)
        with pytest.raises(Refused, match="serve.directory: no space left"):
            create(policy, model_wanted(), "b:train:2")
    assert losses + train(policy, 1) == expected


def test_a_resumed_model_goes_on_as_if_nothing_had_happened(served: Served, policy: ServedPolicy) -> None:
    expected = train(policy, 4)
    served.new_model("c:train:0")
    losses = train(policy, 2)
    path = save(policy, "two", overwrite=True, user_metadata={"note": "half"}).tinker_path
    served.new_model("c:train:1")
    policy.load(path, optimizer=True)
    assert losses + train(policy, 2) == expected
    (saved,) = policy.checkpoints.of("c:train:0")
    assert (saved.tinker_path, saved.user_metadata) == (path, {"note": "half"})


def test_weights_without_moments_begin_a_new_optimizer(served: Served, policy: ServedPolicy) -> None:
    losses = train(policy, 2)
    path = save(policy, "moments", overwrite=True).tinker_path
    saved = weights_of(served)
    losses += train(policy, 2)
    served.new_model("c:train:2")
    policy.load(path, optimizer=False)
    torch.testing.assert_close(weights_of(served), saved, rtol=0, atol=0)
    network = copy.deepcopy(served.network)
    found = train(policy, 2)
    assert found == in_torch_trained(network, (ADAM, ADAM)) and found[0] == losses[2] and found[1] != losses[3]


def test_a_broken_checkpoint_leaves_ranks_that_answer(served: Served, policy: ServedPolicy) -> None:
    first = train(policy, 2)
    sampler = publish(served)
    path = save(policy, "broken", overwrite=True).tinker_path
    for each in served.policy.checkpoints.state_of(path).rglob("*.json"):
        each.unlink()
    with pytest.raises(Refused, match=r"weights/broken cannot be loaded, and ranks begin with the model again: "):
        policy.load(path, optimizer=True)
    with pytest.raises(Refused, match="are gone"):
        served.logprobs(sampler, ROWS[0])
    assert train(policy, 2) == first


def test_a_client_learns_that_all_weights_are_trained(served: Served) -> None:
    made = create(served.policy, model_wanted(32), "e:train:0")
    assert (made.base_model, made.lora_rank, made.is_lora) == (MODEL, None, False)
    with pytest.raises(Refused, match="this server trains all weights, and not some layers alone"):
        create(served.policy, model_wanted(32, train_attn=False), "e:train:1")
