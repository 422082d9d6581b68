"""Agents as they come from PyPI, one for each dialect, are trained with a model that writes calls of tools in XML."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from corerl_agents import Episode
from corerl_agents.script import byte_tokenizer
from plugins.agents.tests.scripted_engine import NAME, run
from tests.end_to_end.command import metrics
from tests.later import Later, wants

agents: Any = Later("agents")  # OpenAI's
openai: Any = Later("openai")
pytestmark = [wants("agents"), pytest.mark.processes]  # OpenAI's client asks the system for its name

# As Qwen 3.5 has it, in short: tools as JSON, calls in XML, results in a user's turn; the answer begins with <think>.
TEMPLATE = r"""{%- if tools %}<|im_start|>system
# Tools

You have access to the following functions:

<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>

If you choose to call a function ONLY reply in the following format with NO suffix:

<tool_call>
<function=example_function_name>
<parameter=example_parameter_1>
value_1
</parameter>
</function>
</tool_call><|end|>
{% endif %}{%- for message in messages %}
{%- if message.role == "tool" %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}<|end|>
{% endif %}{%- endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}"""
PARTS: list[int] = []  # of the texts of an episode
PLAYED: list[tuple[str, list[Any], str]] = []  # question, arguments of the calls, answer


def plus(a: int, b: int) -> int:
    """Add two numbers."""
    assert isinstance(a, int) and isinstance(b, int)
    return a + b


def played(episode: Episode, calls: list[Any], answer: str) -> dict[str, float]:
    PLAYED.append((episode.prompt.text, calls, answer))
    return {"right": float(f"It is {episode.prompt.answer}." in answer), "calls": 0.0 * len(calls)}


async def of_openai(episode: Episode, model: Any, *, stream: bool = False) -> dict[str, float]:
    add = agents.function_tool(plus, name_override="add")
    agent = agents.Agent(name="adder", tools=[add], model=model)
    untraced = agents.RunConfig(tracing_disabled=True)
    if stream:
        result: Any = agents.Runner.run_streamed(agent, episode.prompt.text, run_config=untraced)
        deltas = [each.data for each in [each async for each in result.stream_events()] if each.type.startswith("raw")]
        PARTS.append(sum(each.type == "response.output_text.delta" for each in deltas))
    else:
        result = await agents.Runner.run(agent, episode.prompt.text, run_config=untraced)
    calls = [json.loads(each.raw_item.arguments) for each in result.new_items if each.type == "tool_call_item"]
    return played(episode, calls, str(result.final_output))


async def chat(episode: Episode) -> dict[str, float]:
    async with openai.AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key, max_retries=0) as client:
        return await of_openai(episode, agents.OpenAIChatCompletionsModel(episode.model, openai_client=client))


async def responses(episode: Episode, *, stream: bool = False) -> dict[str, float]:
    async with openai.AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key, max_retries=0) as client:
        model = agents.OpenAIProvider(openai_client=client).get_model(episode.model)
        return await of_openai(episode, model, stream=stream)


async def streamed(episode: Episode) -> dict[str, float]:
    return await responses(episode, stream=True)


async def messages(episode: Episode) -> dict[str, float]:
    """With Pydantic AI, which has no model of a server's own, but takes a client of Anthropic's."""
    from anthropic import AsyncAnthropic
    from pydantic_ai import Agent, Tool
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.providers.anthropic import AnthropicProvider

    async with AsyncAnthropic(base_url=episode.anthropic_url, api_key=episode.api_key, max_retries=0) as client:
        model = AnthropicModel(episode.model, provider=AnthropicProvider(anthropic_client=client))
        result = await Agent(model, tools=[Tool(plus, name="add")]).run(episode.prompt.text)
    calls = [each.args_as_dict() for said in result.all_messages() for each in getattr(said, "tool_calls", ())]
    return played(episode, calls, result.output)


@pytest.mark.parametrize(
    ("agent", "reasoning"), [("chat", "content"), ("streamed", "content"), ("messages", "separate")]
)
def test_an_agent_with_xml_tools_trains_on_its_samples(agent: str, reasoning: str, tmp_path: Path) -> None:
    if agent == "messages":
        pytest.importorskip("pydantic_ai.models.anthropic", reason="wants pydantic-ai-slim[anthropic]")
    PLAYED.clear()
    PARTS.clear()
    ours = byte_tokenizer()
    ours.chat_template = TEMPLATE
    lengths = ["model.config.max_position_embeddings=2048", "rollout.max_tokens=512", "run.steps=1"]
    how = [f"samplers.episodes.reasoning={reasoning}", "samplers.episodes.stream_tokens=8", f"rollout.engine={NAME}"]
    summary = run(tmp_path, ours, f"{__name__}:{agent}", *lengths, *how, samples=2)
    assert summary.steps_done == 1 and len(PLAYED) == 4
    assert len(PARTS) == (4 if agent == "streamed" else 0) and all(parts > 4 for parts in PARTS)
    for question, calls, answer in PLAYED:
        (call,) = calls
        assert call["a"] == int(question[0]) and type(call["a"]) is type(call["b"]) is int  # as the schema has it
        text = f"It is {call['a'] + call['b']}."
        assert answer == (text if reasoning == "separate" else f"I read it.\n</think>\n\n{text}")
    (line,) = (each for each in metrics(tmp_path / "run") if "train/loss" in each)
    # Each episode is one row of two turns, and the trainer reads in it what the engine said.
    assert (line["rollout/turns"], line["rollout/rows"], line["rollout/truncated"]) == (2.0, 1.0, 0.0)
    assert line["rollout/logprob_diff"] < 1e-4 and line["reward/right"] == line["rollout/reward"]
    assert line["train/grad_norm"] > 0
