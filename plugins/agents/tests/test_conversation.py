"""Tokens are compared with rows put together by hand, and with the tokenizer and its template called by themselves."""

import re
import string
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tokenizers
from attrs import evolve
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from corerl.engines import Generation, SamplingParams
from corerl.models import load_tokenizer
from corerl_agents.conversation import Answer, Conversation, RenderedRequest, Renderer, read_messages
from corerl_agents.refused import Diverges, Refused
from corerl_agents.tool_calls import FORMATS

STOP = "<eos>"
PARAMS = SamplingParams(stop_tokens=(2,))
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
        engines=np.full(len(tokens), version - 3, np.int16),
        truncated=np.zeros(1, dtype=np.bool_),
        routed_experts=experts,
    )


def answered(
    renderer: Renderer, conversation: Conversation, messages: list[dict[str, Any]], tokens: Sequence[int], **told: Any
) -> Conversation:
    asked = renderer.ask(conversation, messages)
    answer = renderer.answer(asked, np.array(tokens), PARAMS)
    messages.append(answer.message)
    return conversation.answered(asked, answer, drawn(tokens, **told))


def test_a_row_has_the_templates_words_between_turns() -> None:
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
    row = conversation.row()
    np.testing.assert_array_equal(row.tokens, conversation.tokens)
    np.testing.assert_array_equal(row.loss_mask, sampled)
    np.testing.assert_array_equal(row.versions, np.repeat([0, 4, 0, 5], lengths))
    np.testing.assert_array_equal(row.engines, np.repeat([0, 1, 0, 2], lengths))
    np.testing.assert_array_equal(row.logprobs, np.where(sampled, -conversation.tokens, 0))
    assert (row.turns, row.text, row.prompt_length) == (2, "7", lengths[0])
    assert conversation.begun == sum(lengths[1:])
    # A row beside another one that has the first answer too.
    second_alone = conversation.row(shared=1)
    np.testing.assert_array_equal(second_alone.tokens, row.tokens)
    np.testing.assert_array_equal(second_alone.loss_mask, np.repeat([False, False, False, True], lengths))
    np.testing.assert_array_equal(second_alone.versions, np.repeat([0, 0, 0, 5], lengths))
    np.testing.assert_array_equal(second_alone.logprobs, np.where(second_alone.loss_mask, -row.tokens, 0))
    assert second_alone.turns == 1


def test_what_was_sampled_is_never_tokenized_from_its_text() -> None:
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


def test_a_cut_answer_ends_as_the_template_does() -> None:
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
    conversation = Conversation().answered(asked, Answer(text="3", content="3"), drawn(ours.encode("3<eos>")[1:]))
    messages = [USER, {"role": "assistant", "content": "3"}, TOOL]
    assert ours.decode(renderer.ask(conversation, messages, [{"name": "stu"}]).tokens) == ";t:45<eos>;a:"
    with pytest.raises(Diverges, match="^tools: differ from those of the request that began the conversation"):
        renderer.ask(conversation, messages)


def test_tools_that_no_template_shows_are_refused_or_noted(capsys: pytest.CaptureFixture[str]) -> None:
    ours, tools = tokenizer(TEMPLATE.replace("tool['name']", "''")), [{"name": "stu"}]
    with pytest.raises(Refused, match="^tools: the tokenizer's chat template does not show them to the model; use a "):
        Renderer(ours).ask(Conversation(), [USER], tools)
    for _ in range(2):  # one for each batch
        renderer = Renderer(ours, FORMATS["hermes"], unshown_tools=True)
        asked = [renderer.ask(Conversation(), [USER], tools) for _ in range(2)]
        assert {ours.decode(each.tokens) for each in asked} == {"<bos>u:12<eos>;a:"}
    told = "corerl: note: tools of a request: the tokenizer's chat template does not show them to the model, "
    assert capsys.readouterr().err.count(told) == 1


