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
from corerl_agents.answers import AnswerReader
from corerl_agents.conversation import Answer, Conversation, RenderedRequest
from corerl_agents.refused import Diverges, Refused
from corerl_agents.renderer import Renderer, read_messages
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


def printable(template: str, *special: str) -> PreTrainedTokenizerBase:
    made = load_tokenizer(tokenizer=f"characters:{string.printable.strip()} \n", path="")
    made.chat_template = template
    if special:
        made.add_special_tokens({"additional_special_tokens": list(special)})
    return made


def drawn(tokens: Sequence[int], *, version: int = 1) -> Generation:
    return Generation(
        tokens=np.array(tokens, dtype=np.int64),
        offsets=np.array([0, len(tokens)]),
        logprobs=-np.array(tokens, dtype=np.float32),
        versions=np.full(len(tokens), version),
        engines=np.full(len(tokens), version - 3, np.int16),
        truncated=np.zeros(1, dtype=np.bool_),
    )


class Talk:
    """A conversation with a policy that says what a test has it say."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        form: str | None = None,
        tools: Sequence[dict[str, Any]] = (),
        options: dict[str, Any] | None = None,
        **answers: bool,
    ) -> None:
        self.tokenizer, self.tools = tokenizer, tools
        self.renderer = Renderer(tokenizer, options)
        self.reader = AnswerReader(tokenizer, FORMATS[form] if form else None, **answers)
        self.conversation = Conversation()

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def ask(self, *messages: dict[str, Any], **how: Any) -> RenderedRequest:
        """What these messages add."""
        whole = read_messages([*self.conversation.messages, *messages])
        return self.renderer.ask(self.conversation, whole, **{"tools": self.tools, **how})

    def read(self, asked: RenderedRequest, said: str) -> Answer:
        return self.reader.read(asked, np.array(self.ids(said)), PARAMS)

    def say(self, said: str, *messages: dict[str, Any], version: int = 1, **how: Any) -> Answer:
        """Go on with the answer to these messages."""
        answer = self.read(asked := self.ask(*messages, **how), said)
        self.conversation = self.conversation.answered(asked, answer, drawn(self.ids(said), version=version))
        return answer

    def text(self, asked: RenderedRequest | None = None) -> str:
        """All that was said, and what is asked now."""
        return str(self.tokenizer.decode([*self.conversation.tokens, *(asked.tokens if asked else ())]))


def test_a_row_has_the_templates_words_between_turns() -> None:
    talk = Talk(tokenizer())
    talk.say("3<eos>", USER, version=4)
    talk.say("7<eos>", TOOL, version=5)
    parts = ("<bos>u:12<eos>;a:", "3<eos>", ";t:45<eos>;a:", "7<eos>")
    assert talk.text() == "".join(parts)
    lengths = [len(talk.ids(part)) for part in parts]
    sampled = np.repeat([False, True, False, True], lengths)
    row = talk.conversation.row()
    np.testing.assert_array_equal(row.tokens, talk.conversation.tokens)
    np.testing.assert_array_equal(row.loss_mask, sampled)
    np.testing.assert_array_equal(row.versions, np.repeat([0, 4, 0, 5], lengths))
    np.testing.assert_array_equal(row.engines, np.repeat([0, 1, 0, 2], lengths))
    np.testing.assert_array_equal(row.logprobs, np.where(sampled, -row.tokens, 0))
    assert (row.turns, row.text, row.prompt_length) == (2, "7", lengths[0])
    assert talk.conversation.begun == sum(lengths[1:])
    # A row beside another one that has the first answer too.
    second_alone = talk.conversation.row(shared=1)
    np.testing.assert_array_equal(second_alone.tokens, row.tokens)
    np.testing.assert_array_equal(second_alone.loss_mask, np.repeat([False, False, False, True], lengths))
    np.testing.assert_array_equal(second_alone.versions, np.repeat([0, 0, 0, 5], lengths))
    np.testing.assert_array_equal(second_alone.logprobs, np.where(second_alone.loss_mask, -row.tokens, 0))
    assert second_alone.turns == 1


def test_what_was_sampled_is_never_tokenized_from_its_text() -> None:
    inner = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2, "?": 3}, [("a", "b")]))
    inner.pre_tokenizer = pre_tokenizers.Split("?", "isolated")
    inner.decoder = decoders.Fuse()
    talk = Talk(PreTrainedTokenizerFast(tokenizer_object=inner))
    assert talk.ids("ab") == [2]
    asked, said = talk.ask({"role": "user", "content": "?"}), [0, 1]  # a spelling of "ab" that it would not choose
    answer = talk.reader.read(asked, np.array(said), PARAMS)
    assert answer.content == "ab"
    talk.conversation = talk.conversation.answered(asked, answer, drawn(said))
    assert talk.ask({"role": "tool", "content": "ab?"}).tokens.tolist() == [2, 3]
    assert talk.conversation.tokens.tolist() == [3, 0, 1]


def test_a_cut_answer_ends_as_the_template_does() -> None:
    talk = Talk(tokenizer())
    talk.say("33", USER)
    assert talk.text(talk.ask(TOOL)).endswith("a:33<eos>;t:45<eos>;a:")


def test_without_a_template_texts_stand_one_behind_the_other() -> None:
    talk = Talk(tokenizer(template=None))
    talk.say("3<eos>", USER)
    talk.say("9", TOOL, USER)
    assert talk.text() == "<bos>123<eos>45129"
    with pytest.raises(Refused, match="^tools: the tokenizer has no chat template"):
        Talk(talk.tokenizer).ask(USER, tools=[{"name": "u"}])


def test_tools_are_shown_once_and_stay_the_same() -> None:
    talk = Talk(tokenizer(), tools=[{"name": "stu"}])
    talk.say("3<eos>", USER)
    assert talk.text(talk.ask(TOOL)) == "<bos>stuu:12<eos>;a:3<eos>;t:45<eos>;a:"
    with pytest.raises(Diverges, match="^tools: differ from those of the request that began the conversation"):
        talk.ask(TOOL, tools=())


def test_tools_that_no_template_shows_are_refused_or_noted(capsys: pytest.CaptureFixture[str]) -> None:
    ours, tools = tokenizer(TEMPLATE.replace("tool['name']", "''")), [{"name": "stu"}]
    with pytest.raises(Refused, match="^tools: the tokenizer's chat template does not show them to the model; use a "):
        Talk(ours, tools=tools).ask(USER)
    for _ in range(2):  # one for each batch
        renderer = Renderer(ours, unshown_tools=True)
        asked = [renderer.ask(Conversation(), [USER], tools) for _ in range(2)]
        assert {ours.decode(each.tokens) for each in asked} == {"<bos>u:12<eos>;a:"}
    told = "corerl: note: tools of a request: the tokenizer's chat template does not show them to the model, "
    assert capsys.readouterr().err.count(told) == 1


def test_messages_come_back_as_clients_write_them() -> None:
    talk = Talk(tokenizer())
    answer = talk.say("0<eos>", USER).message
    back = {**answer, "refusal": None, "tool_calls": [{"id": "1"}]}
    parts = {"role": "user", "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}], "name": None}
    plain = talk.ask(TOOL).tokens
    empty = [{**message, "tool_calls": []} for message in (USER, answer, TOOL)]
    for written in ([parts, back, TOOL], empty):
        read = read_messages(written)
        assert talk.conversation.difference(read) is None
        np.testing.assert_array_equal(talk.renderer.ask(talk.conversation, read).tokens, plain)


# ---- calls -----------------------------------------------------------------------------------------------------------

# Refuses two calls at once, as Llama 3.1's does, and writes calls out of `tool_calls` in words of its own.
CALLING = TEMPLATE.replace(
    "{{ message['content'] }}",
    "{% if message['tool_calls'] | length > 1 %}{{ raise_exception('one at a time') }}{% endif %}"
    "{% for call in message['tool_calls'] or [] %}{{ call['function']['name'] }}{% endfor %}{{ message['content'] }}",
)
CALLS = '1<tool_call>{"name":"t","arguments":{"a":"5"}}</tool_call><tool_call>{"name":"u","arguments":{}}</tool_call>'


def calling(template: str = CALLING) -> Talk:
    return Talk(printable(template), "hermes", tools=[{"name": "t"}])


def names(answer: Answer) -> list[str]:
    return [call["function"]["name"] for call in answer.calls]


def results(answer: Answer) -> list[dict[str, Any]]:
    return [{"role": "tool", "tool_call_id": call["id"], "content": "9"} for call in answer.calls]


def test_with_tool_choice_none_calls_stay_text() -> None:
    talk = calling()
    none = talk.ask(USER, most_calls=0)
    np.testing.assert_array_equal(none.tokens, talk.ask(USER, tools=()).tokens)
    assert talk.read(none, f"{CALLS}<eos>") == Answer(text=CALLS, content=CALLS)
    # In a later request, what was shown stays as it is.
    talk.say("5<eos>", USER)
    assert talk.text() == "<bos>tu:12<eos>;a:5<eos>"
    np.testing.assert_array_equal(talk.ask(USER, most_calls=0).tokens, talk.ask(USER).tokens)
    assert talk.say(f"{CALLS}<eos>", USER, most_calls=0).calls == ()
    assert talk.read(talk.ask(USER), f"{CALLS}<eos>").calls


def test_without_parallel_calls_only_the_first_is_sent() -> None:
    talk = calling()
    answer = talk.say(f"{CALLS}<eos>", USER, most_calls=1)
    assert (answer.text, answer.content, names(answer)) == (CALLS, "1", ["t"])
    more = talk.ask(*results(answer), most_calls=1)
    assert talk.text(more) == f"<bos>tu:12<eos>;a:{CALLS}<eos>;t:9<eos>;a:"


def test_an_answer_with_calls_stays_as_it_was_sampled() -> None:
    talk = calling()
    answer = talk.say(f"{CALLS}<eos>", USER)
    assert (answer.text, answer.content, names(answer)) == (CALLS, "1", ["t", "u"])
    first, found = talk.conversation, results(answer)
    assert first.text == CALLS

    rewritten = {**answer.calls[0], "function": {"name": "t", "arguments": '{ "a" : "5" }'}}
    back: dict[str, Any] = {**answer.message, "refusal": None, "tool_calls": [rewritten, answer.calls[1]]}
    more = talk.renderer.ask(first, [USER, back, *found], talk.tools)
    assert talk.tokenizer.decode(more.tokens) == ";t:9<eos>;t:9<eos>;a:"
    talk.say("5<eos>", *found)
    assert talk.text() == f"<bos>tu:12<eos>;a:{CALLS}<eos>;t:9<eos>;t:9<eos>;a:5<eos>"
    np.testing.assert_array_equal(talk.conversation.tokens[: len(first.tokens)], first.tokens)
    # An answer of before, in whatever words, is compared with what was told of it.
    whole: list[Any] = [USER, back, *found, {"role": "assistant", "content": "5"}, USER]
    assert talk.conversation.difference(whole) is None
    assert talk.tokenizer.decode(talk.renderer.ask(talk.conversation, whole, talk.tools).tokens) == ";u:12<eos>;a:"

    changed = {**back, "tool_calls": [{**rewritten, "function": {"name": "t", "arguments": "{}"}}]}
    for wrong in (changed, {"role": "assistant", "content": "1"}, {"role": "assistant", "content": CALLS}):
        difference = first.difference([USER, wrong, *found])
        assert difference and difference.text.startswith(("messages[1].tool_calls: got", "messages[1].content: got"))
        assert (difference.number, difference.changed) == (1, True)


RESULT_ALONE = "message['role'] == 'tool' and not (loop.previtem['tool_calls'] or loop.previtem['role'] == 'tool')"
TWO_ANSWERS = "messages | rejectattr('role', 'equalto', 'tool') | rejectattr('tool_calls') | list | length > 2"


@pytest.mark.parametrize("refused", [RESULT_ALONE, TWO_ANSWERS])  # by gpt-oss's and MiniMax M2's; by Mistral's
def test_a_template_that_wants_the_calls_of_results_is_shown_them(refused: str) -> None:
    message = "{{ message['content'] }}{% for call in message['tool_calls'] or [] %}({{ call | tojson }}){% endfor %}"
    refusing = f"{{% if {refused} %}}{{{{ raise_exception('no call') }}}}{{% endif %}}{message}"
    talk = calling(TEMPLATE.replace("{{ message['content'] }}", refusing))
    found = results(talk.say(f"{CALLS}<eos>", USER))
    answer = talk.say(f"{CALLS}<eos>", *found)
    turn = f"{CALLS}<eos>;t:9<eos>;t:9<eos>;a:"
    asked = talk.ask(*results(answer))
    assert talk.text(asked) == f"<bos>tu:12<eos>;a:{turn}{turn}"
    talk.conversation = talk.conversation.answered(asked, answer, drawn(talk.ids(CALLS)))  # such as by a stop text
    with pytest.raises(Diverges, match="ends the last answer otherwise than the policy did"):
        talk.ask(*results(answer))


def test_calls_that_cannot_be_read_stay_text() -> None:
    talk = calling()
    without, with_tools = talk.ask(USER, tools=()), talk.ask(USER)
    assert talk.read(with_tools, f"{CALLS}<eos>").calls
    malformed = CALLS.replace('"name"', '"name')
    for asked, text, end in ((without, CALLS, STOP), (with_tools, CALLS, ""), (with_tools, malformed, STOP)):
        assert talk.read(asked, text + end) == Answer(text=text, content=text)
    assert not Talk(talk.tokenizer).read(with_tools, f"{CALLS}<eos>").calls


# ---- reasoning -------------------------------------------------------------------------------------------------------

THINKING = TEMPLATE.replace("a:{% endif %}", "a:<think>{% endif %}")
TAGS = ("<think>", "</think>")


@pytest.mark.parametrize(
    ("special", "kept", "text", "content"),
    [
        ((), False, "<think>1</think>2", "1</think>2"),
        (TAGS, False, "12", "12"),
        (TAGS, True, "<think>1</think>2", "12"),
    ],
)
def test_rewards_see_what_the_template_opens(special: tuple[str, ...], kept: bool, text: str, content: str) -> None:
    talk = Talk(printable(THINKING, *special), special_tokens=kept)
    for messages in ((USER,), (TOOL,)):  # behind a later request too
        answer = talk.say("1</think>2<eos>", *messages)
        assert (answer.text, answer.content) == (text, content)
    assert talk.text() == "<bos>u:12<eos>;a:<think>1</think>2<eos>;t:45<eos>;a:<think>1</think>2<eos>"
    begun = Talk(talk.tokenizer).ask(USER, {"role": "assistant", "content": "<think>0"})
    assert talk.read(begun, "1</think>2<eos>").text == ("12" if special and not kept else "1</think>2")


@pytest.mark.parametrize("special", [(), TAGS])
@pytest.mark.parametrize("separate", [False, True])
def test_reasoning_sent_back_in_its_own_field_continues(special: tuple[str, ...], separate: bool) -> None:
    talk = Talk(printable(THINKING, *special), separate_reasoning=separate)
    said = talk.say("1\n</think>\n\n2<eos>", USER).message
    whole = "1\n\n\n2" if special else "1\n</think>\n\n2"
    sent = {"content": "2", "reasoning_content": "1"} if separate else {"content": whole}
    assert said == {"role": "assistant", **sent}

    def back(content: str, **reasoning: str) -> tuple[Any, ...]:
        return read_messages([USER, {"role": "assistant", "content": content, **reasoning}, TOOL])

    apart = back("2", reasoning_content="1")
    left_out = [back("2")] if separate else []
    for good in (read_messages([USER, said, TOOL]), apart, back("2", reasoning="1"), *left_out):
        assert talk.conversation.difference(good) is None, good
    for wrong in (back("3", reasoning_content="1"), back("2", reasoning_content="0"), back("2", reasoning="0")):
        difference = talk.conversation.difference(wrong)
        assert difference is not None and difference.changed, wrong
    asked = talk.renderer.ask(talk.conversation, apart)
    assert talk.tokenizer.decode(asked.tokens) == ";t:45<eos>;a:<think>"


def test_the_content_of_gpt_oss_has_no_headers_of_messages() -> None:
    ours = printable(TEMPLATE, "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>")
    said = "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant<|channel|>"
    call = 'commentary to=functions.t <|constrain|>json<|message|>{"a":2}'
    for separate, text, message in (
        (True, f"{said}final<|message|>It is 4.", {"content": "It is 4.", "reasoning_content": "I add."}),
        (True, said + call, {"content": "", "reasoning_content": "I add."}),
        (False, said + call, {"content": "I add."}),
    ):
        answer = Talk(ours, "gpt-oss", [{"name": "t"}], separate_reasoning=separate).say(f"{text}<eos>", USER)
        assert {key: answer.message[key] for key in message} == message
        assert [each["function"] for each in answer.calls] == [{"name": "t", "arguments": '{"a": 2}'}] * (call in text)


# ---- messages that do not go on --------------------------------------------------------------------------------------


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
    talk = Talk(tokenizer())
    talk.say("0<eos>", USER)
    conversation = talk.conversation
    found = conversation.difference(messages)
    assert found is not None and found.text.startswith(told) and found.number == number
    assert found.changed == (messages[1:2] == [{"role": "assistant", "content": "1"}])
    assert conversation.difference(messages, since=number) == found  # what both share need not be compared again


# ---- an answer that the request begins -------------------------------------------------------------------------------


def test_a_last_message_of_the_assistant_is_continued() -> None:
    two = "{% if loop.previtem and loop.previtem['role'] == message['role'] %}{{ raise_exception('two') }}{% endif %}"
    talk = Talk(tokenizer(TEMPLATE.replace("in messages %}", "in messages %}" + two)))
    talk.say("7<eos>", USER, {"role": "assistant", "content": "3"})
    assert talk.text() == "<bos>u:12<eos>;a:37<eos>"
    assert (talk.conversation.text, talk.conversation.prompt_length) == ("7", len(talk.ids("<bos>u:12<eos>;a:3")))
    talk.say("0<eos>", TOOL, {"role": "assistant", "content": "5"})
    assert talk.text() == "<bos>u:12<eos>;a:37<eos>;t:45<eos>;a:50<eos>"


def test_a_requests_template_arguments_override_the_runs() -> None:
    ours = tokenizer(TEMPLATE.replace("a:{% endif %}", "a:{% if brief %}9{% endif %}{% endif %}"))
    talk = Talk(ours, options={"brief": True})
    assert talk.text(talk.ask(USER)) == "<bos>u:12<eos>;a:9"
    talk.say("0<eos>", USER, options={"brief": False})
    # They may change from turn to turn where that changes only what comes next.
    assert talk.text(talk.ask(TOOL)) == "<bos>u:12<eos>;a:0<eos>;t:45<eos>;a:9"
    for option, told in (("breif", "the tokenizer's chat template never reads it"), ("tokenize", "is not the templ")):
        with pytest.raises(Refused, match=f"^chat_template_kwargs.{option}: {told}"):
            talk.ask(TOOL, options={option: True})
    with pytest.raises(Refused, match="^chat_template_kwargs.brief: the tokenizer has no chat template; remove it"):
        Talk(tokenizer(template=None)).ask(USER, options={"brief": True})


def test_template_arguments_that_change_earlier_messages_diverge() -> None:
    talk = Talk(tokenizer("{% if brief %}9{% endif %}" + TEMPLATE))
    talk.say("0<eos>", USER, options={"brief": True})
    for same in (True, 1):
        asked = talk.ask(TOOL, options={"brief": same})
        assert talk.text(asked) == "9<bos>u:12<eos>;a:0<eos>;t:45<eos>;a:"
    for options in ({}, {"brief": False}):
        with pytest.raises(Diverges, match="^chat_template_kwargs: got, .* messages were written with {'brief'"):
            talk.ask(TOOL, options=options)


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
    talk = Talk(ours)
    for text in ("de", follows):
        asked, said = talk.ask({"role": "user", "content": text}), np.array([ours.convert_tokens_to_ids("f")])
        answer = talk.reader.read(asked, said, PARAMS)
        talk.conversation = talk.conversation.answered(asked, answer, drawn(said.tolist()))
    tokens = talk.conversation.tokens
    assert ours.decode(tokens, skip_special_tokens=True) == f"def{follows}f"
    assert tokens.tolist().count(20) == 1 and 2 not in tokens


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
    reader, params, conversation = AnswerReader(ours), evolve(PARAMS, stop=(".c",)), Conversation()
    tokens = np.array(ours.encode(said, add_special_tokens=False))
    for number, piece in enumerate(np.split(tokens, cuts)):
        asked = RenderedRequest(messages=(), tools=(), tokens=tokens[: not number], by_tokens=True)
        answer = reader.read(asked, piece, params, conversation)
        conversation = conversation.answered(asked, answer, drawn(piece.tolist()))
    assert conversation.text == text


def test_pieces_go_on_behind_what_the_template_opened() -> None:
    talk = Talk(printable(THINKING))
    first = talk.say("12", USER)
    said = np.array(talk.ids("12"))
    more = RenderedRequest(messages=(), tools=(), tokens=said[:0], by_tokens=True)
    answer = talk.reader.read(more, said, PARAMS, talk.conversation)
    assert answer.text == f"{first.text}12" == f"{first.opened}1212" and first.opened
