"""What is sent of an answer while it is sampled: never more than its end leaves as it is, and at last all of it."""
# ruff: noqa: RUF001  DeepSeek's tokens have such characters

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from corerl.engines import GenerateRequest, Generation, SamplingParams
from corerl_agents.answers import AnswerReader
from corerl_agents.conversation import Conversation
from corerl_agents.dialects.base import new
from corerl_agents.episodes import Episode
from corerl_agents.renderer import Renderer
from corerl_agents.script import byte_tokenizer
from corerl_agents.tool_calls import format_of
from plugins.agents.tests.clients import of_openai
from plugins.agents.tests.oracle import PARAMS, PROMPTS, Oracle, Play, assert_equal
from tests.machine import paced

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
LONG = evolve(PARAMS, max_tokens=40)
CALLS = {
    "hermes": 'I add.\n<tool_call>{"name": "add", "arguments": {"a": "ü"}}</tool_call>\nDone <b>.',
    "qwen-xml": "ü\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>",
    "glm": "  I add. <tool_call>add\n<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>",
    "minimax": 'So: <minimax:tool_call>\n<invoke name="add"></invoke>\n</minimax:tool_call>',
    "deepseek-dsml": '<｜DSML｜function_calls><｜DSML｜invoke name="add"></｜DSML｜invoke></｜DSML｜function_calls>',
    "deepseek": "Yes.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
    "kimi": "Yes.<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{}<|tool_call_end|> And no.",
    "gpt-oss": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.add<|message|>{}",
    "mistral": "No. [TOOL_CALLS]add[ARGS]{}",
    "llama-json": '{"name": "add", "parameters": {}}',
}


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("opened", ["", "<think>"])
@pytest.mark.parametrize("name", [*CALLS, "none"])
def test_what_is_known_of_an_answer_begins_it(name: str, opened: str, separate: bool) -> None:
    tokenizer = byte_tokenizer()
    if opened:
        tokenizer.chat_template = f"{tokenizer.chat_template}{{% if add_generation_prompt %}}{opened}{{% endif %}}"
    thought = "  <think>I think: ü.\n</think>\n\nIt is ü. "
    texts = ["I add < 2 [and] {3}.", thought, "<thi", "Hm.</think> <tool", "Hm.</think>So.###"]
    texts += [f"{'' if opened else '<think>'}So I add.###"]
    texts += [CALLS[name], f"I think.</think>\n{CALLS[name]}"] if name in CALLS else []
    texts += [] if opened or separate else CALLS.values()
    answers = AnswerReader(tokenizer, format_of(name, None), separate_reasoning=separate)
    asked = Renderer(tokenizer).ask(Conversation(), [{"role": "user", "content": "2 + 3?"}], TOOLS)
    params = SamplingParams(stop_tokens=(tokenizer.eos_token_id,), stop=("###", "\n\nThe"))
    seen = 0
    for text in texts:
        tokens = np.array([*tokenizer.encode(text), tokenizer.eos_token_id])
        answer = answers.read(asked, tokens, params)
        sent = {"reasoning": "", "content": ""}
        for end in range(1, len(tokens)):
            found = dict(zip(sent, answers.known(asked, tokens[:end], params), strict=True))
            for key, whole in found.items():
                assert whole.startswith(sent[key]), (text, end)
                sent[key] = whole
        for key, whole in (("reasoning", answer.reasoning), ("content", answer.content)):
            part = sent[key]
            assert part.lstrip() + new(whole, part) in (whole, whole.lstrip()), text
            seen += len(part)
    assert seen > 30


@pytest.mark.parametrize("calls", [1, 4])
def test_an_answer_in_parts_has_a_whole_ones_tokens(calls: int, play: Play) -> None:
    def two_turns(stream: bool) -> Callable[[Episode], None]:
        def function(episode: Episode) -> None:
            with of_openai(episode.base_url) as ours:
                messages: list[Any] = episode.messages
                for _ in range(2):
                    how: dict[str, Any] = {"max_tokens": 15, "extra_body": {"return_token_ids": True}}
                    asked = ours.chat.completions.create(model="any", messages=messages, stream=stream, **how)
                    said = "".join(part.choices[0].delta.content or "" for part in asked) if stream else None
                    content = asked.choices[0].message.content if said is None else said
                    messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "7>"}]

        return function

    whole, parts = Oracle(), Oracle()
    first = play(two_turns(False), generate=whole, params=LONG, calls=calls)
    second = play(two_turns(True), generate=parts, params=LONG, calls=calls, stream_tokens=2)
    assert_equal(first, second)
    assert set(first.batch.row_columns["turns"].tolist()) == {2}
    sizes = [request.left.max() for request in parts.requests]
    assert max(sizes) == 2 and sum(map(len, parts.requests)) > 2 * sum(map(len, whole.requests))
    assert_equal(first, play(two_turns(True), generate=whole, params=LONG, calls=calls, stream_tokens=0))


def test_episode_chat_samples_its_answer_whole(play: Play) -> None:
    def asks(episode: Episode) -> float:
        return len(episode.chat(episode.messages, stream=True)["message"]["content"])

    oracle = Oracle()
    rollout = play(asks, generate=oracle, samples=2, params=LONG, stream_tokens=1)
    assert rollout.outcomes == list(map(len, rollout.texts)) and max(map(len, rollout.texts)) > 1
    assert sum(map(len, oracle.requests)) == 4


def test_a_client_reads_the_beginning_before_the_end_is_sampled(play: Play) -> None:
    read = threading.Event()

    def engine(request: GenerateRequest) -> Generation:
        if request.answered[0]:
            assert read.wait(paced(20))
        return Oracle()(request)

    def function(episode: Episode) -> float:
        with of_openai(episode.base_url) as ours:
            texts = []
            for part in ours.chat.completions.create(model="any", messages=episode.messages, stream=True):
                texts.append(part.choices[0].delta.content or "")
                read.set()
        return float(len(texts))

    rollout = play(function, generate=engine, params=LONG, stream_tokens=2, samples=1, prompts=PROMPTS[:1])
    assert rollout.outcomes == [float(-(-rollout.batch.row_columns["response_length"][0] // 2))]


def test_a_client_that_asks_again_gets_the_whole_stream(play: Play) -> None:
    told, gone = list[str](), threading.Event()

    def engine(request: GenerateRequest) -> Generation:
        assert not request.answered[0] or gone.wait(paced(20))
        return Oracle()(request)

    def function(episode: Episode) -> None:
        asked: dict[str, Any] = {"model": "any", "messages": episode.messages, "stream": True}
        with of_openai(episode.base_url) as ours:
            stream = ours.chat.completions.create(**asked)
            next(iter(stream))
            stream.close()
            time.sleep(paced(0.2))  # the server sees that
            gone.set()
            again = ours.chat.completions.create(**asked)
            told.append("".join(part.choices[0].delta.content or "" for part in again))

    rollout = play(function, generate=engine, params=LONG, stream_tokens=1, samples=1, prompts=PROMPTS[:1])
    assert rollout.texts == told and told != [""]
    assert rollout.batch.row_columns["turns"].tolist() == [1]
