"""Tokens are compared with `apply_chat_template` and the tokenizer called by hand."""

import asyncio
from typing import Any

import numpy as np
import pytest
import tokenizers
from attrs import evolve
from tokenizers import models, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from corerl.data.chat import ChatPrompts
from corerl.data.prompts import Prompt, PromptSource, SortDigits, split
from corerl.engines.base import GenerateRequest, Generation, SamplingParams
from corerl.errors import ConfigError, DataError, ModelError
from corerl.models.tokenizer import load_tokenizer
from corerl.rollout.encoding import encode, require_encodable, unusable
from corerl_agents.conversation import Conversation, Refused, Renderer
from tests.rollout.samplers import prompt_sampler

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


def test_chats_are_encoded_as_the_template_says_and_texts_with_the_tokenizers_own_tokens() -> None:
    ours = tokenizer()
    by_hand = ours.apply_chat_template([dict(each) for each in CHAT.messages], add_generation_prompt=True)["input_ids"]
    assert encode(ours, [CHAT, TEXT, CHAT]) == [by_hand, ours("12>")["input_ids"], by_hand]
    assert ours.decode(by_hand) == "<bos>u:12;a:3;u:45;a:"
    assert by_hand.count(ours.bos_token_id) == 1


def test_the_sampler_asks_the_engine_with_these_tokens() -> None:
    asked: list[GenerateRequest] = []

    async def generate(request: GenerateRequest, **_: Any) -> Generation:
        asked.append(request)
        return Generation(
            tokens=np.array([5, 2]),
            offsets=np.array([0, 1, 2]),
            logprobs=np.zeros(2, dtype=np.float32),
            versions=np.ones(2, dtype=np.int64),
            truncated=np.zeros(2, dtype=bool),
        )

    sampler = prompt_sampler(tokenizer=tokenizer(), generate=generate, seed=0)
    rollout = asyncio.run(sampler.sample([CHAT, TEXT], rollout_step=0, samples=1, params=SamplingParams()))
    first, second = encode(tokenizer(), [CHAT, TEXT])
    assert asked[0].tokens.tolist() == [*first, *second]
    assert rollout.batch.rows["prompt_length"].tolist() == [len(first), len(second)]


def test_a_chat_that_the_template_refuses_is_named_with_the_templates_reason() -> None:
    with pytest.raises(
        DataError, match=r"prompt 3: .*template rejects its messages \(TemplateError: no system messages\).*: system$"
    ):
        encode(tokenizer(), [SYSTEM])
    with pytest.raises(DataError, match=r"prompt 2: .*template rejects its messages \(TypeError: .*str.*\); .*user"):
        encode(tokenizer("{{ messages[0].content + 1 }}"), [CHAT])


def test_a_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(DataError, match="prompt 2 .* has no tokens"):
        encode(tokenizer("{{ '' }}"), [CHAT])


def test_chats_want_a_template_before_anything_is_started() -> None:
    texts = SortDigits(held_out=1, seed=0)
    without = load_tokenizer(tokenizer="characters:0123456789>", path="")
    require_encodable(texts, without)
    require_encodable(ChatPrompts(texts, system=""), tokenizer())
    require_encodable(ChatPrompts(texts, system="Be brief."), tokenizer())  # `refused` looks at all chats
    with pytest.raises(ModelError, match="the tokenizer has no chat template; use the tokenizer of a chat model"):
        require_encodable(ChatPrompts(texts, system=""), without)


def test_characters_that_the_tokenizer_lacks_are_told_before_anything_is_started() -> None:
    texts = SortDigits(held_out=1, seed=0)
    require_encodable(texts, load_tokenizer(tokenizer="characters:0123456789>", path=""))
    with pytest.raises(
        DataError, match=r"prompt \d+ \('\d+>'\) contains characters .*does not know: .*<unk>.*'characters:"
    ):
        require_encodable(texts, load_tokenizer(tokenizer="characters:0123456789", path=""))


# ---- what a tokenizer adds by itself ---------------------------------------------------------------------------------