def test_with_tool_choice_none_calls_stay_text() -> None:
    renderer, ours = calling()
    tools, said = [{"name": "t"}], np.array([*calling()[1].encode(CALLS, add_special_tokens=False), 2])
    none = renderer.ask(Conversation(), [USER], tools, most_calls=0)
    np.testing.assert_array_equal(none.tokens, renderer.ask(Conversation(), [USER]).tokens)
    assert renderer.answer(none, said, PARAMS) == Answer(text=CALLS, content=CALLS)
    # In a later request, what was shown stays as it is.
    messages: list[dict[str, Any]] = [USER]
    asked = renderer.ask(Conversation(), messages, tools)
    assert ours.decode(asked.tokens) == "<bos>tu:12<eos>;a:"
    conversation = Conversation().answered(asked, Answer(text="5", content="5"), drawn([9, 2]))
    messages += [{"role": "assistant", "content": "5"}, USER]
    later = renderer.ask(conversation, messages, tools, most_calls=0)
    np.testing.assert_array_equal(later.tokens, renderer.ask(conversation, messages, tools).tokens)
    assert renderer.answer(later, said, PARAMS).calls == ()
    again = conversation.answered(later, Answer(text="5", content="5"), drawn([9, 2]))
    messages += [{"role": "assistant", "content": "5"}, USER]
    assert renderer.answer(renderer.ask(again, messages, tools), said, PARAMS).calls


def test_without_parallel_calls_only_the_first_is_sent() -> None:
    renderer, ours = calling()
    said = np.array([*ours.encode(CALLS, add_special_tokens=False), 2])
    asked = renderer.ask(Conversation(), [USER], [{"name": "t"}], most_calls=1)
    answer = renderer.answer(asked, said, PARAMS)
    assert (answer.text, answer.content, [call["function"]["name"] for call in answer.calls]) == (CALLS, "1", ["t"])
    conversation = Conversation().answered(asked, answer, drawn(said.tolist()))
    result = {"role": "tool", "tool_call_id": answer.calls[0]["id"], "content": "9"}
    more = renderer.ask(conversation, [USER, answer.message, result], [{"name": "t"}], most_calls=1)
    assert ours.decode(conversation.tokens) + ours.decode(more.tokens) == (
        f"<bos>tu:12<eos>;a:{CALLS}<eos>;t:9<eos>;a:"
    )


def test_messages_come_back_as_clients_write_them() -> None:
    renderer, messages = Renderer(tokenizer()), [USER]
    conversation = answered(renderer, Conversation(), messages, [4, 2])
    back = {**messages[-1], "refusal": None, "tool_calls": [{"id": "1"}]}
    parts = {"role": "user", "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}], "name": None}
    plain = renderer.ask(conversation, [*messages, TOOL]).tokens
    empty = [{**message, "tool_calls": []} for message in (*messages, TOOL)]
    for written in ([parts, back, TOOL], empty):
        read = read_messages(written)
        assert conversation.difference(read) is None
        np.testing.assert_array_equal(renderer.ask(conversation, read).tokens, plain)


# Refuses two calls at once, as Llama 3.1's does, and writes calls out of `tool_calls` in words of its own.
CALLING = TEMPLATE.replace(
    "{{ message['content'] }}",
    "{% if message['tool_calls'] | length > 1 %}{{ raise_exception('one at a time') }}{% endif %}"
    "{% for call in message['tool_calls'] or [] %}{{ call['function']['name'] }}{% endfor %}{{ message['content'] }}",
)
CALLS = '1<tool_call>{"name":"t","arguments":{"a":"5"}}</tool_call><tool_call>{"name":"u","arguments":{}}</tool_call>'


def calling() -> tuple[Renderer, PreTrainedTokenizerBase]:
    ours = load_tokenizer(tokenizer=f"characters:{string.printable.strip()} \n", path="")
    ours.chat_template = CALLING
    return Renderer(ours, FORMATS["hermes"]), ours


def test_an_answer_with_calls_stays_as_it_was_sampled() -> None:
    renderer, ours = calling()
    tools = [{"name": "t"}]
    said = np.array([*ours.encode(CALLS, add_special_tokens=False), 2])
    asked = renderer.ask(Conversation(), [USER], tools)
    answer = renderer.answer(asked, said, PARAMS)
    assert (answer.text, answer.content) == (CALLS, "1")
    assert [call["function"]["name"] for call in answer.calls] == ["t", "u"]
    conversation = Conversation().answered(asked, answer, drawn(said.tolist()))
    assert conversation.text == CALLS

    back = {"role": "assistant", "content": "1", "refusal": None, "tool_calls": [dict(call) for call in answer.calls]}
    back["tool_calls"][0]["function"] = {"name": "t", "arguments": '{ "a" : "5" }'}
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "9"} for call in answer.calls]
    more = renderer.ask(conversation, [USER, back, *results], tools)
    assert ours.decode(more.tokens) == ";t:9<eos>;t:9<eos>;a:"
    again = conversation.answered(more, Answer(text="5", content="5"), drawn([9, 2], version=2))
    assert ours.decode(again.tokens) == f"<bos>tu:12<eos>;a:{CALLS}<eos>;t:9<eos>;t:9<eos>;a:{ours.decode([9])}<eos>"
    np.testing.assert_array_equal(again.tokens[: len(conversation.tokens)], conversation.tokens)
    # An answer of before, in whatever words, is compared with what was told of it.
    renderer.ask(again, [USER, back, *results, {"role": "assistant", "content": "5"}, USER], tools)

    assert conversation.difference([USER, back, *results]) is None
    changed = {**back, "tool_calls": [{**back["tool_calls"][0], "function": {"name": "t", "arguments": "{}"}}]}
    for wrong in (changed, {"role": "assistant", "content": "1"}, {"role": "assistant", "content": CALLS}):
        difference = conversation.difference([USER, wrong, *results])
        assert difference and difference.text.startswith(("messages[1].tool_calls: got", "messages[1].content: got"))
        assert (difference.number, difference.changed) == (1, True)


