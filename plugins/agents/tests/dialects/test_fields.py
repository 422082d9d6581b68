"""The tables of fields: what the official clients can send, and the values that they show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from corerl_agents.chat_requests import ChatRequest
from corerl_agents.dialects import DIALECTS, Dialect
from corerl_agents.fields import fields_table
from corerl_agents.refused import Refused

RUN = {"temperature": 0.7, "top_p": 1.0, "top_k": 0}
PAGE = Path(__file__).parents[4] / "docs" / "reference" / "requests.md"
USER = {"role": "user", "content": "hello"}
LEAST: dict[str, dict[str, Any]] = {  # what a request must have
    "Chat Completions": {"messages": [USER]},
    "Messages": {"messages": [USER]},
    "Responses": {"input": [USER]},
    "Messages, counted": {"messages": [USER]},
    "Tokens": {"token_ids": [3, 4]},
}
OFFICIAL = {  # modules of the official clients, and their types
    "Chat Completions": {
        "openai.types.chat.completion_create_params": "CompletionCreateParamsBase CompletionCreateParamsStreaming",
    },
    "Messages, counted": {
        "anthropic.types.message_count_tokens_params": "MessageCountTokensParams",
        "anthropic.types.beta.message_count_tokens_params": "MessageCountTokensParams",
    },
    "Responses": {
        "openai.types.responses.response_create_params": "ResponseCreateParamsBase ResponseCreateParamsStreaming",
    },
    "Messages": {
        "anthropic.types.message_create_params": "MessageCreateParamsBase MessageCreateParamsStreaming",
        "anthropic.types.beta.message_create_params": "MessageCreateParamsBase",
    },
}


def read(dialect: Dialect, **fields: Any) -> ChatRequest:
    return dialect.read(json.dumps({**LEAST[dialect.name], **fields}), RUN)


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda each: each.name)
def test_every_field_does_what_its_table_says(dialect: Dialect) -> None:
    least = read(dialect)
    for name, field in dialect.fields.items():
        assert field.refused, name
        for value in field.refused:
            with pytest.raises(Refused, match=f"^{name}(\\.|\\[|: )"):
                read(dialect, **{name: value})
        answered = [read(dialect, **{name: value}) for value in field.taken]
        if name not in LEAST[dialect.name]:
            assert read(dialect, **{name: None}) == least
        if field.becomes != "honoured":
            assert all(each == least for each in answered), name
        elif name not in LEAST[dialect.name] and name != "tool_choice" and (name != "stream" or dialect.stream):
            assert any(each != least for each in answered), name
    assert fields_table(dialect.fields) in PAGE.read_text()


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda each: each.name)
def test_what_shapes_the_distribution_may_only_be_repeated(dialect: Dialect) -> None:
    for name, own in RUN.items():
        assert read(dialect, **{name: own}) == read(dialect)
        with pytest.raises(Refused, match=rf"^{name}: got 0.25, but this run samples with rollout.{name}={own!r}"):
            read(dialect, **{name: 0.25})
    with pytest.raises(Refused, match="^a_new_field: got 1, wanted no such field; leave it out$"):
        read(dialect, a_new_field=1)


@pytest.mark.parametrize("name", OFFICIAL)
def test_every_field_of_the_official_client_is_known(name: str) -> None:
    (dialect,) = (each for each in DIALECTS if each.name == name)
    modules = {pytest.importorskip(module): types for module, types in OFFICIAL[name].items()}
    known = {
        field
        for module, types in modules.items()
        for each in types.split()
        for field in vars(module)[each].__annotations__
    }
    assert len(known) > 10 and known - dialect.fields.keys() - RUN.keys() == set()
