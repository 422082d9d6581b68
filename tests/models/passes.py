"""Pass sequences through a policy, and compare what it gives with transformers' own forward of each alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from corerl.models.build import materialize, stored_buffers
from corerl.models.layouts import Policy, make_policy
from corerl.ops.packing import PackedSequences
from corerl.types import Output
from corerl_testing import smallest_config

LENGTHS = (24, 9, 1, 17)  # longer than the windows of the smallest configs
TEMPERATURE = 0.7
BOTH = (Output.LOGPROBS, Output.ENTROPY)


def policy_of(model: PreTrainedModel, layout: str, *, vocabulary: int = 0) -> Policy:
    """With the weights of `model`."""
    policy = make_policy(model.config, dtype=torch.float32, layout=layout, vocabulary=vocabulary)
    materialize(policy.model, {name: nn.Parameter(param.detach().clone()) for name, param in model.named_parameters()})
    theirs = stored_buffers(model)
    for name, buffer in stored_buffers(policy.model).items():
        buffer.copy_(theirs[name])
    return policy.eval()


def drawn(*lengths: int, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 97, (length,), generator=generator) for length in lengths]


def passed(policy: Policy, sequences: Sequence[Tensor], outputs: Sequence[Output] = BOTH) -> dict[Output, Tensor]:
    lengths = [len(each) for each in sequences]
    packing = PackedSequences.of(torch.tensor([0, *lengths]).cumsum(0), "cpu")
    positions = torch.cat([torch.arange(length) for length in lengths])
    found: dict[Output, Tensor] = policy(torch.cat(list(sequences)), packing, positions, TEMPERATURE, outputs)
    return found


def by_the_book(
    model: PreTrainedModel, sequences: Sequence[Tensor], *, vocabulary: int | None = None
) -> dict[Output, Tensor]:
    """Each sequence alone through transformers' whole model, then softmax over the ids below `vocabulary`."""
    logprobs, entropy, zero = [], [], torch.zeros(1)
    for each in sequences:
        logits = model(input_ids=each[None], use_cache=False).logits[0, :-1, :vocabulary]
        log_p = (logits / TEMPERATURE).log_softmax(-1)
        logprobs += [zero, log_p.gather(-1, each[1:, None])[:, 0]]
        entropy += [zero, -(log_p.exp() * log_p).sum(-1)]
    return {Output.LOGPROBS: torch.cat(logprobs), Output.ENTROPY: torch.cat(entropy)}


def assert_same(
    policy: Policy, got: dict[Output, Tensor], others: dict[str, nn.Parameter], wanted: dict[Output, Tensor]
) -> None:
    """Compare the outputs, and the gradients of a weighted sum of them, each with what the whole gradient is."""
    for output in BOTH:
        torch.testing.assert_close(got[output], wanted[output], rtol=0, atol=1e-5)
    weights = torch.rand(2, len(got[Output.LOGPROBS]), generator=torch.Generator().manual_seed(2))
    for found in (got, wanted):
        (found[Output.LOGPROBS] @ weights[0] + found[Output.ENTROPY] @ weights[1]).backward()
    norm = sum(float(param.grad.norm()) ** 2 for param in others.values() if param.grad is not None) ** 0.5
    for name, param in policy.model.named_parameters():
        grad = others[name].grad
        mine = torch.zeros_like(param) if param.grad is None else param.grad
        theirs = torch.zeros_like(param) if grad is None else grad
        # Some, such as of a bias of all keys, are zero but for rounding.
        assert float((mine - theirs).norm()) <= 1e-5 * max(float(theirs.norm()), 1e-3 * norm), name


def pass_with_the_group(model_type: str, layout: str) -> tuple[dict[Output, Tensor], dict[str, Tensor]]:
    """Outputs and gradients of a policy whose output matrix the ranks of the group share, as one rank has them."""
    model = _odd(model_type)
    policy = make_policy(model.config, dtype=torch.float32, layout=layout, group=dist.group.WORLD)
    materialize(policy.model, {name: nn.Parameter(each.detach().clone()) for name, each in model.named_parameters()})
    vocab, width = policy.model.lm_head.weight.shape
    rows = -(-vocab // dist.get_world_size())
    # Padding that a softmax would notice.
    padded = torch.cat(
        [policy.model.lm_head.weight.detach(), 100 * torch.ones(rows * dist.get_world_size() - vocab, width)]
    )
    policy.model.lm_head.weight = nn.Parameter(padded.split(rows)[dist.get_rank()].clone())
    return _outputs_and_gradients(policy)


def pass_alone(model_type: str, layout: str) -> tuple[dict[Output, Tensor], dict[str, Tensor]]:
    return _outputs_and_gradients(policy_of(_odd(model_type), layout))


def _odd(model_type: str) -> PreTrainedModel:
    """A model whose vocabulary no two ranks can share equally; its weights are the same each time."""
    config = smallest_config(model_type)
    config.vocab_size = 97
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model


def _outputs_and_gradients(policy: Policy) -> tuple[dict[Output, Tensor], dict[str, Tensor]]:
    found = passed(policy.eval(), drawn(*LENGTHS))
    weights = torch.rand(2, sum(LENGTHS), generator=torch.Generator().manual_seed(2))
    (found[Output.LOGPROBS] @ weights[0] + found[Output.ENTROPY] @ weights[1]).backward()
    outputs = {output: values.detach() for output, values in found.items()}
    return outputs, {name: each.grad for name, each in policy.model.named_parameters() if each.grad is not None}