RESULT_ALONE = "message['role'] == 'tool' and not (loop.previtem['tool_calls'] or loop.previtem['role'] == 'tool')"
TWO_ANSWERS = "messages | rejectattr('role', 'equalto', 'tool') | rejectattr('tool_calls') | list | length > 2"


@pytest.mark.parametrize("refused", [RESULT_ALONE, TWO_ANSWERS])  # by gpt-oss's and MiniMax M2's; by Mistral's
def test_a_template_that_wants_the_calls_of_results_is_shown_them(refused: str) -> None:
    _, ours = calling()
    message = "{{ message['content'] }}{% for call in message['tool_calls'] or [] %}({{ call | tojson }}){% endfor %}"
    refusing = f"{{% if {refused} %}}{{{{ raise_exception('no call') }}}}{{% endif %}}{message}"
    ours.chat_template = TEMPLATE.replace("{{ message['content'] }}", refusing)
    renderer, tools = Renderer(ours, FORMATS["hermes"]), [{"name": "t"}]
    said = np.array([*ours.encode(CALLS, add_special_tokens=False), 2])
    conversation, messages = Conversation(), [USER]

    def ask() -> RenderedRequest:
        return renderer.ask(conversation, read_messages(messages), tools)

    for _ in range(2):
        answer = renderer.answer(asked := ask(), said, PARAMS)
        conversation = conversation.answered(asked, answer, drawn(said.tolist()))
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "9"} for call in answer.calls]
        messages += [answer.message, *results]
    turn = f"{CALLS}<eos>;t:9<eos>;t:9<eos>;a:"
    assert ours.decode(conversation.tokens) + ours.decode(ask().tokens) == f"<bos>tu:12<eos>;a:{turn}{turn}"
    conversation = conversation.answered(asked, answer, drawn(said[:-1].tolist()))  # such as by a stop text
    messages += messages[-3:]
    with pytest.raises(Diverges, match="ends the last answer otherwise than the policy did"):
        ask()


def test_calls_that_cannot_be_read_stay_text() -> None:
    renderer, ours = calling()
    without, with_tools = (renderer.ask(Conversation(), [USER], tools) for tools in ([], [{"name": "t"}]))

    def read(asked: RenderedRequest, text: str, *end: int) -> Answer:
        return renderer.answer(asked, np.array([*ours.encode(text, add_special_tokens=False), *end]), PARAMS)

    assert read(with_tools, CALLS, 2).calls
    malformed = CALLS.replace('"name"', '"name')
    for asked, text, *end in ((without, CALLS, 2), (with_tools, CALLS), (with_tools, malformed, 2)):
        assert read(asked, text, *end) == Answer(text=text, content=text)
    said = np.array([*ours.encode(CALLS, add_special_tokens=False), 2])
    assert not Renderer(ours).answer(with_tools, said, PARAMS).calls


THINKING = TEMPLATE.replace("a:{% endif %}", "a:<think>{% endif %}")


