"""The SDK's own client against a server over loopback: what recipes do."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import tinker
from tinker import types

from plugins.tinker.tests.conftest import KEY, Served
from plugins.tinker.tests.policies import NAME

# The SDK never closes the connections by which it asks for its own configuration.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")


@pytest.fixture
def client(served: Served) -> Iterator[tinker.ServiceClient]:
    made = tinker.ServiceClient(base_url=served.url, api_key=KEY)
    yield made
    made.close("success").result()
    del made
    gc.collect()  # while what the SDK leaves open is ignored


def datum(first: int, weights: list[float]) -> types.Datum:
    tokens = [first + number for number in range(len(weights))]
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=tokens, dtype="int64"),
            "weights": types.TensorData(data=weights, dtype="float32"),
        },
    )


def test_a_loop_trains_saves_samples_and_resumes(client: tinker.ServiceClient, served: Served) -> None:
    training = client.create_lora_training_client(NAME, rank=8, user_metadata={"renderer": "role_colon"}).result()
    info = training.get_info()
    assert (info.model_data.model_name, info.lora_rank, info.is_lora) == (NAME, 8, True)
    done = training.forward_backward([datum(5, [1.0, 0.5]), datum(9, [2.0])], "cross_entropy")
    step = training.optim_step(types.AdamParams(learning_rate=0.5, beta1=0.25))
    outputs = [output["logprobs"].data for output in done.result().loss_fn_outputs]
    assert outputs == [[0.0, -1.0], [0.0]]
    assert done.result().metrics == {"loss:sum": 0.5}
    assert step.result().metrics == {"grad_norm": 3.5}  # JSON has no word for what is not finite
    saved = training.save_state("first", ttl_seconds=7200, user_metadata={"step": "1"}).result()
    sampler = training.save_weights_and_get_sampling_client().result()
    training.forward_backward([datum(5, [1.0])], "cross_entropy")
    training.optim_step(types.AdamParams(learning_rate=1.0)).result()
    assert served.policy.w == 2.75
    prompt = types.ModelInput.from_ints([7, 8])
    found = sampler.sample(prompt, 2, types.SamplingParams(max_tokens=3, stop=[1, 2], seed=4)).result()
    assert [sequence.tokens for sequence in found.sequences] == [[8, 9, 10], [9, 10, 11]]
    assert found.sequences[0].logprobs == [1.75] * 3 and found.sequences[0].stop_reason == "length"
    assert len({sequence.sequence_id for sequence in found.sequences}) == 2
    assert sampler.compute_logprobs(types.ModelInput.from_ints([1, 2, 3])).result() == [None, -1.0, -2.0]
    resumed = client.create_training_client_from_state_with_optimizer(saved.path).result()
    assert (served.policy.w, served.policy.moment) == (1.75, 3.5)
    assert resumed.forward([datum(1, [1.0])], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data == [1.75]
    assert served.policy.threads == {"group"}
