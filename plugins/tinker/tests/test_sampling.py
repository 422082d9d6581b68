"""Samplers of a tiny model: each answers with the weights that it was made of, or not at all."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tinker.types import SampleResponse
from tinker.types.topk_logprobs import MASK_LOGPROB

from corerl import Engines
from corerl.errors import WorkerDied
from corerl_tinker.order import Turns
from corerl_tinker.requests import Refused, Sampler
from plugins.tinker.tests.served import (
    ADAM,
    CONFIG,
    MODEL,
    PROMPT,
    ROWS,
    Served,
    asked,
    in_flight,
    publish,
    run,
    same,
    save,
    serving,
    supervised,
    train,
    weights_of,
)


@pytest.fixture(scope="module")
def serving_one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("sampled"), snapshots=2) as found:
        yield found


@pytest.fixture
def served(serving_one: Served) -> Served:
    """With a new model."""
    serving_one.new_model("a:train:0")
    return serving_one


def test_a_frozen_samplers_logprobs_stay_bit_equal_for_ten_steps(served: Served) -> None:
    frozen = publish(served)
    before = served.logprobs(frozen, PROMPT)
    assert np.isnan(before[0]) and np.isfinite(before[1:]).all()
    for _ in range(5):
        train(served.policy, 2)
        newest = publish(served)
        assert served.logprobs(frozen, PROMPT).tobytes() == before.tobytes()
        assert np.abs(served.logprobs(newest, PROMPT) - before)[1:].max() > 0.01


def test_a_sampler_of_earlier_weights_is_answered_from_their_copy(served: Served, pushed: list[str]) -> None:
    old = publish(served)
    first = served.draw(old, seed=3)
    train(served.policy, 1)
    assert same(served.draw(old, seed=3), first)  # engines still hold them
    new = publish(served)
    newest = served.draw(new, seed=3)
    assert newest.sequences[0].logprobs != first.sequences[0].logprobs and pushed == ["", ""]
    scored = served.draw(old, max_tokens=1, prompt_logprobs=True)
    assert [each.tokens for each in scored.sequences] == [[]] and scored.prompt_logprobs is not None
    assert pushed == ["", ""]  # for a token that nobody reads
    before = weights_of(served)
    for sampler, expected in ((old, first), (new, newest), (old, first)):
        assert same(served.draw(sampler, seed=3), expected)
    assert len(pushed) == 5 and pushed[2] == pushed[4] != "" == pushed[3]
    assert all(torch.equal(before[name], each) for name, each in weights_of(served).items())  # the ranks' own stay


def together(wanted: Sequence[partial[Any]]) -> list[SampleResponse]:
    """What is drawn if all ask before any of them has a turn."""

    async def play() -> list[SampleResponse]:
        ready = asyncio.Event()

        async def call(work: Any) -> Any:
            await ready.wait()
            return work()

        turns = Turns(call)
        before = asyncio.create_task(turns.call(lambda: None))
        tasks = [asyncio.create_task(each(in_turn=turns.ask)) for each in wanted]
        await asyncio.sleep(0.05)
        ready.set()
        await before
        return await asyncio.gather(*tasks)

    return asyncio.run(play())


def test_who_waits_for_the_same_weights_waits_for_one_push(served: Served, pushed: list[str]) -> None:
    samplers = [publish(served)]
    for _ in range(2):
        train(served.policy, 1)
        samplers.append(publish(served))
    wanted = [(each, [*PROMPT, last]) for last in range(3, 7) for each in samplers[:2]]
    expected = [served.draw(*each, seed=3) for each in wanted]
    publish(served)
    del pushed[:]
    found = together([partial(served.drawing, *each, seed=3) for each in wanted])
    for drawn, alone in zip(found, expected, strict=True):
        assert drawn.sequences[0].tokens == alone.sequences[0].tokens
        np.testing.assert_allclose(drawn.sequences[0].logprobs, alone.sequences[0].logprobs, atol=1e-5)
    assert len(pushed) == 2


def test_the_copy_that_was_not_used_for_longest_goes(served: Served) -> None:
    train(served.policy, 1)  # those at the start are not counted
    first, second = (_published_and_trained(served) for _ in range(2))
    expected = served.logprobs(first, PROMPT)
    third = _published_and_trained(served)
    assert served.logprobs(first, PROMPT).tobytes() == expected.tobytes()
    assert np.isfinite(served.logprobs(third, PROMPT)[1:]).all()
    with pytest.raises(Refused, match=r"are gone: .*copies of 2 are kept \(serve.snapshots\)"):
        served.logprobs(second, PROMPT)


def _published_and_trained(served: Served) -> Sampler:
    sampler = publish(served)
    train(served.policy, 1)
    return sampler


def test_the_base_model_stays_what_ranks_start_with(served: Served) -> None:
    base = served.policy.sampler(None, MODEL)
    before = served.logprobs(base, PROMPT)
    sampled = served.draw(base, seed=2)
    train(served.policy, 3)
    assert served.logprobs(base, PROMPT).tobytes() == before.tobytes()
    later = served.policy.sampler(None, MODEL)
    assert served.logprobs(later, PROMPT).tobytes() == before.tobytes()
    publish(served)
    assert same(served.draw(later, seed=2), sampled)
    served.policy.release()
    again = served.policy.sampler(None, MODEL)
    assert served.draw(again, seed=2).sequences[0].tokens == sampled.sequences[0].tokens
    with pytest.raises(Refused, match="base_model='other' is not served here"):
        served.policy.sampler(None, "other")


def test_a_sampler_of_a_checkpoint_has_its_weights(served: Served) -> None:
    policy = served.policy
    train(policy, 2)
    path = publish(served, "two").model_path
    assert path == "tinker://a:train:0/sampler_weights/two"
    of_file = policy.sampler(path, "")
    drawn = served.draw(of_file, seed=4)
    scored = served.logprobs(of_file, PROMPT)
    for _ in range(3):  # its copy goes
        train(policy, 1)
        publish(served)
    with pytest.raises(Refused, match="are not in memory, and the ranks are training a:train:0"):
        policy.sampler(path, "")
    policy.release()
    later = policy.sampler(path, "")
    assert served.logprobs(later, PROMPT).tobytes() == scored.tobytes()
    again = served.draw(later, seed=4)
    assert again.sequences[0].tokens == drawn.sequences[0].tokens
    assert again.sequences[0].logprobs == drawn.sequences[0].logprobs
    policy.checkpoints.delete(path)
    with pytest.raises(Refused, match="was deleted") as refused:
        policy.sampler(path, "")
    assert refused.value.status == 404


def test_likely_tokens_of_prompts_are_those_of_the_samplers_weights(served: Served, pushed: list[str]) -> None:
    networks, samplers = [], []
    for _ in range(2):
        samplers.append(publish(served))
        networks.append(copy.deepcopy(served.network))
        train(served.policy, 2)
    for last, number in ((None, 0), (2, 1), (None, 1), (3, 0)):
        how: dict[str, Any] = {"max_tokens": 1, "prompt_logprobs": True, "prompt_logprobs_last_n": last}
        found = served.draw(samplers[number], **how, topk_prompt_logprobs=4)
        top, own = found.topk_prompt_logprobs_np, found.prompt_logprobs_np
        assert top is not None and own is not None
        with torch.no_grad():
            logits = networks[number](input_ids=torch.tensor([PROMPT]), use_cache=False).logits[0, :-1]
        count, expected = last or len(PROMPT) - 1, logits.double().log_softmax(-1)[-(last or len(PROMPT)) :]
        values, ids = expected.topk(4)
        assert top.token_ids[-count:].tolist() == ids.tolist()
        np.testing.assert_allclose(top.logprobs[-count:], values, atol=1e-5)
        wanted = expected.gather(1, torch.tensor(PROMPT[-count:])[:, None])[:, 0]
        np.testing.assert_allclose(own[-count:], wanted, atol=1e-5)
        assert (top.logprobs[:-count] == MASK_LOGPROB).all() and np.isnan(own[:-count]).all()
        by_ranks = served.draw(samplers[number], **how).prompt_logprobs_np
        np.testing.assert_allclose(by_ranks, own, atol=1e-5)
    assert [bool(copied) for copied in pushed] == [False, False, True, True, True]


def test_seeds_and_request_numbers_say_what_is_sampled(served: Served) -> None:
    sampler = publish(served)

    def tokens(**more: Any) -> list[list[int]]:
        return [each.tokens for each in served.draw(sampler, num_samples=2, **more).sequences]

    seeded = tokens(seed=7)
    assert seeded == tokens(seed=7, seq_id=5) != tokens(seed=8) and seeded[0] != seeded[1]
    assert tokens(seq_id=1) == tokens(seq_id=1) != tokens(seq_id=2)
    first, second = tokens(temperature=0.0)
    assert first == second
    assert [len(row) for row in tokens(max_tokens=None)] == [64 - len(PROMPT)] * 2


def test_stops_are_told_apart(served: Served) -> None:
    sampler, ends = publish(served), (2,)
    (x,) = served.policy._tokenizer.encode("x", add_special_tokens=False)
    wanted = {None: (ends, ()), (): ((), ()), (5, 6): ((5, 6), ()), "x": ((*ends, x), ())}
    wanted["x", "yz"] = ((*ends, x), ("yz",))
    for stop, expected in wanted.items():
        params = served.policy._request(sampler, asked(stop=stop)).params
        assert (params.stop_tokens, params.stop) == expected


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"prompt": [1, 32]}, "below 32"),
        ({"prompt": [1] * 60}, "a prompt of 60 tokens and 6 more do not fit in the context length 64"),
        ({"prompt": [1] * 64, "max_tokens": None}, "do not fit"),
        ({"topk_prompt_logprobs": 33}, "topk_prompt_logprobs=33, of 32 tokens that there are"),
        ({"stop": ""}, "stop: '' is an empty text"),
    ],
)
def test_what_cannot_be_sampled_is_refused(wrong: Mapping[str, Any], sentence: str, served: Served) -> None:
    with pytest.raises(Refused, match=sentence):
        served.draw(publish(served), **wrong)


def test_prompts_that_wait_together_are_scored_in_one_pass(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = publish(served)
    one_by_one = [served.logprobs(sampler, row) for row in ROWS]
    passes, forward = [], served.engines.group.forward

    def counted(samples: Any, *args: Any, **named: Any) -> Any:
        passes.append(len(samples))
        return forward(samples, *args, **named)

    monkeypatch.setattr(served.engines.group, "forward", counted)
    how: dict[str, Any] = {"max_tokens": 1, "prompt_logprobs": True}
    found = together([partial(served.drawing, sampler, row, **how) for row in ROWS])
    assert passes == [3]
    for each, expected in zip(found, one_by_one, strict=True):
        np.testing.assert_allclose(each.prompt_logprobs_np, expected, atol=1e-6)


def test_a_push_waits_for_samples_in_flight(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is asked for meanwhile is answered from its own weights."""
    old = publish(served)
    train(served.policy, 1)

    async def sampling() -> None:
        async with in_flight(served, old, monkeypatch) as first:
            pushing = asyncio.create_task(asyncio.to_thread(publish, served))
            await asyncio.wait([pushing], timeout=0.2)
            assert not pushing.done()
        await pushing
        assert same(await served.drawing(old, seed=5), first.result())

    asyncio.run(sampling())


