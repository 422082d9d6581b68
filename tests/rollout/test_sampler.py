from __future__ import annotations

import asyncio
import gc
import pickle
import re
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from corerl.config.schema import RolloutConfig
from corerl.data.prompts import Prompt
from corerl.engines.base import GenerateRequest, Generation, SamplingParams
from corerl.errors import ConfigError, PluginBroken
from corerl.models.tokenizer import load_tokenizer
from corerl.pictures import FoundPicture
from corerl.rollout.encoding import PromptCheck
from corerl.rollout.rewards import Reward
from corerl.rollout.sampler import PromptSampler, Rollout, Sampler, assemble, sampling_params
from corerl.rollout.scored import shown
from corerl.rollout.scoring import RewardScorer, samples_of
from tests.engines.services import generation_of
from tests.rollout.samplers import prompt_sampler
from tests.tiny_pictures import TinyOptions, TinyReader

TOKENIZER = load_tokenizer(
    tokenizer="characters:0123456789>s", path=""
)  # <pad> <bos> <eos> <unk> 0 = 4 ... 9 = 13 > = 14
PARAMS = SamplingParams(temperature=0.5, max_tokens=3, stop_tokens=(2,))
PROMPTS = [Prompt(index=40, text="21>", answer="12"), Prompt(index=8, text="5>", answer="5")]


