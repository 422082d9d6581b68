"""Tokens are compared with `apply_chat_template` and the tokenizer called by hand."""

import re

import numpy as np
import pytest
import tokenizers
from attrs import evolve
from tokenizers import models, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from corerl.data import files
from corerl.data.prompts import Prompt, PromptSource, PromptStream, SortDigits, split
from corerl.engines.base import UNLIMITED
from corerl.errors import ConfigError, DataError, ModelError
from corerl.models.tokenizer import load_tokenizer
from corerl.pictures import FoundPicture
from corerl.rollout.encoding import PromptCheck, Rejected, encode, expand, render, require_encodable
from corerl_agents.conversation import Conversation
from corerl_agents.refused import Refused
from corerl_agents.renderer import Renderer
from tests.tiny_pictures import TinyOptions, TinyReader

# Writes its <bos> itself, as most templates do, and refuses a system message, as some do.
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}"
    "{{ raise_exception('no system messages') }}{% endif %}"
    "{{ message['role'][0] }}:{{ message['content'] }};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
TEXT = Prompt(index=1, text="12>", answer="")
CHAT = Prompt(
    index=2,
    text="u",
    answer="",
    messages=(
        {"role": "user", "content": "12"},
        {"role": "assistant", "content": "3"},
        {"role": "user", "content": "45"},
    ),
)
SYSTEM = Prompt(index=3, text="u", answer="", messages=({"role": "system", "content": "1"},))


def tokenizer(template: str = TEMPLATE) -> PreTrainedTokenizerBase:
    made = load_tokenizer(tokenizer="characters:0123456789>ua:;", path="")
    made.chat_template = template
    return made


def test_a_refused_chat_is_named_with_the_templates_reason() -> None:
    with pytest.raises(
        DataError, match=r"prompt 3: .*template rejects its messages \(TemplateError: no system messages\).*: system$"
    ):
        encode(tokenizer(), [SYSTEM])
    with pytest.raises(DataError, match=r"prompt 2: .*template rejects its messages \(TypeError: .*str.*\); .*user"):
        encode(tokenizer("{{ messages[0].content + 1 }}"), [CHAT])
    with pytest.raises(DataError, match="prompt 2 .* has no tokens"):
        encode(tokenizer("{{ '' }}"), [CHAT])


def test_chats_want_a_template_before_anything_is_started() -> None:
    texts = SortDigits(held_out=1, seed=0)
    without = load_tokenizer(tokenizer="characters:0123456789>", path="")
    require_encodable(texts, without)
    chats = SortDigits(held_out=1, seed=0, chat=True, system="Be brief.")
    require_encodable(chats, tokenizer())
    with pytest.raises(ModelError, match="the tokenizer has no chat template; use the tokenizer of a chat model"):
        require_encodable(chats, without)


# ---- what a tokenizer adds by itself ---------------------------------------------------------------------------------


def adding(template: str) -> PreTrainedTokenizerBase:
    """One token per character, after <s> 0, </s> 1, [sep] 2; `template` says what is put around a text."""
    specials = ("<s>", "</s>", "[sep]")
    inner = tokenizers.Tokenizer(models.BPE({char: n for n, char in enumerate((*specials, *"0123456789>"))}, []))
    inner.add_special_tokens(list(specials))
    inner.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[(token, specials.index(token)) for token in specials]
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize(
    ("template", "text", "ids"),
    [
        ("$A", "12", [4, 5]),
        ("$A </s>", "12", [4, 5]),  # what ends a text would leave nothing to continue
        ("<s> $A </s>", "12", [0, 4, 5]),
        ("<s> $A [sep] </s>", "12", [0, 4, 5]),
        ("</s> <s> $A", "12", [1, 0, 4, 5]),  # OPT's texts begin with its end token
        ("<s> $A", "<s>12", [0, 4, 5]),  # a chat template was applied to the text beforehand
        ("<s> $A </s>", "<s>", [0]),
        ("</s> <s> $A", "</s><s>12", [1, 0, 4, 5]),
        ("<s> $A", "<s><s>12", [0, 0, 4, 5]),  # the text's own
        ("$A", "<s>12", [0, 4, 5]),
        ("<s> $A", "1<s>2", [0, 4, 0, 5]),  # the text's own
    ],
)
def test_a_text_begins_once_and_is_not_ended(template: str, text: str, ids: list[int]) -> None:
    ours = adding(template)
    assert encode(ours, [evolve(TEXT, text=text), evolve(TEXT, text="3")])[0] == ids
    renderer = Renderer(ours)
    assert renderer.ask(Conversation(), [{"role": "user", "content": text}]).tokens.tolist() == ids