@pytest.fixture
def engine_dies(served: Served, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """An engine has died, and there is a place for another one."""
    monkeypatch.setattr(served.engines, "on_death", lambda reasons: None)
    return lambda: served.engines.fleet.leave_out({"engine-0": WorkerDied("engine-0 was killed by SIGKILL")})


def test_engines_that_die_again_cost_an_attempt_only(
    served: Served, engine_dies: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = publish(served)
    expected = served.draw(sampler, seed=5)
    push, deaths, fatal = Engines.push, list[int](), list[Exception]()

    def dies_at_first(self: Engines, **settings: Any) -> int:
        version = push(self, **settings)
        if not deaths:
            deaths.append(version)
            engine_dies()
        return version

    async def in_turn(work: Any) -> Any:
        try:
            return work()
        except Exception as error:
            if not isinstance(error, Refused):  # for which the server gives up the model
                fatal.append(error)
            raise

    monkeypatch.setattr(Engines, "push", dies_at_first)
    engine_dies()
    drawn = asyncio.run(served.drawing(sampler, seed=5, in_turn=Turns(in_turn).ask))
    assert same(drawn, expected) and len(deaths) == 1 and fatal == []


def test_engines_that_fail_for_good_leave_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tmp_path, {"rollout": {**CONFIG["rollout"], "restarts": 0}}) as served:
        served.new_model("a:train:0")
        sampler = publish(served)
        train(served.policy, 1)
        monkeypatch.setattr(served.engines, "on_death", lambda reasons: None)  # there is a place for another one
        monkeypatch.setattr(served.engines.fleet.processes, "kill", lambda: None)  # threads of this process
        served.engines.fleet.leave_out({"engine-0": WorkerDied("engine-0 was killed by SIGKILL")})
        for call in (lambda: publish(served), lambda: served.draw(sampler), lambda: publish(served)):
            with pytest.raises(Refused, match="engines do not take the weights: engine-0 was killed by SIG") as failed:
                call()
            assert failed.value.category == "server"
        losses = train(served.policy, 2)
        path = save(served.policy, "one").tinker_path
        served.new_model("a:train:1")
        assert train(served.policy, 1)[0] > losses[0] > losses[1]
        served.policy.load(path, optimizer=True)
        assert train(served.policy, 1)[0] < losses[1]
        monkeypatch.setattr(type(served.engines.group.processes), "ended", True)  # then it is the end of the model
        with pytest.raises(WorkerDied):
            served.policy._samplers.push()
        monkeypatch.undo()


def test_engines_that_slept_get_their_weights_again(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ranks and engines share devices."""
    engines, push, slept = served.engines, Engines.push, []

    def turn(self: Any, stage: str) -> None:
        slept.append(stage)
        self.fleet.sleep()

    def wakes(self: Any, **settings: Any) -> int:
        self.fleet.wake_up()
        return push(self, **settings)

    monkeypatch.setattr(type(engines), "takes_turns", True)
    monkeypatch.setattr(type(engines), "turn", turn)
    monkeypatch.setattr(type(engines), "push", wakes)
    sampler = publish(served)
    drawn = served.draw(sampler, seed=6, prompt_logprobs=True)
    assert slept == ["forward"]  # by the log-probs of the prompt, before which nobody had sampled
    passed = run(served.policy, supervised(*ROWS))
    again = served.draw(sampler, seed=6)
    assert again.sequences[0].logprobs == drawn.sequences[0].logprobs and slept == ["forward", "train"]
    served.policy.step(ADAM)
    assert served.draw(sampler, seed=6).sequences[0].logprobs == drawn.sequences[0].logprobs  # from the copy
    np.testing.assert_array_equal(served.logprobs(sampler, PROMPT), drawn.prompt_logprobs_np)
    assert passed[1] > run(served.policy, supervised(*ROWS))[1]
