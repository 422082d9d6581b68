"""The SDK's own client against a server over loopback: what recipes do."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import tinker
import torch
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
    targets = types.TensorData(data=tokens, dtype="int64")
    inputs = {"target_tokens": targets, "weights": types.TensorData(data=weights, dtype="float32")}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


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


def test_chunks_of_one_pass_arrive_in_parallel_and_add_up(client: tinker.ServiceClient, served: Served) -> None:
    training = client.create_lora_training_client("other/name").result()
    data = [datum(number, [1.0]) for number in range(2500)]  # three chunks, of which the SDK sends the first one last
    done = training.forward_backward(data, "cross_entropy")
    step = training.optim_step(types.AdamParams(learning_rate=1.0))
    assert step.result().metrics == {"grad_norm": 2500.0}
    assert len(done.result().loss_fn_outputs) == 2500 and served.policy.calls[1:] == ["pass 0 1024 2048", "step"]


def test_a_custom_loss_runs_in_the_client(client: tinker.ServiceClient, served: Served) -> None:
    training = client.create_lora_training_client(NAME).result()

    def squared(data: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        return sum((each**2).sum() for each in logprobs), {"rows:sum": float(len(data))}  # type: ignore[return-value]

    done = training.forward_backward_custom([datum(3, [0.0, 0.0, 0.0])], squared)
    training.optim_step(types.AdamParams(learning_rate=0.5)).result()
    assert done.result().metrics["loss:sum"] == 5.0  # of log-probs 0, -1, -2
    assert served.policy.calls == ["create", "forward", "pass 3", "step"]
    assert served.policy.w == 0.5 * 6.0  # minus the sum of 2 log p


def test_a_refusal_reaches_the_caller_and_the_model_goes_on(client: tinker.ServiceClient, served: Served) -> None:
    training = client.create_lora_training_client(NAME).result()
    training.forward_backward([datum(3, [1.0])], "cross_entropy")
    refused = training.forward_backward([datum(1, [1.0])], "stable_reinforce")
    step = training.optim_step(types.AdamParams())
    with pytest.raises(tinker.RequestFailedError, match="unknown loss_fn='stable_reinforce'; there are .*imp") as error:
        refused.result()
    assert error.value.category is types.RequestErrorCategory.User
    why = "the step was not taken, and its gradients are dropped; request 2 of this model, a pass of this step, was ref"
    with pytest.raises(tinker.RequestFailedError, match=f"{why}used: unknown loss_fn='stable_rein"):
        step.result()
    training.forward_backward([datum(1, [1.0])], "cross_entropy").result()
    assert training.optim_step(types.AdamParams(learning_rate=2.0)).result().metrics == {"grad_norm": 1.0}
    assert served.policy.calls == ["create", "pass 3", "discard", "pass 1", "step"]
    with pytest.raises(tinker.BadRequestError, match="base_model='nobody/nothing' is not served here"):
        client.create_lora_training_client("nobody/nothing").result()


def test_five_hundred_samples_at_once(client: tinker.ServiceClient, served: Served) -> None:
    sampler = client.create_sampling_client(base_model=NAME).result()
    params = types.SamplingParams(max_tokens=1, temperature=0.5, top_k=3, top_p=0.9, stop=["a", "b"])
    prompts = [types.ModelInput.from_ints([number]) for number in range(512)]
    found = [future.result() for future in [sampler.sample(prompt, 1, params) for prompt in prompts]]
    assert [each.sequences[0].tokens for each in found] == [[number] for number in range(512)]
    assert len({each.sequences[0].sequence_id for each in found}) == 512
    assert sorted(wanted.seq_id or 0 for wanted in served.policy.drawn) == list(range(512))
    assert served.policy.drawn[0].sampling_params == params


def test_samplers_of_checkpoints_answer_with_their_own_weights(client: tinker.ServiceClient, served: Served) -> None:
    training = client.create_lora_training_client(NAME).result()
    first = training.save_weights_for_sampler("first").result()
    training.forward_backward([datum(1, [1.0])], "cross_entropy")
    training.optim_step(types.AdamParams(learning_rate=4.0))
    second = training.save_weights_and_get_sampling_client().result()
    samplers = [training.create_sampling_client(first.path).result(), second]
    prompt, params = types.ModelInput.from_ints([1]), types.SamplingParams(max_tokens=1)
    found = [sampler.sample(prompt, 1, params).result().sequences[0].logprobs for sampler in samplers]
    assert found == [[0.0], [4.0]]
    with pytest.raises(tinker.NotFoundError, match="there is no checkpoint 'tinker://"):
        training.create_sampling_client(first.path + "-not").result()


def test_runs_and_checkpoints_are_listed_kept_and_deleted(client: tinker.ServiceClient, served: Served) -> None:
    training = client.create_lora_training_client(NAME, rank=8, user_metadata={"renderer_name": "role_colon"}).result()
    saved = training.save_state("one", user_metadata={"step": "1"}).result()
    training.save_weights_for_sampler("two", ttl_seconds=3600).result()
    with pytest.raises(tinker.RequestFailedError, match="give the checkpoint another name, or say overwrite=True"):
        training.save_state("one").result()
    with pytest.warns(FutureWarning, match="create_rest_client"):  # one of its own would stay open
        rest = client.create_rest_client()
    run = rest.get_training_run_by_tinker_path(saved.path).result()
    assert (run.training_run_id, run.base_model, run.lora_rank) == (training.model_id, NAME, 8)
    assert run.user_metadata == {"renderer_name": "role_colon"}
    last = run.last_checkpoint
    assert last and (last.tinker_path, last.expires_at) == (saved.path, None)
    assert run.last_sampler_checkpoint and run.last_sampler_checkpoint.expires_at
    listed = rest.list_checkpoints(training.model_id).result().checkpoints
    found = {each.checkpoint_id: each.checkpoint_type for each in listed}
    assert found == {"weights/one": "training", "sampler_weights/two": "sampler"}
    info = rest.get_weights_info_by_tinker_path(saved.path).result()
    assert (info.base_model, info.is_lora, info.lora_rank) == (NAME, True, 8)
    rest.set_checkpoint_ttl_from_tinker_path(saved.path, 7200).result()
    assert served.policy.checkpoints.find(saved.path)[1].expires_at
    rest.delete_checkpoint_from_tinker_path(saved.path).result()
    (kept,) = served.policy.checkpoints.of(training.model_id)
    assert kept.tinker_path.rpartition("/")[2] == "two"
    with pytest.raises(tinker.NotFoundError, match="there is no checkpoint"):
        client.create_training_client_from_state(saved.path).result()
    models = rest.get_server_capabilities().result().supported_models
    assert [(each.model_name, each.max_context_length) for each in models] == [(NAME, 4096), ("other/name", 4096)]
