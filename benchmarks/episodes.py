"""Measure what an episode costs the driver: `episode.chat` through server, runner and sampler, with engines that answer
at once, against the same conversations encoded in a loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.report import Comparison, Number, Report, finish, in_turns, parser
from corerl.config.schema import EpisodesConfig
from corerl.data.prompts import Prompt
from corerl.engines.base import GenerateRequest, Generation, SamplingParams
from corerl.event_loop import EventLoop
from corerl.models.tokenizer import load_tokenizer
from corerl.rollout.agents.chat_server import ChatServer
from corerl.rollout.agents.conversation import Conversation, Renderer
from corerl.rollout.agents.episodes import Episode, EpisodeFunction
from corerl.rollout.agents.sampler import EpisodeSampler

TURNS, SAMPLES, CALLS = 4, 8, 64
TOKENIZER = load_tokenizer(tokenizer="characters:0123456789>s", path="")
PARAMS = SamplingParams(max_tokens=100, stop_tokens=(2,))
TOOL = {"role": "tool", "content": "9>"}


def answers(request: GenerateRequest) -> Generation:
    """12 and an end, to each row."""
    rows = len(request)
    return Generation(
        tokens=np.tile(np.array([5, 6, 2]), rows),
        offsets=np.arange(rows + 1) * 3,
        logprobs=np.zeros(3 * rows, np.float32),
        versions=np.zeros(3 * rows, np.int64),
        truncated=np.zeros(rows, np.bool_),
    )


def play(episode: Episode) -> float:
    messages = episode.messages
    for _ in range(TURNS):
        messages += [episode.chat(messages)["message"], TOOL]
    return 1.0


def encode(prompt: Prompt) -> Conversation:
    """What each turn of an episode has to compute."""
    renderer, conversation = Renderer(TOKENIZER), Conversation()
    messages: list[Any] = [{"role": "user", "content": prompt.text}]
    for _ in range(TURNS):
        asked = renderer.ask(conversation, messages)
        tokens = np.concatenate([conversation.tokens, asked.tokens])
        row = GenerateRequest(
            tokens=tokens, offsets=np.array([0, len(tokens)]), noise_keys=np.zeros(1, np.int64), params=PARAMS
        )
        drawn = answers(row)
        answer = renderer.answer(asked, drawn.tokens, PARAMS)
        conversation = conversation.answered(asked, answer, drawn)
        messages += [answer.message, TOOL]
    return conversation


def measure(*, rounds: int, size: int, concurrency: int) -> Report:
    loop = EventLoop("rollout")
    server = ChatServer(loop, temperature=1.0, top_p=1.0)
    prompts = [Prompt(index=index, text="21>", answer="12") for index in range(size // SAMPLES)]

    async def generate(request: GenerateRequest, **_: Any) -> Generation:
        return answers(request)

    sampler = EpisodeSampler(
        tokenizer=TOKENIZER,
        generate=generate,
        seed=0,
        function=EpisodeFunction(name="play", function=play),
        server=server,
        config=EpisodesConfig(concurrency=concurrency),
        calls=CALLS,
    )

    def ours() -> int:
        rollout = loop.run(sampler.sample(prompts, rollout_step=0, samples=SAMPLES, params=PARAMS))
        return len(rollout.batch.tokens)

    def alone() -> int:
        return sum(len(encode(prompt).tokens) for prompt in prompts for _ in range(SAMPLES))

    def timed(call: Callable[[], int]) -> float:
        began = time.perf_counter()
        call()
        return time.perf_counter() - began

    if ours() != alone():
        raise SystemExit("the episodes have other tokens than the conversations that are encoded alone")
    seconds, others = in_turns(rounds, lambda _: timed(ours), lambda _: timed(alone))
    server.close()
    loop.close()
    rates = [size / each for each in seconds]
    return Report(
        name="episodes",
        size=f"{size} episodes of {TURNS} turns, {concurrency} at a time",
        comparisons=[
            Comparison(what="episodes", against="their conversations, encoded alone", ours=seconds, other=others)
        ],
        numbers=[Number(what="episodes", values=rates, unit="a second")],
        note=(
            "Plain functions, each in a thread, ask by `episode.chat`. Both sides make the same tokens of the same "
            "messages; ours also checks requests, runs the functions and makes the batch."
        ),
    )


if __name__ == "__main__":
    command = parser(__doc__, rounds=5, size=2000, unit="episodes")
    command.add_argument("--concurrency", type=int, default=256, help="episodes at a time (default: 256)")
    args = command.parse_args()
    finish(measure(rounds=args.rounds, size=args.size, concurrency=args.concurrency), args.output)