def thinking(special: bool = False, **options: Any) -> tuple[Renderer, PreTrainedTokenizerBase]:
    ours = load_tokenizer(tokenizer=f"characters:{string.printable.strip()} \n", path="")
    ours.chat_template = THINKING
    if special:
        ours.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    return Renderer(ours, FORMATS["hermes"], **options), ours


@pytest.mark.parametrize(
    ("special", "kept", "text", "content"),
    [
        (False, False, "<think>1</think>2", "1</think>2"),
        (True, False, "12", "12"),
        (True, True, "<think>1</think>2", "12"),
    ],
)
def test_rewards_see_what_the_template_opens(special: bool, kept: bool, text: str, content: str) -> None:
    renderer, ours = thinking(special, special_tokens=kept)
    said = [*ours.encode("1</think>2", add_special_tokens=False), 2]
    messages: list[dict[str, Any]] = [USER]
    conversation = answered(renderer, Conversation(), messages, said)
    assert ours.decode(conversation.tokens) == "<bos>u:12<eos>;a:<think>1</think>2<eos>"
    assert (conversation.text, messages[-1]["content"]) == (text, content)
    again = answered(renderer, conversation, [*messages, TOOL], said)  # behind a later request too
    assert again.text == text
    assert ours.decode(again.tokens).endswith(";t:45<eos>;a:<think>1</think>2<eos>")
    begun = renderer.ask(Conversation(), [USER, {"role": "assistant", "content": "<think>0"}])
    assert renderer.answer(begun, np.array(said), PARAMS).text == ("12" if special and not kept else "1</think>2")


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("separate", [False, True])
def test_reasoning_sent_back_in_its_own_field_continues(special: bool, separate: bool) -> None:
    renderer, ours = thinking(special, separate_reasoning=separate)
    said = [*ours.encode("1\n</think>\n\n2", add_special_tokens=False), 2]
    conversation = answered(renderer, Conversation(), messages := [USER], said)
    whole = "1\n\n\n2" if special else "1\n</think>\n\n2"
    if separate:
        assert messages[-1] == {"role": "assistant", "content": "2", "reasoning_content": "1"}
    else:
        assert messages[-1] == {"role": "assistant", "content": whole}
    apart = [{"role": "assistant", "content": "2", key: "1"} for key in ("reasoning_content", "reasoning")]
    for back in (messages[-1], *apart, *([{"role": "assistant", "content": "2"}] if separate else [])):
        assert conversation.difference(read_messages([USER, back, TOOL])) is None, back
    for wrong in (("3", "reasoning_content", "1"), ("2", "reasoning_content", "0"), ("2", "reasoning", "0")):
        content, key, reasoning = wrong
        back = {"role": "assistant", "content": content, key: reasoning}
        difference = conversation.difference(read_messages([USER, back, TOOL]))
        assert difference is not None and difference.changed, wrong
    asked = renderer.ask(conversation, read_messages([USER, apart[0], TOOL]))
    assert ours.decode(asked.tokens) == ";t:45<eos>;a:<think>"


def test_the_content_of_gpt_oss_has_no_headers_of_messages() -> None:
    _, ours = thinking()
    marks = ["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>"]
    ours.add_special_tokens({"additional_special_tokens": marks})
    ours.chat_template = TEMPLATE
    said = "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant<|channel|>"
    call = 'commentary to=functions.t <|constrain|>json<|message|>{"a":2}'
    for separate, text, message in (
        (True, f"{said}final<|message|>It is 4.", {"content": "It is 4.", "reasoning_content": "I add."}),
        (True, said + call, {"content": "", "reasoning_content": "I add."}),
        (False, said + call, {"content": "I add."}),
    ):
        renderer = Renderer(ours, FORMATS["gpt-oss"], separate_reasoning=separate)
        asked = renderer.ask(Conversation(), [USER], [{"name": "t"}])
        answer = renderer.answer(asked, np.array([*ours.encode(text, add_special_tokens=False), 2]), PARAMS)
        assert {key: answer.message[key] for key in message} == message
        assert [each["function"] for each in answer.calls] == [{"name": "t", "arguments": '{"a": 2}'}] * (call in text)


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ([], "messages: nothing to answer"),
        ([USER, {"role": "assistant", "tool_calls": [{"id": "1"}]}], "messages: nothing to answer; the last message"),
        ([{"role": "user", "content": [{"type": "image_url"}]}, TOOL], "messages[0] has the content part {'type': 'im"),
    ],
)
def test_messages_that_cannot_be_read_are_refused(messages: list[dict[str, Any]], told: str) -> None:
    with pytest.raises(Refused, match=f"^{re.escape(told)}"):
        read_messages(messages)


