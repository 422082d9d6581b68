"""Models as their authors wrote them, on padded rows: log-probs, entropy, values and gradients are those of
transformers' own forward of each sequence alone."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, LlamaForCausalLM, PreTrainedConfig, PreTrainedModel

from corerl.errors import ModelError
from corerl.models import whole
from corerl.models.attention import PACKED
from corerl.models.build import VALUE_HEAD, build_on_meta, materialize, recompute_layers
from corerl.models.layout import own_attention
from corerl.models.policy import CausalPolicy, Policy
from corerl.models.smallest import smallest_config
from corerl.models.whole import WholePolicy, require_whole
from corerl.ops.attention import PackedSequences
from corerl.ops.padding import Rectangles, rectangles
from corerl.testing.models import drawn_model, tiny_config
from corerl.types import Output

LENGTHS = (24, 9, 1, 17)  # longer than the windows of the smallest configs
TEMPERATURE = 0.7
BOTH = (Output.LOGPROBS, Output.ENTROPY)


def policy_of(model: PreTrainedModel, *, chunk_tokens: int | None = 7) -> WholePolicy:
    """With the weights of `model`, and logits for 7 tokens at a time."""
    config = model.config
    built = build_on_meta(config, dtype=torch.float32, attention=own_attention(config))
    policy = WholePolicy(built, chunk_tokens=chunk_tokens)
    materialize(built, {name: nn.Parameter(param.detach().clone()) for name, param in model.named_parameters()})
    return policy.eval()


def packed_of(model: PreTrainedModel) -> CausalPolicy:
    built = build_on_meta(model.config, dtype=torch.float32, attention=PACKED)
    materialize(built, {name: nn.Parameter(param.detach().clone()) for name, param in model.named_parameters()})
    return CausalPolicy(built).eval()


def drawn(*lengths: int, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 97, (length,), generator=generator) for length in lengths]


def passed(policy: Policy, sequences: Sequence[Tensor], outputs: Sequence[Output] = BOTH) -> dict[Output, Tensor]:
    lengths = [len(each) for each in sequences]
    packing = PackedSequences.of(torch.tensor([0, *lengths]).cumsum(0), "cpu")
    positions = torch.cat([torch.arange(length) for length in lengths])
    found: dict[Output, Tensor] = policy(torch.cat(list(sequences)), packing, positions, TEMPERATURE, outputs)
    return found


def by_the_book(model: PreTrainedModel, sequences: Sequence[Tensor]) -> dict[Output, Tensor]:
    """Each sequence alone through transformers' whole model, then softmax."""
    logprobs, entropy, zero = [], [], torch.zeros(1)
    for each in sequences:
        log_p = (model(input_ids=each[None], use_cache=False).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
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


# ---- the numbers -----------------------------------------------------------------------------------------------------

# What cannot be packed, by kind.
KINDS = [
    "gemma2",  # caps in attention and on logits, alternating windows
    "gemma3_text",  # another rotary base in windows
    "cohere",  # a scale of logits
    "granite",  # scales everywhere
    "gpt_oss",  # sinks, windows, experts
    "mistral",  # a window in all layers
    "olmo3",
    "llama4_text",  # chunks; is its own decoder by `get_decoder`
    "mamba2",
    "falcon_h1",  # attention beside a state space
    "qwen3_next",  # gated delta net, experts
    "recurrent_gemma",
    "bloom",  # an attention of its own, which adds distances
    "opt",
    "bert",  # layers between decoder and head
    "modernbert-decoder",  # takes its head for its decoder
]


@pytest.mark.parametrize("model_type", KINDS)
def test_a_models_own_code_on_padded_rows_gives_what_it_gives_each_sequence_alone(model_type: str) -> None:
    model = drawn_model(smallest_config(model_type))
    policy, sequences = policy_of(model), drawn(*LENGTHS)
    got = passed(policy, sequences)
    assert_same(policy, got, dict(model.named_parameters()), by_the_book(model, sequences))


@pytest.mark.parametrize("kind", ["qwen3-tied", "qwen2", "qwen3-moe"])
def test_whole_and_packed_are_the_same_where_both_can_be_had(kind: str) -> None:
    model = drawn_model(tiny_config(kind))
    rows, packed, sequences = policy_of(model, chunk_tokens=None), packed_of(model), drawn(*LENGTHS)
    others = dict(packed.model.named_parameters())
    assert_same(rows, passed(rows, sequences), others, passed(packed, sequences))


@pytest.mark.parametrize("model_type", ["gemma2", "qwen3_next", "mamba2"])
def test_no_sequence_changes_with_its_padding_or_with_the_others(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, (short, longer) = policy_of(drawn_model(smallest_config(model_type))), drawn(9, 20)
    alone, together = (passed(policy, rows)[Output.LOGPROBS][:9] for rows in ([short], [short, longer]))
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-6)
    other, *_ = drawn(20, seed=3)
    # Not to the last bit: where a tensor lies in memory decides how a CPU adds up its ends.
    torch.testing.assert_close(passed(policy, [short, other])[Output.LOGPROBS][:9], together, rtol=0, atol=1e-6)

    def padded_with_the_first_token(*args: Any, **kwargs: Any) -> Rectangles:
        rows = rectangles(*args, **kwargs)
        gather = rows.gather.copy()
        gather[[cell for cell in range(len(gather)) if cell not in rows.scatter]] = 0
        return evolve(rows, gather=gather)

    monkeypatch.setattr(whole, "rectangles", padded_with_the_first_token)
    torch.testing.assert_close(passed(policy, [short, longer])[Output.LOGPROBS][:9], together, rtol=0, atol=1e-6)


class Logits(TorchDispatchMode):
    """Notes the most rows of any tensor [..., 97] but the head's own."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, Tensor) and each.dim() and each.shape[-1] == 97 and each.shape != (64, 97):
                self.most = max(self.most, each.numel() // 97)
        return result


def test_logits_never_exist_for_more_tokens_than_a_chunk_in_the_backward_pass_either() -> None:
    policy, seen = policy_of(drawn_model(smallest_config("gemma2")), chunk_tokens=4), Logits()
    with seen:
        passed(policy, drawn(*LENGTHS))[Output.LOGPROBS].sum().backward()
    assert seen.most == 4


def test_recomputed_layers_change_no_bit() -> None:
    model = drawn_model(smallest_config("bert"))  # its layers are not the decoder's own ModuleList
    kept, recomputed = policy_of(model), policy_of(model)
    recompute_layers(recomputed.model)
    for policy in (kept, recomputed):
        policy.train()
        passed(policy, drawn(*LENGTHS))[Output.LOGPROBS].sum().backward()
    for one, other in zip(kept.parameters(), recomputed.parameters(), strict=True):
        assert one.grad is None or torch.equal(one.grad, other.grad)


def test_a_batch_of_single_tokens_gives_zeros_and_zero_gradients() -> None:
    policy = policy_of(drawn_model(smallest_config("gemma2")))
    got = passed(policy, drawn(1, 1, 1))[Output.LOGPROBS]
    got.sum().backward()
    assert torch.equal(got, torch.zeros(3))
    assert all(param.grad is not None and not param.grad.any() for param in policy.parameters())


# ---- experts, critics ------------------------------------------------------------------------------------------------


def test_experts_are_reported_and_replayed_token_by_token_whatever_the_padding() -> None:
    model = drawn_model(tiny_config("qwen3-moe"))
    rows, packed, sequences = policy_of(model), packed_of(model), drawn(*LENGTHS)
    chosen = []
    for policy in (rows, packed):
        with torch.no_grad(), policy.routers.told(None, keep=True):
            passed(policy, sequences)
            chosen.append(policy.routers.chosen)
    assert torch.equal(*chosen)
    others = (chosen[0].long() + 1) % 8
    others[::3] = -1  # where the router chooses
    found = []
    for policy in (rows, packed):
        with policy.routers.told(others):
            got = passed(policy, sequences, (Output.LOGPROBS,))[Output.LOGPROBS]
            got.sum().backward()
        found.append(got)
    torch.testing.assert_close(*found, rtol=0, atol=1e-5)
    for one, other in zip(rows.parameters(), packed.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=1e-4)


def test_values_are_those_of_the_decoders_hidden_states_before_each_token() -> None:
    config = smallest_config("gemma2")
    built = build_on_meta(config, dtype=torch.float32, attention="eager", value_head=True)
    generator = torch.Generator().manual_seed(0)
    params = {
        name: nn.Parameter(0.2 * torch.randn(p.shape, generator=generator)) for name, p in built.named_parameters()
    }
    policy = WholePolicy(built)
    materialize(built, params)
    sequences = drawn(*LENGTHS)
    got = passed(policy, sequences, (Output.VALUES,))[Output.VALUES]
    wanted = []
    for each in sequences:
        hidden = built.get_decoder()(input_ids=each[None], use_cache=False).last_hidden_state[0, :-1]
        wanted += [torch.zeros(1), built.get_submodule(VALUE_HEAD)(hidden)[:, 0]]
    torch.testing.assert_close(got, torch.cat(wanted), rtol=0, atol=1e-5)
    assert [id(each) for each in policy.head_parameters] == [id(params["value_head.weight"])]
    with pytest.raises(ModelError, match="a critic cannot compute entropy, logprobs"):
        passed(policy, sequences)


# ---- what it is built of ---------------------------------------------------------------------------------------------


def test_what_follows_the_decoder_calls_no_hook_and_reads_what_replaces_its_parameters() -> None:
    model = drawn_model(smallest_config("bert"))
    policy, called = policy_of(model), []
    for name, module in policy.model.named_modules():
        module.register_forward_hook(lambda *_, name=name: called.append(name))
    passed(policy, drawn(8))
    assert called and all(name.startswith("bert.") for name in called if name != "bert")
    read = {id(param): name for name, param in policy.model.named_parameters()}
    assert [read[id(param)] for param in policy.head_parameters] == [
        "cls.predictions.transform.dense.weight",
        "cls.predictions.transform.dense.bias",
        "cls.predictions.transform.LayerNorm.weight",
        "cls.predictions.transform.LayerNorm.bias",
        "bert.embeddings.word_embeddings.weight",
        "cls.predictions.bias",
    ]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            smallest_config("bert", is_decoder=False),
            "lets every token see later ones with is_decoder=False.*set is_dec",
        ),
        (smallest_config("gemma3_text", use_bidirectional_attention=True), "with use_bidirectional_attention=True"),
        (smallest_config("xlnet"), "^XLNetLMHeadModel lets every token see later ones; use another model"),
        (smallest_config("phimoe"), "^PhimoeForCausalLM uses router_jitter_noise"),
    ],
    ids=lambda each: each.model_type if isinstance(each, PreTrainedConfig) else "",
)
def test_a_model_whose_tokens_see_later_ones_or_whose_numbers_would_change_is_refused(
    config: PreTrainedConfig, message: str
) -> None:
    model = build_on_meta(config, dtype=torch.float32, attention="eager", buffers=False)
    with pytest.raises(ModelError, match=message):
        require_whole(model)


def test_a_model_whose_head_needs_more_than_hidden_states_is_refused() -> None:
    class Looking(LlamaForCausalLM):
        def forward(self, input_ids: Tensor, **kwargs: Any) -> Any:
            output = self.model(input_ids=input_ids, use_cache=False, output_attentions=True)
            return self.lm_head(output.last_hidden_state + output.attentions[0].sum())

    class Embedding(LlamaForCausalLM):
        def forward(self, input_ids: Tensor, **kwargs: Any) -> Any:
            embedded = 2 * self.model.embed_tokens(input_ids)
            output = self.model(inputs_embeds=embedded, use_cache=False)
            return SimpleNamespace(logits=self.lm_head(output.last_hidden_state))

    fields: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 97}
    for kind, message in ((Looking, "needs more than hidden states"), (Embedding, "is not called with the tokens")):
        with torch.device("meta"), pytest.raises(ModelError, match=f"^CoreRL cannot tell the decoder .* {message}"):
            require_whole(kind(AutoConfig.for_model("llama", **fields)))
