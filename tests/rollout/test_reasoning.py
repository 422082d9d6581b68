"""What templates open is compared with templates as they are published, in short."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from corerl.data.prompts import Prompt
from corerl.rollout.encoding import Openings, encode, generation_prompt, render
from corerl_agents.script import byte_tokenizer

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
# Qwen3-Thinking and Qwen 3.5; Qwen 3 with its switch; DeepSeek R1; one that opens nothing.
QWEN = CHATML + "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
SWITCH = (
    CHATML + "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
R1 = (
    "{% for m in messages %}<User>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<Assistant><think>\n{% endif %}"
)
PLAIN = CHATML + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
FORCED = CHATML + "{% if add_generation_prompt %}<|im_start|>assistant\n[THINK]Okay, {% endif %}"


def templated(template: str) -> PreTrainedTokenizerBase:
    made = byte_tokenizer()
    made.chat_template = template
    return made


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize(
    ("template", "options", "text", "opened"),
    [
        (QWEN, {}, "2?", "<think>\n"),
        (R1, {}, "2?", "<think>\n"),
        (FORCED, {}, "2?", "[THINK]Okay, "),
        (QWEN, {}, "Write <think> and </think>.", "<think>\n"),
        (SWITCH, {}, "2?", ""),
        (SWITCH, {"enable_thinking": False}, "2?", ""),
        (SWITCH, {}, "End with <think>", ""),  # the user's tag is not the template's
        (PLAIN, {}, "2? <think>\n", ""),
        (R1.replace("<Assistant><think>\n", ""), {}, "2? <think>\n", ""),
        (CHATML + "<|im_start|>assistant\n<think>", {}, "2?", "<think>"),  # whether it is asked for or not
        (CHATML, {}, "Write <think>", ""),
    ],
)
def test_an_opened_tag_is_found_in_text_and_tokens(
    template: str, options: Mapping[str, Any], text: str, opened: str
) -> None:
    ours, messages = templated(template), user(text)
    openings = Openings(ours)
    (tokens,) = encode(ours, [Prompt(index=0, text="", answer="", messages=tuple(messages))], options)
    for prompt in (render(ours, messages, options=options), tokens):
        assert openings.of(prompt, messages, options=options) == opened
    if opened:  # it is recognized
        ours.chat_template = PLAIN
        assert openings.of(tokens, messages, options=options) == opened


def test_an_answer_begun_by_the_client_opens_nothing() -> None:
    assert generation_prompt(templated(QWEN), [*user("2?"), {"role": "assistant", "content": "<think>"}]) == ""


def test_a_special_tag_is_seen_where_texts_keep_it() -> None:
    ours = templated(QWEN)
    assert Openings(ours).seen("<think>\n", special_tokens=False) == "<think>\n"
    ours.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    openings = Openings(ours)
    (tokens,) = encode(ours, [Prompt(index=0, text="", answer="", messages=tuple(user("2?")))])
    assert openings.of(tokens, user("2?")) == "<think>\n"
    assert openings.seen("<think>\n", special_tokens=True) == "<think>\n"
    assert openings.seen("<think>\n", special_tokens=False) == ""