@pytest.mark.parametrize(
    ("messages", "number", "told"),
    [
        ([USER, {"role": "assistant", "content": "0"}], 2, "messages: got 2, but the episode already has 2, including"),
        ([USER], 1, "messages: got 1, but the episode already has 2, including its last answer"),
        ([{"role": "user", "content": "13"}, TOOL, TOOL], 0, "messages[0].content: got '13', but the episode has '12"),
        ([USER, {"role": "assistant", "content": "1"}, TOOL], 1, "messages[1].content: got '1', but the episode has"),
        ([USER, {"role": "user", "content": "0"}, TOOL], 1, "messages[1].role: got 'user', but the episode has 'assis"),
        ([{**USER, "name": "t"}, TOOL, TOOL], 0, "messages[0].name: got 't', but the episode has None there"),
    ],
)
def test_where_messages_leave_a_conversation_is_told(messages: list[dict[str, Any]], number: int, told: str) -> None:
    conversation = answered(Renderer(tokenizer()), Conversation(), [USER], [4, 2])
    found = conversation.difference(messages)
    assert found is not None and found.text.startswith(told) and found.number == number
    assert found.changed == (messages[1:2] == [{"role": "assistant", "content": "1"}])
    assert conversation.difference(messages, since=number) == found  # what both share need not be compared again


# ---- an answer that the request begins -------------------------------------------------------------------------------


def test_a_last_message_of_the_assistant_is_continued() -> None:
    two = "{% if loop.previtem and loop.previtem['role'] == message['role'] %}{{ raise_exception('two') }}{% endif %}"
    ours = tokenizer(TEMPLATE.replace("in messages %}", "in messages %}" + two))
    renderer, messages = Renderer(ours), [USER, {"role": "assistant", "content": "3"}]
    conversation = answered(renderer, Conversation(), messages, [*ours.encode("7")[1:], 2])
    assert ours.decode(conversation.tokens) == "<bos>u:12<eos>;a:37<eos>"
    assert (conversation.text, conversation.prompt_length) == ("7", len(ours.encode("u:12<eos>;a:3")))
    conversation = answered(renderer, conversation, [*messages, TOOL, {"role": "assistant", "content": "5"}], [4, 2])
    assert ours.decode(conversation.tokens) == "<bos>u:12<eos>;a:37<eos>;t:45<eos>;a:50<eos>"


def test_a_requests_template_arguments_override_the_runs() -> None:
    ours = tokenizer(TEMPLATE.replace("a:{% endif %}", "a:{% if brief %}9{% endif %}{% endif %}"))
    renderer, messages = Renderer(ours, options={"brief": True}), [USER]
    assert ours.decode(renderer.ask(Conversation(), messages).tokens) == "<bos>u:12<eos>;a:9"
    asked = renderer.ask(Conversation(), messages, options={"brief": False})
    assert ours.decode(asked.tokens) == "<bos>u:12<eos>;a:"
    conversation = Conversation().answered(asked, Answer(text="0", content="0"), drawn([4, 2]))
    # They may change from turn to turn where that changes only what comes next.
    more = renderer.ask(conversation, [USER, {"role": "assistant", "content": "0"}, TOOL])
    assert ours.decode(more.tokens) == ";t:45<eos>;a:9"
    for option, told in (("breif", "the tokenizer's chat template never reads it"), ("tokenize", "is not the templ")):
        with pytest.raises(Refused, match=f"^chat_template_kwargs.{option}: {told}"):
            renderer.ask(Conversation(), messages, options={option: True})
    with pytest.raises(Refused, match="^chat_template_kwargs.brief: the tokenizer has no chat template; remove it"):
        Renderer(tokenizer(template=None)).ask(Conversation(), messages, options={"brief": True})


