"""Episodes against engines that say what a function of tokens, noise and position says, and against real ones."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from corerl.engines import CacheUse, GenerateRequest, Generation, Stops
from corerl.errors import EngineFailed
from corerl.models import load_tokenizer
from corerl.rollout import EventLoop, Failure, Rollout, Sampler
from corerl_agents.episodes import Episode
from corerl_testing import in_parts, until_stop
from plugins.agents.tests.oracle import (
    PARAMS,
    PROMPTS,
    TOKENIZER,
    Oracle,
    Play,
    assert_equal,
    noise_keys,
    oracle_says,
    parts_of,
    played_plainly,
    with_experts,
)
from plugins.agents.tests.worker_functions import two_turns
from tests.machine import paced

WANTED = "wanted a finite number, numbers by name, one for each turn, or None,"


def single(episode: Episode) -> None:
    episode.chat(episode.messages)


def test_an_episode_of_one_request_equals_a_plain_sample(play: Play) -> None:
    played = play(single)
    assert_equal(played, played_plainly())
    assert played.batch.row_columns["turns"].tolist() == [1] * 8
    assert played.outcomes == [None] * 8 and played.prompts == tuple(PROMPTS)


def test_a_rows_own_template_arguments_are_those_of_its_requests(play: Play) -> None:
    ours = load_tokenizer(tokenizer="characters:0123456789>s", path="")
    ours.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if brief %}{{ brief }}{% endif %}>"
    prompts = [
        evolve(prompt, messages=({"role": "user", "content": prompt.text},), template_options=options)
        for prompt, options in zip(PROMPTS, [{"brief": "77"}, {}], strict=True)
    ]
    played = play(single, prompts=prompts, tokenizer=ours)
    assert_equal(played, played_plainly(prompts, ours))
    assert ours.decode(played.batch.tokens[:6]).startswith("21>77>")

    def briefly(episode: Episode) -> None:
        episode.chat(episode.messages, chat_template_kwargs={"brief": "5"})

    asked = play(briefly, prompts=prompts, tokenizer=ours)
    assert ours.decode(asked.batch.tokens[:5]).startswith("21>5>")


def test_episodes_begin_in_the_order_of_requests(loop: EventLoop, sampler: Callable[..., Sampler]) -> None:
    begun: list[int] = []

    def noted(episode: Episode) -> None:
        begun.append(episode.prompt.index)
        single(episode)

    one = sampler(noted, concurrency=1)

    async def side_by_side() -> None:
        each = (one.sample([prompt], rollout_step=5, samples=3, params=PARAMS) for prompt in PROMPTS)
        await asyncio.gather(*each)

    loop.run(side_by_side())
    assert begun == [40, 40, 40, 8, 8, 8]


def test_auto_plays_as_many_episodes_as_caches_have_room_for(play: Play) -> None:
    playing, most = 0, 0

    async def counted(episode: Episode) -> None:
        nonlocal playing, most
        playing += 1
        most = max(most, playing)
        await episode.chat_async(episode.messages)
        playing -= 1

    async def cache_use() -> dict[str, CacheUse]:
        return {"engine-0": CacheUse(capacity=41, tokens=0, retracted=0)}  # of two rows of 4 + 12 tokens, and some more

    assert_equal(play(counted, concurrency="auto", cache_use=cache_use), play(single))
    assert most == 2


def test_samples_depend_neither_on_time_nor_on_batches(play: Play) -> None:
    def slow(episode: Episode) -> float:
        time.sleep(0.02 * np.random.default_rng().random())
        value = two_turns(episode)
        time.sleep(0.02 * np.random.default_rng().random())
        return value

    together, alone = Oracle(), Oracle()
    reference = play(two_turns, generate=together)
    assert_equal(play(slow), reference)
    told: list[tuple[int, int]] = []
    one_by_one = play(two_turns, generate=alone, concurrency=1, on_progress=lambda done, of: told.append((done, of)))
    assert_equal(one_by_one, reference)
    assert told == [(done, 8) for done in range(9)]
    assert [len(request) for request in alone.requests] == [1] * 16
    assert len(together.requests[0]) == 8  # the first requests of all episodes, in one call
    assert reference.outcomes == [float(len(text)) for text in reference.texts]


def test_a_row_is_the_prompt_and_each_turn_behind_it(play: Play) -> None:
    rollout = play(two_turns)
    keys = noise_keys()
    for row, parts in enumerate(parts_of(rollout)):
        group = row // 4
        prompt = TOKENIZER.encode(PROMPTS[group].text)
        first = oracle_says(keys[row], limit=3)
        tool = TOKENIZER.encode(("9>", "77>")[group])[1:]
        second = oracle_says(keys[row], length=len(first) + len(tool))
        assert parts == [(prompt, False), (first, True), (tool, False), (second, True)]
        wanted = {
            "prompt_length": len(prompt),
            "span": len(first) + len(tool) + len(second),
            "response_length": len(first) + len(second),
            "truncated": second[-1] != 2,
            "turns": 2,
        }
        assert {name: rollout.batch.row_columns[name][row] for name in wanted} == wanted
    columns, mask = rollout.batch.columns, rollout.batch.columns["loss_mask"]
    np.testing.assert_array_equal(columns["rollout_logprobs"], np.where(mask, -rollout.batch.tokens, 0))
    np.testing.assert_array_equal(columns["versions"], np.where(mask, 3, 0))


def test_a_failing_function_keeps_what_was_sampled(play: Play) -> None:
    waiting = threading.Event()

    def some(episode: Episode, calls: list[int] = []) -> Any:  # noqa: B006  -- counts the calls
        calls.append(0)
        match len(calls):
            case 1:
                return "five"
            case 2:
                episode.chat(episode.messages)
                raise KeyError("no such drawer")
            case 3:
                return 1.0
            case 4:
                episode.chat(episode.messages)
                waiting.wait(20)
            case 5:
                episode.chat([{"role": "user", "content": "1"}], n=2)
        episode.chat(episode.messages)
        return 0.5

    limit = paced(0.5)
    rollout = play(some, samples=3, timeout=limit, concurrency=1)
    waiting.set()
    kinds = [each.kind if isinstance(each, Failure) else each for each in rollout.outcomes]
    assert kinds == ["no-number", "raised", "silent", "timeout", "raised", 0.5]
    told = [each.message for each in rollout.outcomes if isinstance(each, Failure)]
    on = "on prompt 40 ('21>')"
    for said, found in zip(
        (
            f"returned 'five', {WANTED} {on}",
            "raised KeyError: 'no such drawer' (plugins/agents/tests/test_sampler.py:",
            f"sent no request to the policy {on}",
            f"took longer than samplers.episodes.timeout={limit:g} seconds on prompt 8 (",
            "raised RuntimeError: n: got 2, wanted 1; leave it out",
        ),
        told,
        strict=True,
    ):
        assert found.startswith(f"samplers.episodes.function 'mine:play' {said}")
    plain = play(single, samples=3)
    drawn = [np.flatnonzero(rollout.batch.row_columns["turns"] == turns).tolist() for turns in (0, 1)]
    assert drawn == [[0, 2, 4], [1, 3, 5]]
    for row in drawn[1]:
        np.testing.assert_array_equal(
            rollout.batch.take_rows(np.array([row])).tokens, plain.batch.take_rows(np.array([row])).tokens
        )
    nothing = rollout.batch.take_rows(np.array([4]))
    assert nothing.tokens.tolist() == TOKENIZER.encode("5>") and not nothing.columns["loss_mask"].any()


def test_async_functions_are_cancelled_at_their_time_limit(play: Play) -> None:
    ended = []

    async def later(episode: Episode) -> float:
        await episode.chat_async(episode.messages)
        if episode.prompt.index == 8:
            try:
                await asyncio.sleep(20)
            finally:
                ended.append(episode)
        return 2.0

    rollout = play(later, timeout=paced(0.5))
    assert rollout.outcomes[:4] == [2.0] * 4
    assert {each.kind for each in rollout.outcomes[4:] if isinstance(each, Failure)} == {"timeout"}
    assert_equal(rollout, play(single))
    deadline = time.monotonic() + paced(20)
    while len(ended) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(ended) == 4


def test_a_first_request_without_room_fails_its_episode_alone(play: Play) -> None:
    def show(episode: Episode) -> float:
        messages = [{"role": "user", "content": "1" * (30 if episode.prompt.index == 40 else 8)}]
        messages.append(episode.chat(messages, max_tokens=3)["message"])
        messages.append({"role": "user", "content": "5555"})  # what follows counts for rollout.max_tokens
        episode.chat(messages)
        return 1.0

    longest = len(TOKENIZER("1" * 8)["input_ids"])
    rollout = play(show, samples=2, context_length=longest + PARAMS.max_tokens)
    failed, refused = rollout.outcomes[:2], f"has 31 tokens, but only {longest} fit into rollout.context_length"
    assert all(isinstance(each, Failure) and refused in each.message for each in failed)
    assert rollout.outcomes[2:] == [1.0, 1.0]
    assert rollout.batch.row_columns["prompt_length"][2:].tolist() == [longest] * 2


def test_an_episode_ends_where_its_tokens_are_used_up(play: Play) -> None:
    seen: list[tuple[str, str]] = []

    def on_and_on(episode: Episode) -> None:
        messages = episode.messages
        while True:
            choice = episode.chat(messages)
            seen.append((choice["finish_reason"], choice["message"]["content"]))
            messages += [choice["message"], {"role": "tool", "content": "0123"}]

    rollout = play(on_and_on, samples=1, prompts=PROMPTS[:1], params=evolve(PARAMS, max_tokens=30))
    (outcome,) = rollout.outcomes
    assert isinstance(outcome, Failure) and "has used up its rollout.max_tokens=30; end it when" in outcome.message
    assert seen[-1] == ("length", "") and all(reason == "stop" for reason, _ in seen[:-2])
    assert rollout.batch.row_columns["truncated"].tolist() == [True]
    assert rollout.batch.row_columns["response_length"][0] < rollout.batch.row_columns["span"][0] <= 30
    assert rollout.batch.columns["loss_mask"][-1]  # nothing stands behind the last thing that was said
    assert rollout.batch.row_columns["turns"][0] == len(seen) - 1

    def once(episode: Episode) -> str:
        return str(episode.chat(episode.messages, max_tokens=1)["finish_reason"])

    reasons: list[str] = []
    cut = play(lambda episode: reasons.append(once(episode)), samples=1)
    assert not cut.batch.row_columns["truncated"].any()  # by the function's own wish
    assert cut.batch.row_columns["response_length"].tolist() == [1, 1]


def test_an_answer_after_the_episodes_end_is_left_out(play: Play) -> None:
    drawing, refused, oracle = threading.Event(), threading.Event(), Oracle()

    def generate(request: GenerateRequest) -> Generation:
        if request.response_lengths.any():  # a second turn
            drawing.set()
            assert refused.wait(60)
        return oracle(request)

    def leaves(episode: Episode) -> float:
        messages = episode.messages
        messages += [episode.chat(messages, max_tokens=1)["message"], {"role": "tool", "content": "9>"}]

        def ask() -> None:
            with pytest.raises(RuntimeError, match="the episode is over"):
                episode.chat(messages)
            refused.set()

        threading.Thread(target=ask).start()
        assert drawing.wait(60)
        return 1.0

    rollout = play(leaves, generate=generate, samples=1, prompts=PROMPTS[:1])
    assert rollout.outcomes == [1.0]
    assert [rollout.batch.row_columns[name].tolist() for name in ("turns", "response_length")] == [[1], [1]]


def test_a_text_of_the_request_ends_each_answer_by_itself(play: Play) -> None:
    stop, contents = [f"{digit}7" for digit in range(10)], []

    def twice(episode: Episode) -> None:
        messages = episode.messages
        for _ in range(2):
            choice = episode.chat(messages, stop=stop, max_tokens=20)
            contents.append(choice["message"]["content"])
            messages += [choice["message"], {"role": "user", "content": "4"}]

    oracle = Oracle()
    rollout = play(
        twice,
        generate=lambda request: until_stop(partial(in_parts, oracle), request, Stops(TOKENIZER, request.params.stop)),
        samples=16,
        params=evolve(PARAMS, max_tokens=60),
    )
    sampled = [TOKENIZER.decode(tokens) for row in parts_of(rollout) for tokens, trained in row if trained]
    said = [text.removesuffix("<eos>") for text in sampled]
    assert sorted(contents) == sorted(text[:-2] if text[-2:] in stop else text for text in said)
    assert not any(each in text[:-1] for each in stop for text in said)
    # An answer may begin with what would complete a text begun by the environment.
    assert any(text[0] == "7" and len(text) > 1 for text in said if text)
    assert sum(text[-2:] in stop for text in said) > 8


def test_an_engines_error_ends_all_episodes(play: Play) -> None:
    ended: list[str] = []

    def note(episode: Episode) -> None:
        try:
            episode.chat(episode.messages)
        except RuntimeError as error:
            ended.append(str(error))

    def broken(request: GenerateRequest) -> Generation:
        raise EngineFailed("it is gone")

    with pytest.raises(EngineFailed, match="it is gone"):
        play(note, generate=broken)
    deadline = time.monotonic() + paced(20)
    while len(ended) < 8 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ended == ["the episode is over; its requests are no longer answered"] * 8


def test_experts_come_with_the_samples_where_the_engine_tells_them(play: Play) -> None:
    def first_only(episode: Episode) -> None:
        if episode.prompt.index == 40:
            two_turns(episode)

    rollout = play(first_only, generate=with_experts, samples=1)
    lengths = rollout.batch.lengths
    expected = [*range(lengths[0] - 1), -1, *[-1] * lengths[1]]
    assert rollout.batch.columns["routed_experts"].ravel().tolist() == expected

    # Batches of which one has nothing drawn go together too, in either order.
    nothing = play(lambda episode: None, generate=with_experts, samples=1, prompts=PROMPTS[:1])
    assert "routed_experts" not in nothing.batch.columns
    none = [-1] * len(nothing.batch.tokens)
    for parts, told in (([rollout, nothing], [*expected, *none]), ([nothing, rollout], [*none, *expected])):
        assert Rollout.concatenate(parts).batch.columns["routed_experts"].ravel().tolist() == told


def turns_of(rollout: Rollout) -> list[list[float]]:
    """The rewards of each row's turns, in order."""
    column, mask = rollout.batch.columns["turn_rewards"], rollout.batch.columns["loss_mask"]
    assert not column[~mask].any()
    found = []
    for low, high in itertools.pairwise(rollout.batch.offsets.tolist()):
        own = np.append(mask[low:high], False)
        last = np.flatnonzero(own[:-1] & ~own[1:])
        assert np.isin(np.flatnonzero(column[low:high]), last).all()
        found.append(column[low:high][last].tolist())
    return found