# ---- messages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "chat", "told"),
    [
        ({"brief": True}, True, "data.chat_template_options.brief: the tokenizer's chat template never reads it"),
        ({"tokenize": True}, True, "data.chat_template_options.tokenize: .*CoreRL sets it"),
        ({"messages": []}, True, "data.chat_template_options.messages: .*CoreRL sets it"),
        ({"bos_token": "x"}, False, "data.chat_template_options: set, but no prompt is a chat"),
    ],
)
def test_an_argument_that_no_template_would_read_is_refused(options: dict[str, object], chat: bool, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        require_encodable(SortDigits(held_out=1, seed=0, chat=chat), tokenizer(), options)


BRIEF = "{% if brief %}0{% endif %}" + TEMPLATE


def test_a_rows_template_arguments_override_the_configs() -> None:
    ours = tokenizer(BRIEF)
    for own, config, first in [
        ({"brief": True}, {}, "0"),
        ({"brief": False}, {"brief": True}, ""),
        ({}, {"brief": True}, "0"),
    ]:
        (ids,) = encode(ours, [evolve(CHAT, template_options=own)], config)
        by_hand = ours.apply_chat_template(
            [dict(each) for each in CHAT.messages], tokenize=False, add_generation_prompt=True, **{**config, **own}
        )
        assert ours.decode(ids) == by_hand == f"{first}<bos>u:12;a:3;u:45;a:"


def skips(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, longest: int = UNLIMITED) -> str:
    return PromptCheck(tokenizer=tokenizer, skip=True, longest=longest, limit="LIMIT")(prompt)


def test_a_rows_template_arguments_that_nothing_reads_are_refused() -> None:
    for name, why in [("breif", "never reads it"), ("tokenize", "CoreRL sets it"), ("tools", "CoreRL sets it")]:
        found = skips(evolve(CHAT, template_options={name: True}), tokenizer(BRIEF))
        assert found.startswith(f"chat_template_kwargs.{name}: ") and why in found
    assert skips(evolve(CHAT, template_options={"brief": True}), tokenizer(BRIEF)) == ""


def test_arguments_of_calls_are_text_where_the_template_joins_them() -> None:
    """As the templates of DeepSeek R1, V3 and V3.1 do; others write an object themselves."""
    function = {"name": "f", "arguments": {"a": 1}}
    called = ({"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},)
    for written, text in (("'1' + call.function.arguments", '1{"a": 1}'), ("call.function.arguments.a", "1")):
        ours = tokenizer(
            "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls %}{{ " + written + " }}"
            "{% endfor %}{% endfor %}"
        )
        assert render(ours, [*called, CHAT.messages[0]]) == f"{text}12"
    with pytest.raises(Rejected, match="no arguments"):  # in neither form
        render(tokenizer("{{ raise_exception('no arguments') }}"), [*called, CHAT.messages[0]])


# ---- which prompts a run can sample from -----------------------------------------------------------------------------

SILENT = PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(models.BPE({"a": 0}, [])))
UNKNOWN = "it has characters that the tokenizer does not know: the model would see "


@pytest.mark.parametrize(
    ("prompt", "ours", "why"),
    [
        (TEXT, tokenizer(), ""),
        (CHAT, tokenizer(), ""),
        (SYSTEM, tokenizer(), "the tokenizer's chat template rejects its messages (TemplateError: no system messages)"),
        (CHAT, tokenizer("{{ '' }}"), "the tokenizer's chat template writes nothing for its messages"),
        (CHAT, tokenizer("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"), "the tokenizer's chat template rejects"),
        (evolve(TEXT, text="1?2>"), tokenizer(), UNKNOWN),
        (evolve(CHAT, messages=({"role": "user", "content": "?"},)), tokenizer(), UNKNOWN),
        (evolve(TEXT, text=" "), SILENT, "it has no tokens, so the model has nothing to continue"),
    ],
)
def test_a_prompt_is_skipped_with_a_reason_or_refused(prompt: Prompt, ours: PreTrainedTokenizerBase, why: str) -> None:
    found = skips(prompt, ours)
    assert found.startswith(why) and bool(found) is bool(why)
    strict = PromptCheck(tokenizer=ours)
    if not why:
        assert strict(prompt) == ""
    else:
        with pytest.raises(DataError, match="; correct the row, or set data.refused='skip' to leave out such rows"):
            strict(prompt)


FUNCTION = {"name": "f", "parameters": {"properties": {f"p{n}": {"type": "string"} for n in range(50)}}}
TOOLS = "{% for tool in tools %}{{ tool | tojson(indent=4) }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        (TEMPLATE, evolve(TEXT, text="1" * 500)),
        ("{{ messages[0].content * 500 }}", CHAT),
        (TOOLS + TEMPLATE, evolve(CHAT, tools=({"type": "function", "function": FUNCTION},))),
    ],
)
def test_a_prompt_is_too_long_by_its_tokens(template: str, prompt: Prompt, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = tokenizer(template)
    ours.unk_token = None
    length = len(encode(ours, [prompt])[0])
    assert length >= 500
    assert skips(prompt, ours, length - 1) == f"it has {length} tokens, but at most {length - 1} fit with LIMIT"
    assert skips(prompt, ours, length) == ""
    monkeypatch.setattr("corerl.rollout.encoding.plain", lambda ours, texts: 1 / 0)
    assert skips(prompt, ours, 20 * length) == ""  # is not encoded, as it is surely short enough


class Numbered(PromptSource):
    """Prompts of digits; those of `bad` have a system message, which the template refuses."""

    chat = True

    def __init__(self, count: int, bad: set[int]) -> None:
        self._bad = bad
        self.divide([split(np.arange(count, dtype=np.uint64), np.arange(count), held_out=0, name="numbered")])

    def prompt(self, index: int) -> Prompt:
        role = "system" if index in self._bad else "user"
        return Prompt(index=index, text="", answer="", messages=({"role": role, "content": str(index)},))


def test_a_prompt_is_checked_when_it_is_drawn() -> None:
    bad, lines = {80, 150, 151}, list[str]()
    source = Numbered(200, bad)
    check = PromptCheck(tokenizer=tokenizer(), skip=True)
    taken = [each.index for each in PromptStream(source, 0, check=check, notify=lines.append).take(394)]
    whole = [each.index for each in PromptStream(Numbered(200, set()), 0).take(400)]
    assert taken == [index for index in whole if index not in bad]
    assert source.left_out == bad
    (line,) = lines  # of the first one, the next would be of the tenth
    assert line.startswith("data: 1 prompts are skipped so far; the last: prompt ") and "no system messages" in line
    with pytest.raises(DataError, match=r"^prompt (80|150|151): .*; correct the row, or set data.refused='skip'"):
        PromptStream(Numbered(200, bad), 0, check=PromptCheck(tokenizer=tokenizer())).take(200)
    with pytest.raises(DataError, match="^all 200 training prompts are skipped"):
        PromptStream(Numbered(200, set(range(200))), 0, check=check).take(1)


def test_a_failing_template_is_named_for_prompts_and_episodes() -> None:
    endless = tokenizer("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}")
    why = r"the tokenizer's chat template rejects its messages \(RecursionError: .*: user, assistant"
    with pytest.raises(DataError, match=f"^prompt 2: {why}"):
        encode(endless, [CHAT])
    with pytest.raises(Refused, match=f"^messages: {why}"):
        Renderer(endless).ask(Conversation(), CHAT.messages)


# ---- pictures --------------------------------------------------------------------------------------------------------

# <pad> <bos> <eos> <unk> 0 = 4, the placeholder * = 5, the break | = 6, the end ! = 7
PICTURED = load_tokenizer(tokenizer="characters:0*|!123456789>ua:;", path="")
PICTURED.chat_template = (
    "{% for m in messages %}{{ m.role[0] }}:{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ '*' if part.type == 'image' else part.text }}{% endfor %}{% endif %};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def pictured(text: str, *references: str) -> tuple[Prompt, TinyReader]:
    """A chat of one message with marks `<image>`."""
    reader = TinyReader(TinyOptions(), None, PICTURED)
    messages, found = reader.find({"images": list(references)}, [{"role": "user", "content": text}], root="")
    pictures = tuple(FoundPicture(reader=reader, reference=each) for each in found)
    return Prompt(index=0, text=text, answer="", messages=messages, pictures=pictures), reader


def test_a_text_that_spells_the_placeholder_is_refused() -> None:
    reader = TinyReader(TinyOptions(), None, PICTURED)
    reader.mark = 9
    with pytest.raises(files.Refused, match="a text that spells the token where a picture's"):
        expand([4, reader.placeholder], [], reader)


@pytest.mark.parametrize(
    ("text", "references", "why"),
    [
        ("<image>", ["1x1:1", "1x1:2"], "2 pictures, but the prompt has the token that stands for one 1 times"),
        ("<image>*", ["1x1:1"], "1 pictures, but .* 2 times"),
        ("*", [], "0 pictures, but .* 1 times"),
        ("<image>", ["1x1:broken"], "the picture 1x1:broken ends early"),
    ],
)
def test_prompts_whose_pictures_cannot_be_shown_are_refused(text: str, references: list[str], why: str) -> None:
    prompt, reader = pictured(text, *references)
    with pytest.raises(DataError, match=why + ".*; correct the row, or set data.refused='skip'"):
        PromptCheck(tokenizer=PICTURED, pictures=reader)(prompt)
    assert re.match(why, PromptCheck(tokenizer=PICTURED, pictures=reader, skip=True)(prompt))