def adding(template: str, *, bos: str | None = "<s>") -> PreTrainedTokenizerBase:
    """One token per character, after <s> 0, </s> 1, [sep] 2; `template` says what is put around a text."""
    specials = ("<s>", "</s>", "[sep]")
    inner = tokenizers.Tokenizer(models.BPE({char: n for n, char in enumerate((*specials, *"0123456789>"))}, []))
    inner.add_special_tokens(list(specials))
    inner.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[(token, specials.index(token)) for token in specials]
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token=bos, eos_token="</s>")


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
        ("</s> <s> $A", "<s>12", [1, 0, 4, 5]),  # it begins with a part of what begins a text
        ("</s> <s> $A", "</s>12", [1, 0, 4, 5]),
        ("<s> [sep] $A", "<s>12", [0, 2, 4, 5]),
        ("<s> [sep] $A", "[sep]12", [0, 2, 4, 5]),
        ("<s> [sep] $A", "[sep]<s>12", [2, 0, 4, 5]),  # in an order of its own
        ("<s> $A", "<s><s>12", [0, 0, 4, 5]),  # the text's own
        ("$A", "<s>12", [0, 4, 5]),
        ("<s> $A", "1<s>2", [0, 4, 0, 5]),  # the text's own
    ],
)
def test_a_text_gets_what_begins_one_once_and_nothing_that_ends_one(template: str, text: str, ids: list[int]) -> None:
    ours = adding(template)
    assert encode(ours, [evolve(TEXT, text=text), evolve(TEXT, text="3")])[0] == ids
    renderer = Renderer(ours)
    assert renderer.ask(Conversation(), [{"role": "user", "content": text}]).tokens.tolist() == ids


def test_a_tokenizer_that_knows_few_characters_begins_a_text_all_the_same() -> None:
    inner = tokenizers.Tokenizer(models.BPE({"<s>": 0, "x": 1, "y": 2}, []))
    inner.add_special_tokens(["<s>"])
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    assert encode(PreTrainedTokenizerFast(tokenizer_object=inner), [evolve(TEXT, text="xy")]) == [[0, 1, 2]]


# ---- messages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", ["the sum is ", "4", "", " 4 "])
def test_a_last_message_of_the_assistant_is_continued_as_transformers_continues_one(content: str) -> None:
    ours = load_tokenizer(tokenizer="characters:0123456789>ua:;thesmi ", path="")
    ours.chat_template = TEMPLATE
    messages = ({"role": "user", "content": "2"}, {"role": "assistant", "content": content})
    by_hand = ours.apply_chat_template([dict(each) for each in messages], tokenize=False, continue_final_message=True)
    assert by_hand == f"<bos>u:2;a:{content}"
    assert ours.decode(encode(ours, [evolve(CHAT, messages=messages)])[0]) == by_hand


def test_tools_and_arguments_of_the_template_are_given_to_it() -> None:
    ours = tokenizer("{% if brief %}0{% endif %}{% for tool in tools or [] %}{{ tool.name }}{% endfor %}" + TEMPLATE)
    asked = evolve(CHAT, tools=({"name": "1"}, {"name": "2"}))
    by_hand = ours.apply_chat_template(
        [dict(each) for each in CHAT.messages], tools=[{"name": "1"}, {"name": "2"}], brief=True, tokenize=False,
        add_generation_prompt=True,
    )  # fmt: skip
    assert ours.decode(encode(ours, [asked], {"brief": True})[0]) == by_hand == "012<bos>u:12;a:3;u:45;a:"


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
    texts = SortDigits(held_out=1, seed=0)
    with pytest.raises(ConfigError, match=told):
        require_encodable(ChatPrompts(texts, system="") if chat else texts, tokenizer(), options)


BRIEF = "{% if brief %}0{% endif %}" + TEMPLATE


def test_a_rows_own_template_arguments_go_before_those_of_the_config() -> None:
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


def test_a_rows_template_arguments_that_nothing_reads_are_refused() -> None:
    for name, why in [("breif", "never reads it"), ("tokenize", "CoreRL sets it"), ("tools", "CoreRL sets it")]:
        (found,) = unusable(One(evolve(CHAT, template_options={name: True})), tokenizer(BRIEF))
        assert found.refused[2].startswith(f"chat_template_kwargs.{name}: ") and why in found.refused[2]
    (found,) = unusable(One(evolve(CHAT, template_options={"brief": True})), tokenizer(BRIEF))
    assert not found.refused


def test_unknown_characters_and_prompts_without_tokens_are_refused_where_all_are_looked_at() -> None:
    ours = tokenizer()
    (found,) = unusable(One(evolve(TEXT, text="1?2>")), ours, characters=True)
    assert found.refused == {1: "it has characters that the tokenizer does not know"}
    (found,) = unusable(One(evolve(CHAT, messages=({"role": "user", "content": "?"},))), ours, characters=True)
    assert found.refused == {2: "it has characters that the tokenizer does not know"}
    require_encodable(One(evolve(TEXT, text="1?2>")), ours, characters=False)
    with pytest.raises(DataError, match="contains characters that the tokenizer does not know"):
        require_encodable(One(evolve(TEXT, text="1?2>")), ours)

    silent = PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(models.BPE({"a": 0}, [])))
    (found,) = unusable(One(evolve(TEXT, text=" ")), silent, longest=5)
    assert found.refused == {1: "prompt 1 (' ') has no tokens, so the model has nothing to continue"}


# ---- lengths ---------------------------------------------------------------------------------------------------------


