"""Tokens are compared with `apply_chat_template` and the tokenizer called by hand."""

from unittest.mock import Mock

import numpy as np
import pytest
from attrs import evolve
from transformers import PreTrainedTokenizerBase

from corerl.data.chat import ChatPrompts
from corerl.data.prompts import Prompt, PromptSource, SortDigits
from corerl.errors import DataError, ModelError
from corerl.models.tokenizer import load_tokenizer
from corerl.rollout.encoding import encode, longer_than, require_encodable
from corerl.rollout.engine import GenerateRequest, Generation, SamplingParams
from corerl.rollout.sampler import Sampler

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

    def generate(request: GenerateRequest) -> Generation:
        asked.append(request)
        return Generation(
            tokens=np.array([5, 2]),
            offsets=np.array([0, 1, 2]),
            logprobs=np.zeros(2, dtype=np.float32),
            versions=np.ones(2, dtype=np.int64),
            truncated=np.zeros(2, dtype=bool),
        )

    sampler = Sampler(tokenizer=tokenizer(), generate=generate, seed=0)
    rollout = sampler.sample([CHAT, TEXT], rollout_step=0, samples=1, params=SamplingParams())
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
    with pytest.raises(ModelError, match="the tokenizer has no chat template; use the tokenizer of a chat model"):
        require_encodable(ChatPrompts(texts, system=""), without)
    with pytest.raises(DataError, match="rejects its messages"):
        require_encodable(ChatPrompts(texts, system="Be brief."), tokenizer())


def test_characters_that_the_tokenizer_lacks_are_told_before_anything_is_started() -> None:
    texts = SortDigits(held_out=1, seed=0)
    require_encodable(texts, load_tokenizer(tokenizer="characters:0123456789>", path=""))
    with pytest.raises(
        DataError, match=r"prompt \d+ \('\d+>'\) contains characters .*does not know: .*<unk>.*'characters:"
    ):
        require_encodable(texts, load_tokenizer(tokenizer="characters:0123456789", path=""))


# ---- lengths ---------------------------------------------------------------------------------------------------------


class Lengths(PromptSource):
    """Prompt i has i + 1 digits, as a text, as a chat, or as a chat with a key more."""

    def __init__(self, count: int) -> None:
        self.train, self.held_out = np.arange(1, count), np.array([0])

    def prompt(self, index: int) -> Prompt:
        text = "7" * (index + 1)
        message = {"role": "user", "content": text, **({"name": "u"} if index % 3 == 2 else {})}
        return Prompt(index=index, text=text, answer="", messages=(message,) if index % 3 else ())


@pytest.mark.parametrize("limit", [0, 7, 20, 59, 2000])
def test_the_prompts_that_are_too_long_are_those_that_encode_to_more_tokens(limit: int) -> None:
    source, ours = Lengths(60), tokenizer()
    lengths = {index: len(encode(ours, [source.prompt(index)])[0]) for index in range(60)}
    assert longer_than(limit, source, ours) == {index: n for index, n in lengths.items() if n > limit}


def test_prompts_that_cannot_be_too_long_are_not_encoded() -> None:
    ours = tokenizer()
    with_long = [TEXT, evolve(TEXT, index=0, text="1" * 500)]
    source = Lengths(2)
    source.prompt = lambda index: with_long[index == 0]  # type: ignore[method-assign]
    asked: list[str] = []
    counting = Mock(side_effect=lambda texts, **options: asked.extend(texts) or ours(texts, **options))
    assert longer_than(400, source, counting) == {0: len(ours("1" * 500)["input_ids"])}
    assert asked == ["1" * 500]