def test_template_arguments_that_change_earlier_messages_diverge() -> None:
    ours = tokenizer("{% if brief %}9{% endif %}" + TEMPLATE)
    renderer, messages = Renderer(ours), [USER]
    asked = renderer.ask(Conversation(), messages, options={"brief": True})
    assert ours.decode(asked.tokens) == "9<bos>u:12<eos>;a:"
    conversation = Conversation().answered(asked, Answer(text="0", content="0"), drawn([4, 2]))
    messages += [{"role": "assistant", "content": "0"}, TOOL]
    assert ours.decode(renderer.ask(conversation, messages, options={"brief": True}).tokens) == ";t:45<eos>;a:"
    assert ours.decode(renderer.ask(conversation, messages, options={"brief": 1}).tokens) == ";t:45<eos>;a:"
    for options in ({}, {"brief": False}):
        with pytest.raises(Diverges, match="^chat_template_kwargs: got, .* messages were written with {'brief'"):
            renderer.ask(conversation, messages, options=options)


# ---- tokenizers with habits ------------------------------------------------------------------------------------------


def metaspace(scheme: str) -> PreTrainedTokenizerBase:
    """Puts a space before a text, as sentencepiece does; merges a space with the letter behind it."""
    letters = {char: index for index, char in enumerate("\u2581abcdef.\n")}
    vocabulary = {"<s>": 20, "</s>": 2, **{char: 3 + index for char, index in letters.items()}, "\u2581a": 21, "ab": 22}
    inner = tokenizers.Tokenizer(models.BPE(vocabulary, [("\u2581", "a"), ("a", "b")]))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    inner.decoder = decoders.Metaspace(prepend_scheme=scheme, split=False)
    inner.add_special_tokens(["<s>", "</s>"])
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 20), ("</s>", 2)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("scheme", ["first", "always"])
@pytest.mark.parametrize("follows", ["abc", " abc", "a", "\nab", ".", "  b"])
def test_texts_without_a_template_are_exactly_concatenated(scheme: str, follows: str) -> None:
    ours = metaspace(scheme)
    assert ours.decode(ours.encode("abc", add_special_tokens=False)[1:]) != "abc"  # the space is in the first token
    renderer, messages = Renderer(ours), [{"role": "user", "content": "de"}]
    said = [ours.convert_tokens_to_ids("f")]
    conversation = answered(renderer, Conversation(), messages, said)
    conversation = answered(renderer, conversation, [*messages, {"role": "user", "content": follows}], said)
    assert ours.decode(conversation.tokens, skip_special_tokens=True) == f"def{follows}f"
    assert conversation.tokens.tolist().count(20) == 1 and 2 not in conversation.tokens


def byte_level() -> PreTrainedTokenizerBase:
    """A token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(models.BPE({char: number for number, char in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")


@pytest.mark.parametrize(
    ("ours", "said", "cuts", "text"),
    [
        (byte_level(), "n\u00e9\u20ac!", (2, 4, 5), "n\u00e9\u20ac!"),
        (byte_level(), "a\u00e9.b\u00e9.c", (2, 6), "a\u00e9.b\u00e9"),  # the last piece is cut at its stop text
        (metaspace("first"), "abc def a", (3, 7), "abc def a"),
        (metaspace("first"), "abc def.c", (3,), "abc def"),
    ],
)
def test_an_answer_in_pieces_has_its_whole_text(
    ours: PreTrainedTokenizerBase, said: str, cuts: tuple[int, ...], text: str
) -> None:
    renderer, params, conversation = Renderer(ours), evolve(PARAMS, stop=(".c",)), Conversation()
    tokens = np.array(ours.encode(said, add_special_tokens=False))
    for number, piece in enumerate(np.split(tokens, cuts)):
        asked = RenderedRequest(messages=(), tools=(), tokens=tokens[: not number], by_tokens=True)
        answer = renderer.answer(asked, piece, params, conversation)
        conversation = conversation.answered(asked, answer, drawn(piece.tolist()))
    assert conversation.text == text


def test_pieces_go_on_behind_what_the_template_opened() -> None:
    renderer, ours = thinking()
    messages = [{"role": "user", "content": "1"}]
    begun = renderer.ask(Conversation(), messages)
    said = np.array(ours.encode("12", add_special_tokens=False))
    conversation = Conversation().answered(begun, renderer.answer(begun, said, PARAMS), drawn(said.tolist()))
    more = RenderedRequest(messages=(), tools=(), tokens=said[:0], by_tokens=True)
    answer = renderer.answer(more, said, PARAMS, conversation)
    assert answer.text == f"{conversation.text}12" == f"{conversation.opened}1212" and conversation.opened