class Lengths(PromptSource):
    """Prompt i has i + 1 digits, as a text, as a chat, or as a chat with a key more."""

    def __init__(self, count: int) -> None:
        self.train, self.held_out = np.arange(1, count), np.array([0])

    def prompt(self, index: int) -> Prompt:
        text = "7" * (index + 1)
        message = {"role": "user", "content": text, **({"name": "u"} if index % 3 == 2 else {})}
        return Prompt(index=index, text=text, answer="", messages=(message,) if index % 3 else ())


def longer_than(limit: int, source: PromptSource, tokenizer: PreTrainedTokenizerBase) -> dict[int, int]:
    parts = list(unusable(source, tokenizer, longest=limit))
    assert sum(part.looked_at for part in parts) == len(source)
    return {index: length for part in parts for index, length in part.too_long.items()}


@pytest.mark.parametrize("limit", [0, 7, 20, 59, 2000])
def test_the_prompts_that_are_too_long_are_those_that_encode_to_more_tokens(limit: int) -> None:
    source, ours = Lengths(60), tokenizer()
    lengths = {index: len(encode(ours, [source.prompt(index)])[0]) for index in range(60)}
    assert longer_than(limit, source, ours) == {index: n for index, n in lengths.items() if n > limit}


@pytest.mark.parametrize(("longest", "looked_at"), [(39, 60), (40, 0)])
def test_texts_that_fit_whatever_the_tokenizer_makes_of_them_are_not_looked_at(longest: int, looked_at: int) -> None:
    source = Lengths(60)
    source.characters = 6  # at most 4 * 6 + 16 tokens
    assert sum(part.looked_at for part in unusable(source, tokenizer(), longest=longest)) == looked_at


class One(PromptSource):
    """A single prompt."""

    chat = True

    def __init__(self, prompt: Prompt) -> None:
        self._prompt = prompt
        self.divide([split(np.zeros(1, np.uint64), np.zeros(1, np.int64), held_out=0, name="one")])

    def prompt(self, index: int) -> Prompt:
        return self._prompt


FUNCTION = {"name": "f", "parameters": {"properties": {f"p{n}": {"type": "string"} for n in range(50)}}}
TOOLS = "{% for tool in tools %}{{ tool | tojson(indent=4) }}{% endfor %}"
CALLS = "{% for message in messages %}{{ message.tool_calls | default([]) | tojson(indent=8) }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        (TOOLS + TEMPLATE, evolve(CHAT, tools=({"type": "function", "function": FUNCTION},))),
        (  # which repeats the tools in each message
            "{% for message in messages %}" + TOOLS + "{{ message.content }}{% endfor %}",
            evolve(CHAT, messages=CHAT.messages * 20, tools=({"type": "function", "function": FUNCTION},)),
        ),
        (
            TEMPLATE + CALLS,
            evolve(CHAT, messages=({"role": "user", "content": "", "tool_calls": [{"function": FUNCTION}] * 9},)),
        ),
        ("{{ messages[0].content * 500 }}", CHAT),
        (TEMPLATE, evolve(TEXT, text="1" * 500)),
    ],
)
def test_whatever_a_template_writes_is_counted_and_encoded_only_where_it_might_be_too_long(
    template: str, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, source = tokenizer(template), One(prompt)
    length = len(encode(ours, [prompt])[0])
    assert length >= 500
    assert longer_than(length - 1, source, ours) == {prompt.index: length}
    assert longer_than(length, source, ours) == {}
    encoded: list[str] = []
    monkeypatch.setattr("corerl.rollout.encoding.plain", lambda ours, texts: encoded.extend(texts) or [])
    assert longer_than(20 * length, source, ours) == {}
    assert encoded == []


def test_a_text_that_the_tokenizer_makes_longer_is_counted_as_it_makes_it() -> None:
    inner = tokenizers.Tokenizer(models.BPE({"<unk>": 0}, [], unk_token="<unk>", byte_fallback=False))
    inner.normalizer = tokenizers.normalizers.NFKC()
    ours = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")
    prompt = evolve(TEXT, text="\ufdfa" * 100)  # a whole phrase in one character, of 18 letters
    assert longer_than(1799, One(prompt), ours) == {prompt.index: 1800}
    assert longer_than(1800, One(prompt), ours) == {}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("template", "told"),
    [
        (
            "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
            r"rejects its messages \(RecursionError: .*: user, assistant",
        ),
        ("{{ 'a' * 10**10 }}", "takes more than 512 MiB of memory for its messages"),
    ],
)
def test_a_template_that_takes_too_much_or_fails_in_any_way_is_told(template: str, told: str) -> None:
    with pytest.raises(DataError, match=f"^prompt 2: the tokenizer's chat template {told}"):
        encode(tokenizer(template), [CHAT])
    with pytest.raises(Refused, match=f"^messages: the tokenizer's chat template {told}"):  # of an episode
        Renderer(tokenizer(template)).ask(Conversation(), CHAT.messages)
