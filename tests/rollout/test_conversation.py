"""Tokens are compared with rows put together by hand, and with the tokenizer and its template called by themselves."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from corerl.models.tokenizer import load_tokenizer
from corerl.rollout.conversation import Conversation, Refused, Renderer
from corerl.rollout.engine import Generation

STOP = "<eos>"
# Ends each turn as Qwen's and Llama's do, and writes an answer that is not the last one in other words than its own.
TEMPLATE = (
    "{{ bos_token }}{% for tool in tools or [] %}{{ tool['name'] }}{% endfor %}"
    "{% for message in messages %}{{ message['role'][0] }}:"
    "{% if message['role'] == 'assistant' and messages[loop.index:] | length > 1 %}..{% endif %}"
    "{{ message['content'] }}" + STOP + ";{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
USER = {"role": "user", "content": "12"}
TOOL = {"role": "tool", "content": "45"}


def tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerBase:
    made = load_tokenizer(tokenizer="characters:0123456789>uats:;.", path="")
    if template:
        made.chat_template = template
    return made


def drawn(tokens: Sequence[int], *, version: int = 1, experts: Any = None) -> Generation:
    return Generation(
        tokens=np.array(tokens, dtype=np.int64),
        offsets=np.array([0, len(tokens)]),
        logprobs=-np.array(tokens, dtype=np.float32),
        versions=np.full(len(tokens), version),
        truncated=np.zeros(1, dtype=np.bool_),
        routed_experts=experts,
    )


def answered(
    renderer: Renderer, conversation: Conversation, messages: list[dict[str, Any]], tokens: Sequence[int], **told: Any
) -> Conversation:
    asked = renderer.ask(conversation, messages)
    text = renderer.text(np.array(tokens), [2])
    messages.append({"role": "assistant", "content": text})
    return conversation.answered(asked, text, drawn(tokens, **told))


def test_the_row_of_two_turns_is_what_was_sampled_with_the_templates_words_between() -> None:
    ours = tokenizer()
    renderer, messages = Renderer(ours), [USER]
    first, second = ours("3<eos>", add_special_tokens=False)["input_ids"], [*ours.encode("7")[1:], 2]
    conversation = answered(renderer, Conversation(), messages, first, version=4)
    conversation = answered(renderer, conversation, [*messages, TOOL], second, version=5)
    assert ours.decode(conversation.tokens) == "<bos>u:12<eos>;a:3<eos>;t:45<eos>;a:7<eos>"
    asked = "<bos>u:12<eos>;a:"
    between = ";t:45<eos>;a:"
    lengths = [len(ours.encode(text)[1:]) for text in (asked, "3<eos>", between, "7<eos>")]
    assert conversation.prompt_length == lengths[0]
    sampled = np.repeat([False, True, False, True], lengths)
    np.testing.assert_array_equal(conversation.loss_mask, sampled)
    np.testing.assert_array_equal(conversation.versions, np.repeat([0, 4, 0, 5], lengths))
    np.testing.assert_array_equal(conversation.logprobs, np.where(sampled, -conversation.tokens, 0))
    assert (conversation.turns, conversation.text) == (2, "7")
    assert conversation.begun == sum(lengths[1:])


def test_what_was_sampled_is_never_tokenised_from_its_text() -> None:
    inner = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2, "?": 3}, [("a", "b")]))
    inner.pre_tokenizer = pre_tokenizers.Split("?", "isolated")
    inner.decoder = decoders.Fuse()
    merging = PreTrainedTokenizerFast(tokenizer_object=inner)
    assert merging.encode("ab") == [2]
    renderer, messages = Renderer(merging), [{"role": "user", "content": "?"}]
    conversation = answered(renderer, Conversation(), messages, [0, 1])  # a spelling of "ab" that it would not choose
    assert messages[-1]["content"] == "ab"
    asked = renderer.ask(conversation, [*messages, {"role": "tool", "content": "ab?"}])
    assert asked.tokens.tolist() == [2, 3]
    assert conversation.tokens.tolist() == [3, 0, 1]


def test_an_answer_that_was_cut_is_ended_as_the_template_ends_one() -> None:
    ours = tokenizer()
    renderer, messages = Renderer(ours), [USER]
    conversation = answered(renderer, Conversation(), messages, ours.encode("33")[1:])
    asked = renderer.ask(conversation, [*messages, TOOL])
    assert ours.decode(asked.tokens) == "<eos>;t:45<eos>;a:"


def test_without_a_template_texts_stand_one_behind_the_other() -> None:
    ours = tokenizer(template=None)
    renderer, messages = Renderer(ours), [USER]
    conversation = answered(renderer, Conversation(), messages, [*ours.encode("3")[1:], 2])
    conversation = answered(renderer, conversation, [*messages, TOOL, USER], ours.encode("9")[1:])
    assert ours.decode(conversation.tokens) == "<bos>123<eos>45129"
    with pytest.raises(Refused, match="^tools: the tokenizer has no chat template"):
        renderer.ask(Conversation(), [USER], [{"name": "u"}])


def test_tools_are_shown_once_and_stay_the_same() -> None:
    ours = tokenizer()
    renderer = Renderer(ours)
    asked = renderer.ask(Conversation(), [USER], [{"name": "stu"}])
    assert ours.decode(asked.tokens) == "<bos>stuu:12<eos>;a:"
    conversation = Conversation().answered(asked, "3", drawn(ours.encode("3<eos>")[1:]))
    messages = [USER, {"role": "assistant", "content": "3"}, TOOL]
    assert ours.decode(renderer.ask(conversation, messages, [{"name": "stu"}]).tokens) == ";t:45<eos>;a:"
    with pytest.raises(Refused, match="^tools: others than in the episode's first request"):
        renderer.ask(conversation, messages)


def test_messages_come_back_as_clients_write_them() -> None:
    renderer, messages = Renderer(tokenizer()), [USER]
    conversation = answered(renderer, Conversation(), messages, [4, 2])
    back = {**messages[-1], "refusal": None, "tool_calls": [{"id": "1"}]}
    parts = {"role": "user", "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}], "name": None}
    plain = renderer.ask(conversation, [*messages, TOOL]).tokens
    np.testing.assert_array_equal(renderer.ask(conversation, [parts, back, TOOL]).tokens, plain)


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ([], "^messages: nothing is asked"),
        ([USER, {"role": "assistant", "content": "0"}], "^messages: nothing is asked"),
        ([USER], "^messages: 1 of them, and the episode has 2 with its last answer; send all of these and a new one"),
        (
            [{"role": "user", "content": "13"}, TOOL, TOOL],
            r"^messages\[0\].content: got '13', and the episode has '12",
        ),
        ([USER, {"role": "assistant", "content": "1"}, TOOL], r"^messages\[1\].content: got '1', .* has '0' there"),
        ([USER, {"role": "user", "content": "0"}, TOOL], r"^messages\[1\].role: got 'user', .* has 'assistant'"),
        ([{**USER, "name": "t"}, TOOL, TOOL], r"^messages\[0\].name: got 't', and the episode has None"),
        (
            [USER, {"role": "assistant", "content": "0"}, {"content": "4"}],
            r"^messages\[2\]: wanted an object with a role",
        ),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}, TOOL],
            r"^messages\[0\]: its content has parts that are",
        ),
        ([{"role": "user", "content": 5}, TOOL], r"^messages\[0\]: its content is int, wanted a text"),
    ],
)
def test_a_request_that_does_not_continue_the_conversation_is_refused(
    messages: list[dict[str, Any]], told: str
) -> None:
    renderer = Renderer(tokenizer())
    conversation = answered(renderer, Conversation(), [USER], [4, 2])
    with pytest.raises(Refused, match=told):
        renderer.ask(conversation, messages)


def test_what_the_template_refuses_is_told_with_the_roles() -> None:
    renderer = Renderer(tokenizer("{{ raise_exception('no') }}"))
    with pytest.raises(Refused, match=r"chat template refuses them \(no\); their roles are: user, tool"):
        renderer.ask(Conversation(), [USER, TOOL])
    silent = Renderer(tokenizer("{{ messages[0]['content'] }}"))
    conversation = answered(silent, Conversation(), messages := [USER], [4, 2])
    with pytest.raises(Refused, match="the chat template leaves out the last answer"):
        silent.ask(conversation, [*messages, TOOL])


def test_experts_are_those_of_when_a_token_was_drawn_or_else_read() -> None:
    renderer, messages = Renderer(tokenizer(template=None)), [{"role": "user", "content": "1"}]

    def experts(*numbers: int) -> Any:
        return np.array(numbers, dtype=np.int16).reshape(-1, 1, 1)

    first = answered(renderer, Conversation(), messages, [4, 2], experts=experts(1, 2, 3, -1))  # <bos> 1, two drawn
    second = answered(renderer, first, [*messages, TOOL], [5], experts=experts(9, 9, 9, 7, 6, 5, -1))
    assert second.routed_experts is not None
    assert second.routed_experts.ravel().tolist() == [1, 2, 3, 7, 6, 5, -1]
