"""The SDK, unchanged, with a tiny model that is served over loopback."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import tinker
import torch
from tinker import types

from corerl_tinker.options import ServeOptions
from plugins.tinker.tests.conftest import KEY, start
from plugins.tinker.tests.served import LORA, MODEL, ROWS, serving

# The SDK never closes the connections by which it asks for its own configuration.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
ADAM = types.AdamParams(learning_rate=0.01)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tinker.ServiceClient]:
    directory = tmp_path_factory.mktemp("served")
    with serving(directory, LORA) as found:
        options = ServeOptions(name=MODEL, directory=str(directory), context_length=64)
        server, thread, url = start(found.policy, options, [])
        made = tinker.ServiceClient(base_url=url, api_key=KEY)
        yield made
        made.close("success").result()
        del made
        gc.collect()  # while what the SDK leaves open is ignored
        server.stop()
        thread.join()


def datum(row: Sequence[int], **inputs: Sequence[float]) -> types.Datum:
    columns = {name: torch.tensor(values) for name, values in inputs.items()}
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(row[:-1])),
        loss_fn_inputs={"target_tokens": torch.tensor(row[1:]), **columns},
    )


def supervised(trained: tinker.TrainingClient, steps: int) -> list[float]:
    data, losses = [datum(row, weights=[1.0] * (len(row) - 1)) for row in ROWS], []
    for _ in range(steps):
        passed, stepped = trained.forward_backward(data, "cross_entropy"), trained.optim_step(ADAM)
        losses.append(passed.result().metrics["loss:sum"])
        assert stepped.result().metrics["applied"] == 1.0
    return losses


def test_a_resumed_model_goes_on_as_if_nothing_had_happened(client: tinker.ServiceClient) -> None:
    trained = client.create_lora_training_client(base_model=MODEL, rank=4).result()
    losses = supervised(trained, 2)
    path = trained.save_state("two").result().path
    losses += supervised(trained, 2)
    resumed = client.create_training_client_from_state_with_optimizer(path).result()
    assert losses[:2] + supervised(resumed, 2) == losses
    assert losses[0] > losses[1] > losses[2] > losses[3]


def test_what_is_sampled_has_a_ratio_of_one(client: tinker.ServiceClient) -> None:
    trained = client.create_lora_training_client(base_model=MODEL, rank=4).result()
    for _ in range(3):
        sampler = trained.save_weights_and_get_sampling_client().result()
        prompt = types.ModelInput.from_ints([1, 7, 8])
        params = types.SamplingParams(max_tokens=5, stop=[])
        (sequence,) = sampler.sample(prompt, 1, params).result().sequences
        row = [1, 7, 8, *sequence.tokens]
        nothing = [0.0, 0.0]
        sampled = datum(row, logprobs=[*nothing, *sequence.logprobs], advantages=[*nothing, *[1.0] * 5])
        passed = trained.forward_backward([sampled], "importance_sampling").result()
        assert passed.metrics["loss:sum"] == pytest.approx(-5.0, abs=1e-4)
        np.testing.assert_allclose(passed.loss_fn_outputs[0]["logprobs"].data[2:], sequence.logprobs, atol=1e-5)
        trained.optim_step(ADAM).result()


def test_a_teachers_likeliest_tokens_are_learned(client: tinker.ServiceClient) -> None:
    """Off-policy distillation: cross_entropy on [N, K], and the same as a loss of the client's own."""
    row, probabilities = [1, 7, 8, 9], torch.tensor([[0.0, 0.0, 0.0], [0.6, 0.3, 0.1], [0.5, 0.25, 0.25]])
    targets = torch.tensor([[0, 0, 0], [8, 20, 21], [9, 9, 4]])
    inputs = {"target_tokens": targets, "weights": probabilities}
    data = [
        types.Datum(model_input=types.ModelInput.from_ints(row[:3]), loss_fn_inputs=inputs),
        datum([1, 4], weights=[0.0]),
    ]

    def loss(data: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        assert [each.shape for each in logprobs] == [(3, 3), (1,)]
        return -(probabilities * logprobs[0]).sum() + 0 * logprobs[1].sum(), {}

    losses: dict[bool, list[float]] = {True: [], False: []}
    for custom, found in losses.items():
        trained = client.create_lora_training_client(base_model=MODEL, rank=4).result()
        for _ in range(6):
            own = trained.forward_backward_custom(data, loss) if custom else None
            passed = own or trained.forward_backward(data, "cross_entropy")
            found.append(passed.result().metrics["loss:sum"])
            trained.optim_step(types.AdamParams(learning_rate=0.003)).result()
    assert losses[True] == pytest.approx(losses[False], rel=1e-4)
    assert losses[False] == sorted(losses[False], reverse=True) and losses[False][-1] < losses[False][0] - 1.0
    (scored,) = trained.forward(data[:1], "cross_entropy").result().loss_fn_outputs
    assert (
        scored["logprobs"].shape == [3, 3]
        and scored["logprobs"].to_torch()[2, 0] == scored["logprobs"].to_torch()[2, 1]
    )


def test_preferences_are_learned_from_a_frozen_reference(client: tinker.ServiceClient) -> None:
    """Direct preference optimization, as the cookbook does it: the reference is a sampler of the start."""
    trained = client.create_lora_training_client(base_model=MODEL, rank=4).result()
    reference = trained.save_weights_and_get_sampling_client().result()
    pair = [[1, 7, 8, 9], [1, 7, 4, 4]]
    data = [datum(row, weights=[0.0, 1.0, 1.0]) for row in pair]

    def scored() -> list[torch.Tensor]:
        prompts = [types.ModelInput.from_ints(row) for row in pair]
        return [torch.tensor(reference.compute_logprobs(prompt).result()[1:]) for prompt in prompts]

    before, losses = scored(), []

    def loss(data: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        better, worse = (((own - frozen)[1:]).sum() for own, frozen in zip(logprobs, scored(), strict=True))
        found = -torch.nn.functional.logsigmoid(better - worse)
        return found, {"margin:mean": float((better - worse).detach())}

    for _ in range(6):
        passed = trained.forward_backward_custom(data, loss)
        losses.append(passed.result().metrics["loss:sum"])
        trained.optim_step(ADAM).result()
    assert losses[0] == pytest.approx(np.log(2.0), abs=1e-5) and losses[-1] < 0.5
    assert all(torch.equal(*each) for each in zip(scored(), before, strict=True))
    with pytest.raises(tinker.TinkerError, match="rank=32, but adapters here have rank 4"):
        client.create_lora_training_client(base_model=MODEL, rank=32).result()
