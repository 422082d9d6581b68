from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from corerl.config import ModelConfig, RolloutConfig
from corerl.data import Prompt
from corerl.engines import GenerateRequest, Generation, SamplingParams
from corerl.models import load_tokenizer
from corerl_agents.config import EpisodesConfig
from corerl_agents.episodes import Episode
from corerl_agents.script import _generated, byte_tokenizer, scripted
from plugins.agents.tests.oracle import Play

PROMPT = Prompt(index=0, text="2+3=", answer="5")


def test_a_script_answers_and_records_requests_in_turn() -> None:
    with scripted(PROMPT, ["one", "two"]) as script:
        messages = script.episode.messages
        messages.append(script.episode.chat(messages)["message"])
        messages.append({"role": "user", "content": "and?"})
        assert script.episode.chat(messages)["message"]["content"] == "two"
        with pytest.raises(RuntimeError, match="the script has only 2 answers, but one more was requested"):
            script.episode.chat([*messages, {"role": "assistant", "content": "two"}, {"role": "user", "content": "?"}])
    assert script.asked[:2] == [["2+3="], ["2+3=", "one", "and?"]]


WHOLE = "I look.\nObservation: x"


@pytest.mark.parametrize(
    ("stop", "said"), [("Observation:", "I look.\n"), (["!", "look"], "I "), ("?", WHOLE), ([], WHOLE)]
)
def test_a_scripted_answer_ends_before_a_stop_text(stop: object, said: str) -> None:
    with scripted(PROMPT, [WHOLE]) as script:
        choice = script.episode.chat(script.episode.messages, stop=stop)
    assert (choice["message"]["content"], choice["finish_reason"]) == (said, "stop")


# ---- as in a run -----------------------------------------------------------------------------------------------------

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'


def post(episode: Episode, messages: list[Any], **parameters: Any) -> Any:
    """The whole answer as clients get it."""
    return episode._server.ask(episode.base_url, {"messages": messages, **parameters}).result()


def talk(episode: Episode) -> list[Any]:
    """All answers to requests of every kind, of which some are refused."""
    messages, heard = episode.messages, []

    def ask(**parameters: Any) -> Any:
        said = post(episode, messages, tools=TOOLS, **parameters)
        heard.append(said.get("error") or {"choices": said["choices"], "usage": said["usage"]})
        return said

    ask(temperature=0.5)
    ask(n=2)
    messages.append(ask(logprobs=True, temperature=1.0)["choices"][0]["message"])
    ask()
    messages.append({"role": "tool", "tool_call_id": "call00100", "content": "5"})
    said = ask(logprobs=True, max_tokens=4)["choices"][0]["message"]
    ask(logprobs=True, max_tokens=4)
    messages += [{**said, "content": "other"}, {"role": "user", "content": "?"}]
    ask()
    messages[-2:] = [said, {"role": "user", "content": "?"}]
    ask(stop=["t is"])
    messages += [{"role": "assistant", "content": "I"}, {"role": "user", "content": "?"}]
    for _ in range(3):
        said = ask()
        if "choices" in said:
            messages += [said["choices"][0]["message"], {"role": "user", "content": "?"}]
    return heard


def test_a_scripted_function_gets_what_a_run_gives(play: Play) -> None:
    answers = [CALL, "It is five", "It is 5", "x" * 99]
    rollout, options = RolloutConfig(max_tokens=150), EpisodesConfig(max_rows=1)
    with scripted(PROMPT, answers, rollout=rollout, options=options) as script:
        heard = talk(script.episode)

    tokenizer, left = byte_tokenizer(), iter(answers)
    in_run: list[Any] = []

    async def generate(request: GenerateRequest, **_: Any) -> Generation:
        return _generated(next(left), request, tokenizer)

    def mine(episode: Episode) -> None:
        in_run.extend(talk(episode))

    params = SamplingParams(max_tokens=150, stop_tokens=(256,))
    how = {"tokenizer": tokenizer, "generate": generate, "prompts": [PROMPT], "samples": 1, "params": params}
    batch = play(mine, max_rows=1, **how).batch
    assert heard == in_run
    outcomes = [said["code"] if "code" in said else said["choices"][0]["finish_reason"] for said in heard]
    assert outcomes == [
        *("unsupported_parameter", "unsupported_parameter", "tool_calls", "invalid_request", "length"),
        *("too_many_rows", "too_many_rows", "stop", "length", "length", "context_length_exceeded"),
    ]
    # The usage, by hand: the whole conversation so far, and what is new, with its end.
    prompt = tokenizer.apply_chat_template([*script.episode.messages], tools=TOOLS, add_generation_prompt=True)
    usage = {"prompt_tokens": len(prompt["input_ids"]), "completion_tokens": len(CALL) + 1}
    assert heard[2]["usage"] == {**usage, "total_tokens": sum(usage.values())}
    told = heard[2]["choices"][0]["logprobs"]["content"]
    assert [(each["token"], each["logprob"]) for each in told[-2:]] == [(">", 0.0), ("<|end|>", 0.0)]
    assert int(batch.columns["loss_mask"].sum()) == sum(heard[at]["usage"]["completion_tokens"] for at in (2, 4, 7, 8))


@pytest.mark.parametrize(("special_tokens", "text"), [(False, "2+3=5"), (True, "<think>2+3=<think>5")])
def test_the_reward_gets_special_tokens_where_it_wants_them(tmp_path: Path, special_tokens: bool, text: str) -> None:
    tokenizer = load_tokenizer(tokenizer="characters:0123456789+=", path="")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>"]})
    tokenizer.save_pretrained(tmp_path)
    model = ModelConfig(path=str(tmp_path))
    with scripted(PROMPT, ["<think>2+3=<think>5"], model=model, special_tokens=special_tokens) as script:
        assert script.text == ""
        said = script.episode.chat(script.episode.messages)["message"]["content"]
        assert (said, script.text) == ("2+3=5", text)
