"""Tokens in, tokens out: rows are what was sent and what came back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from attrs import evolve

from corerl_agents.episodes import Episode
from plugins.agents.tests.clients import post
from plugins.agents.tests.oracle import PARAMS, PROMPTS, TOKENIZER, Play, with_experts

LONG = evolve(PARAMS, max_tokens=40)


def ask(episode: Episode, **body: Any) -> dict[str, Any]:
    found: dict[str, Any] = post(f"{episode.base_url}/tokens", body)[1]
    return found


def test_a_row_has_the_tokens_that_were_sent_and_sampled(play: Play) -> None:
    told: dict[int, list[dict[str, Any]]] = {}

    def function(episode: Episode) -> None:
        tokens, answers = TOKENIZER.encode(episode.prompt.text), list[dict[str, Any]]()
        for _ in range(2):
            answers.append({"before": tokens, **ask(episode, token_ids=tokens, max_tokens=6)})
            tokens = [*tokens, *answers[-1]["token_ids"], 11, 14]
        told[episode.prompt.index] = answers

    rollout = play(function, generate=with_experts, params=LONG, samples=1)
    batch = rollout.batch
    assert len(batch) == len(told) == len(PROMPTS)
    for row, prompt in enumerate(PROMPTS):
        low, high = batch.offsets[row : row + 2]
        columns = {name: column[low:high] for name, column in batch.columns.items()}
        first, second = told[prompt.index]
        assert batch.tokens[low:high].tolist() == [*second["before"], *second["token_ids"]]
        own = np.zeros(high - low, bool)
        begin = len(first["before"])
        own[begin : begin + len(first["token_ids"])] = True
        own[len(second["before"]) :] = True
        np.testing.assert_array_equal(columns["loss_mask"], own)
        for name, column in (("logprobs", "rollout_logprobs"), ("versions", "versions")):
            np.testing.assert_array_equal(columns[column][own], first[name] + second[name])
        assert np.isfinite(columns["rollout_logprobs"]).all() and first["versions"][0] == 3
        assert np.ravel(second["routed_experts"]).tolist() == [*range(high - low - 1), -1]
        np.testing.assert_array_equal(columns["routed_experts"].ravel()[:-1], np.arange(high - low - 1))
        assert second["usage"]["total_tokens"] == high - low
    assert set(batch.row_columns["turns"].tolist()) == {2} and rollout.outcomes == [None, None]


def test_an_answer_asked_for_in_pieces_is_one_row(play: Play) -> None:
    def in_pieces_of(limit: int) -> Callable[[Episode], None]:
        def function(episode: Episode) -> None:
            tokens, why = TOKENIZER.encode(episode.prompt.text), "length"
            while why == "length" and len(tokens) < 20:
                found = ask(episode, token_ids=tokens, max_tokens=limit)
                tokens, why = [*tokens, *found["token_ids"]], found["finish_reason"]

        return function

    pieces, whole = (play(in_pieces_of(limit), params=evolve(PARAMS, max_tokens=24)) for limit in (2, 24))
    assert pieces.batch.row_columns["turns"].max() > 2
    for name in ("loss_mask", "rollout_logprobs", "versions"):
        np.testing.assert_array_equal(pieces.batch.columns[name], whole.batch.columns[name])
    np.testing.assert_array_equal(pieces.batch.tokens, whole.batch.tokens)
    assert pieces.texts == whole.texts


def test_tokens_go_on_from_a_chat_never_the_other_way(play: Play) -> None:
    asked: list[list[int]] = []

    def function(episode: Episode) -> None:
        messages = episode.messages
        choice = episode.chat(messages, max_tokens=4)
        begin = [*TOKENIZER.encode(episode.prompt.text)]
        whole = episode.chat([{"role": "user", "content": "9>"}], max_tokens=4, return_token_ids=True)["token_ids"]
        nine = [*TOKENIZER.encode("9>"), *whole, 5, 14]
        asked.append([*nine, *ask(episode, token_ids=nine, max_tokens=4)["token_ids"]])
        messages += [choice["message"], {"role": "user", "content": "7>"}]
        episode.chat(messages, max_tokens=4)  # on from the first answer, though tokens went on meanwhile
        other = [*begin, 13, 13]
        asked.append([*other, *ask(episode, token_ids=other, max_tokens=4)["token_ids"]])

    rollout = play(function, params=LONG, samples=1, prompts=PROMPTS[:1])
    batch = rollout.batch
    rows = [batch.tokens[low:high].tolist() for low, high in zip(batch.offsets, batch.offsets[1:], strict=False)]
    assert len(rows) == 3 and sorted(batch.row_columns["turns"].tolist()) == [1, 2, 2]
    assert all(row in rows for row in asked)


def test_an_episode_without_room_ends_with_an_empty_answer(play: Play) -> None:
    told: list[dict[str, Any]] = []

    def function(episode: Episode) -> float:
        tokens = TOKENIZER.encode("5>")
        first = ask(episode, token_ids=tokens, max_tokens=2)
        full = [*tokens, *first["token_ids"], *[5] * 12]
        told.extend([ask(episode, token_ids=full), ask(episode, token_ids=[*full, 5])])
        told.append(ask(episode, token_ids=[5, len(TOKENIZER)]))
        return 1.0

    rollout = play(function, params=PARAMS, samples=1, prompts=PROMPTS[:1])
    empty, refused, unknown = told
    assert (empty["token_ids"], empty["finish_reason"]) == ([], "length")
    assert refused["error"]["code"] == "context_length_exceeded"
    last = len(TOKENIZER)
    wanted = f"token_ids: got {last}, but the tokenizer has {last} tokens, from 0 to {last - 1}"
    assert unknown["error"]["message"] == wanted
    assert rollout.batch.row_columns["truncated"].tolist() == [True]