class Recorder:
    """Answers with what it was told to, and keeps the requests."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.requests: list[GenerateRequest] = []

    async def __call__(self, request: GenerateRequest, **_: Any) -> Generation:
        self.requests.append(request)
        return self.generation


def sample(
    sampler: Sampler,
    prompts: list[Prompt] = PROMPTS,
    *,
    step: int = 5,
    samples: int = 2,
    params: SamplingParams = PARAMS,
) -> Rollout:
    return asyncio.run(sampler.sample(prompts, rollout_step=step, samples=samples, params=params))


FOUR = Generation(  # responses "12<eos>", "9<eos>", "5<eos>", "000"
    tokens=np.array([5, 6, 2, 13, 2, 9, 2, 4, 4, 4]),
    offsets=np.array([0, 3, 5, 7, 10]),
    logprobs=-np.arange(1, 11, dtype=np.float32),
    versions=np.array([3, 3, 3, 3, 3, 3, 3, 3, 4, 4]),
    engines=np.array([1, 1, 1, 0, 0, 2, 2, 0, 0, 1]),
    truncated=np.array([False, False, False, True]),
)


def test_every_array_of_a_rollout_equals_one_by_hand() -> None:
    engine = Recorder(FOUR)
    rollout = sample(prompt_sampler(tokenizer=TOKENIZER, generate=engine, seed=0))
    request = engine.requests[0]
    assert request.tokens.tolist() == [1, 6, 5, 14, 1, 6, 5, 14, 1, 9, 14, 1, 9, 14]
    assert request.offsets.tolist() == [0, 4, 8, 11, 14]
    batch = rollout.batch
    assert batch.offsets.tolist() == [0, 7, 13, 18, 24]
    assert batch.tokens.tolist() == [
        *(1, 6, 5, 14, 5, 6, 2),
        *(1, 6, 5, 14, 13, 2),
        *(1, 9, 14, 9, 2),
        *(1, 9, 14, 4, 4, 4),
    ]
    assert batch.columns["loss_mask"].astype(int).tolist() == [
        *(0, 0, 0, 0, 1, 1, 1),
        *(0, 0, 0, 0, 1, 1),
        *(0, 0, 0, 1, 1),
        *(0, 0, 0, 1, 1, 1),
    ]
    assert batch.columns["rollout_logprobs"].tolist() == [
        *(0, 0, 0, 0, -1, -2, -3),
        *(0, 0, 0, 0, -4, -5),
        *(0, 0, 0, -6, -7),
        *(0, 0, 0, -8, -9, -10),
    ]
    assert batch.columns["versions"].tolist() == [*[0] * 4, 3, 3, 3, *[0] * 4, 3, 3, *[0] * 3, 3, 3, *[0] * 3, 3, 4, 4]
    assert batch.columns["engines"].tolist() == [*[0] * 4, 1, 1, 1, *[0] * 4, 0, 0, *[0] * 3, 2, 2, *[0] * 3, 0, 0, 1]
    assert {name: row.tolist() for name, row in batch.row_columns.items()} == {
        "group": [0, 0, 1, 1],
        "sample": [0, 1, 0, 1],
        "prompt_length": [4, 4, 3, 3],
        "response_length": [3, 2, 2, 3],
        "truncated": [False, False, False, True],
    }
    assert batch.temperature == 0.5
    assert rollout.texts == ["12", "9", "5", "000"]
    assert rollout.prompts == tuple(PROMPTS)


def test_an_engines_experts_cover_prompts_and_responses() -> None:
    experts = np.arange(24 * 2 * 2, dtype=np.int16).reshape(24, 2, 2)
    rollout = sample(
        prompt_sampler(tokenizer=TOKENIZER, generate=Recorder(evolve(FOUR, routed_experts=experts)), seed=0)
    )
    np.testing.assert_array_equal(rollout.batch.columns["routed_experts"], experts)
    parts = [evolve(FOUR, routed_experts=experts), evolve(FOUR, routed_experts=experts + 1)]
    joined = Generation.concatenate(parts).routed_experts
    assert joined is not None
    np.testing.assert_array_equal(joined, np.concatenate([experts, experts + 1]))
    assert Generation.concatenate([FOUR, FOUR]).routed_experts is None


class Faulty(PromptSampler):
    """Changes what the sampler of prompts returns as its option says."""

    async def generate(self, *args: Any, **how: Any) -> Rollout:
        changed: Rollout = self.options(await super().generate(*args, **how))
        return changed


OF_TWO = "samples of 2 prompts at temperature 0.5"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda rollout: None, "NoneType, wanted a corerl.rollout.Rollout"),
        (lambda rollout: rollout.take_rows(np.arange(3)), f"3 {OF_TWO}, wanted 4 {OF_TWO}"),
        (
            lambda rollout: evolve(rollout, batch=evolve(rollout.batch, temperature=1.0)),
            f"4 samples of 2 prompts at temperature 1, wanted 4 {OF_TWO}",
        ),
        (lambda rollout: evolve(rollout, outcomes=[1.0] * 3), "3 outcomes of 4 rows, wanted one for each row; give"),
    ],
)
def test_what_a_sampler_returns_is_checked(change: Callable[[Rollout], Rollout], said: str) -> None:
    sampler = prompt_sampler(tokenizer=TOKENIZER, generate=Recorder(FOUR), seed=0)
    with pytest.raises(PluginBroken, match=rf"Faulty\.generate returned {re.escape(said)}"):
        sample(Faulty(change, sampler.context))


def test_rewards_stay_with_their_samples_when_rollouts_are_joined() -> None:
    rollout = sample(prompt_sampler(tokenizer=TOKENIZER, generate=Recorder(FOUR), seed=0))
    first, second = rollout.take_prompts(np.array([0])), rollout.take_prompts(np.array([1]))
    joined = Rollout.concatenate([first, evolve(second, outcomes=[5.0, 7.0])])
    scores = RewardScorer(Reward(name="len", function=lambda prompt, text: -len(text))).score(joined)
    assert scores.rewards.tolist() == [-2.0, -1.0, 5.0, 7.0]


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("columns", ["columns", "row_columns"])
def test_rollouts_with_different_columns_are_not_joined(columns: str, swapped: bool) -> None:
    rollout = sample(prompt_sampler(tokenizer=TOKENIZER, generate=Recorder(FOUR), seed=0))
    size = len(rollout.batch if columns == "row_columns" else rollout.batch.tokens)
    more = {**getattr(rollout.batch, columns), "mine": np.ones(size)}
    parts = [rollout, evolve(rollout, batch=evolve(rollout.batch, **{columns: more}))]
    with pytest.raises(PluginBroken, match=f"batches whose {columns} differ: only some have 'mine'; give"):
        Rollout.concatenate(parts[::-1] if swapped else parts)


def test_stop_texts_of_one_token_become_stop_tokens() -> None:
    config = RolloutConfig(temperature=0.7, top_p=0.9, top_k=5, max_tokens=7, stop=("s", "12", ">", "<pad>", "12"))
    assert sampling_params(config, TOKENIZER, [2, 14]) == SamplingParams(
        temperature=0.7, top_p=0.9, top_k=5, max_tokens=7, stop_tokens=(2, 14, 15, 0), stop=("12",)
    )
    for text, told in [("x", "does not know all of it"), ("1x", "does not know all of it"), ("", "is an empty text")]:
        with pytest.raises(ConfigError, match=f"^rollout.stop: '{text}' is .*{told.removeprefix('is ')}"):
            sampling_params(RolloutConfig(stop=(text,)), TOKENIZER, [2])


def test_a_stop_text_is_no_part_of_the_text() -> None:
    sampler = prompt_sampler(tokenizer=TOKENIZER, generate=Recorder(FOUR), seed=0)
    rollout = sample(sampler, params=evolve(PARAMS, stop=("00", "5")))
    assert rollout.texts == ["12", "9", "", ""]
    assert rollout.batch.row_columns["response_length"].tolist() == [3, 2, 2, 3]


def test_a_response_begins_with_the_tag_that_the_template_opens() -> None:
    thinking = load_tokenizer(tokenizer="characters:0123456789>s<think/:", path="")
    thinking.chat_template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}s:{{ bos_token }}"
        "{% if not (messages | last).content.startswith('5') %}<think>{% endif %}{% endif %}"
    )
    chats = [evolve(each, messages=({"role": "user", "content": each.text},)) for each in PROMPTS]
    plain = sample(prompt_sampler(tokenizer=thinking, generate=Recorder(FOUR), seed=3), PROMPTS)
    recorder = Recorder(FOUR)
    seen = sample(prompt_sampler(tokenizer=thinking, generate=recorder, seed=3), chats)
    assert thinking.decode(recorder.requests[0].by_row()[0]) == "21>s:<bos><think>"
    assert seen.texts == ["<think>12", "<think>9", "5", "000"]
    assert plain.texts == ["12", "9", "5", "000"]
    # What is trained on, and what a reward gets as tokens, is what was sampled.
    np.testing.assert_array_equal(seen.batch.tokens[seen.batch.columns["loss_mask"]], FOUR.tokens)
    np.testing.assert_array_equal(seen.batch.row_columns["response_length"], np.diff(FOUR.offsets))
    assert [list(tokens) for _, _, tokens in samples_of(seen, tokens=True)][:2] == [[5, 6, 2], [13, 2]]


def test_rows_show_the_pictures_of_their_prompts() -> None:
    tokenizer = load_tokenizer(tokenizer="characters:0*|!123456789>", path="")
    reader = TinyReader(TinyOptions(), None, tokenizer)
    found = {name: FoundPicture(reader=reader, reference=name) for name in ("1x1:3", "2x1:4")}
    prompts = [
        Prompt(index=0, text="1*>", answer="", pictures=(found["2x1:4"],)),
        Prompt(index=1, text="2>", answer=""),
        Prompt(index=2, text="**>", answer="", pictures=(found["1x1:3"], found["2x1:4"])),
    ]
    sampler = prompt_sampler(tokenizer=tokenizer, pictures=reader, generate=None, seed=0)
    request = sampler.request(prompts, rollout_step=0, samples=2, params=PARAMS)
    first, second = "2x1:4", "1x1:3"
    assert [repr(each) for each in request.pictures] == [repr(found[first]), repr(found[second])]
    assert [tokenizer.decode(row) for row in request.by_row()[::2]] == ["<bos>1**!>", "<bos>2>", "<bos>*!**!>"]
    assert "".join(map(str, request.picture)) == 2 * "001100" + 2 * "000" + 2 * "0201100"
    assert reader.decoded == {first: 1, second: 1}

    batch = assemble(request, generation_of([[token] for token in range(4, 10)]))
    assert batch.pictures == request.pictures
    assert "".join(map(str, batch.columns["picture"])) == 2 * "0011000" + 2 * "0000" + 2 * "02011000"
    assert {repr(each) for each in batch.take_rows(np.array([4])).pictures} == {repr(each) for each in found.values()}
    assert batch.take_rows(np.array([2])).pictures == ()


def step_of(prompts: list[Prompt], reader: TinyReader | None) -> tuple[Rollout, int]:
    """The samples of 8 tokens of a step as the driver makes, scores, shows and packs them; and the most bytes that
    Python and numpy held meanwhile."""

    async def generate(request: GenerateRequest, **_: Any) -> Generation:
        return generation_of([[12] * 8] * len(request))

    tokenizer = load_tokenizer(tokenizer="characters:0*|!123456789>", path="")
    sampler = prompt_sampler(tokenizer=tokenizer, pictures=reader, generate=generate, seed=0)
    check = PromptCheck(tokenizer=tokenizer, pictures=reader)
    gc.collect()
    tracemalloc.start()
    try:
        assert not any(map(check, prompts))
        rollout = sample(sampler, prompts, samples=8)
        rollout = Rollout.concatenate([rollout.take_prompts(np.arange(32)), rollout.take_prompts(np.arange(32, 64))])
        shown(rollout, np.zeros(512, np.float32))
        return rollout, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_step_holds_each_large_picture_once() -> None:
    reader = TinyReader(TinyOptions(patch=32), None, load_tokenizer(tokenizer="characters:0*|!123456789>", path=""))
    names = [f"1312x736:{shade}" for shade in range(64)]  # 1080p at the size of usual models: 943 tokens, 2.9 MB
    prompts = [
        Prompt(index=place, text="1*>", answer="", pictures=(FoundPicture(reader=reader, reference=name),))
        for place, name in enumerate(names)
    ]
    rollout, most = step_of(prompts, reader)
    length = int(rollout.batch.row_columns["prompt_length"][0])
    texts = [Prompt(index=place, text="1" * (length - 1), answer="") for place in range(64)]
    _, of_text = step_of(texts, None)
    assert reader.decoded == dict.fromkeys(names, 1)
    assert len(rollout.batch) == 512 and len(rollout.batch.pictures) == 64
    assert 64 * 2.8e6 < most - of_text < 0.5e9


def test_a_reward_process_gets_each_picture_of_its_samples_once() -> None:
    reader = TinyReader(TinyOptions(patch=32), None, load_tokenizer(tokenizer="characters:0*|!123456789>", path=""))
    pictures = [FoundPicture(reader=reader, reference=f"1312x736:{shade}") for shade in (3, 9)]
    prompts = [Prompt(index=place, text="*>", answer="", pictures=(each,)) for place, each in enumerate(pictures)]
    sent = pickle.dumps([(prompt, "1", ()) for prompt in prompts for _ in range(16)])
    assert len(sent) < 2.1 * 1312 * 736 * 3
    received = pickle.loads(sent)
    assert [prompt.pictures[0].id for prompt, _, _ in received[::16]] == [each.id for each in pictures]
    assert (
        received[16][0].pictures[0].pixels[5, 7].tolist() == [9, 9, 9] and received[16][0].pictures[0].size[0] == 1312
    )