def test_rewards_of_turns_are_at_their_last_tokens(play: Play) -> None:
    def talk(episode: Episode) -> list[float]:
        messages = episode.messages
        messages += [episode.chat(messages, max_tokens=2)["message"], {"role": "tool", "content": "9"}]
        other = episode.chat([{"role": "user", "content": "77"}], max_tokens=2)  # a row of its own
        episode.chat(messages, max_tokens=2)
        episode.chat([{"role": "user", "content": "77"}, other["message"], {"role": "tool", "content": "1"}])
        return [1.0, 2.0, 3.0, 4.0]

    rollout = play(talk, samples=2)
    assert turns_of(rollout) == [[1.0, 3.0], [2.0, 4.0]] * 4
    assert [each.reward for each in rollout.outcomes] == [10.0] * 8
    assert turns_of(play(two_turns)) == [[0.0, 0.0]] * 8

    def again(episode: Episode) -> list[float]:
        messages = episode.messages
        messages += [episode.chat(messages, max_tokens=2)["message"], {"role": "tool", "content": "9"}]
        for _ in range(2):
            episode.chat(messages)
        return [1.0, 2.0, 3.0]

    # What two rows share is trained on, and has its reward, in the first of them.
    assert turns_of(play(again, samples=1, prompts=PROMPTS[:1])) == [[1.0, 2.0], [3.0]]


def test_a_wrong_number_of_rewards_names_both_numbers(play: Play) -> None:
    def miscounted(episode: Episode) -> list[float]:
        two_turns(episode)
        return [1.0, 2.0, 3.0]

    async def together(episode: Episode) -> list[float]:
        await asyncio.gather(*(episode.chat_async(episode.messages) for _ in range(2)))
        return [1.0, 2.0]

    for function, what in (
        (miscounted, "returned 3 rewards, one for each turn, but got 2 answers on prompt"),
        (together, "returned 2 rewards, one for each turn, but sent requests side by side, whose answers"),
    ):
        outcomes = play(function).outcomes
        assert all(isinstance(each, Failure) and what in each.message for each in outcomes), outcomes
