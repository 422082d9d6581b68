"""Measure what an episode costs the driver: `episode.chat` and `chat_async` through server, runner and sampler, with
engines that answer at once, against the same conversations encoded in a loop."""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.report import Comparison, Number, Report, finish, in_turns, parser
from corerl.data.prompts import Prompt
from corerl.engines.base import GenerateRequest, Generation, SamplingParams
from corerl.event_loop import EventLoop
from corerl.models.tokenizer import load_tokenizer
from corerl.rollout.sampler import SamplerContext
from corerl_agents.chat_server import ChatServer
from corerl_agents.config import EpisodesConfig
from corerl_agents.conversation import Conversation, Renderer
from corerl_agents.episodes import Episode, EpisodeFunction
from corerl_agents.sampler import EpisodeSampler

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


async def play_async(episode: Episode) -> float:
    messages = episode.messages
    for _ in range(TURNS):
        messages += [(await episode.chat_async(messages))["message"], TOOL]
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
        sampled = answers(row)
        answer = renderer.answer(asked, sampled.tokens, PARAMS)
        conversation = conversation.answered(asked, answer, sampled)
        messages += [answer.message, TOOL]
    return conversation


class Side:
    """Plays all episodes, as often as it is called; `cpu` has the CPU seconds of each time."""

    def __init__(self, play: Callable[[], dict[str, Any]]) -> None:
        self._play = play
        self.cpu: list[float] = []
        self.digest = ""

    def __call__(self, _: int = 0) -> float:
        found = self._play()
        self.cpu.append(found["cpu"])
        self.digest = found["digest"]
        return float(found["seconds"])


def timed(tokens: Callable[[], Any]) -> dict[str, Any]:
    gc.freeze()  # as `corerl train` does behind its imports
    began, used = time.perf_counter(), time.process_time()
    found = tokens()
    seconds, cpu = time.perf_counter() - began, time.process_time() - used
    digest = hashlib.sha256(np.asarray(found, np.int64).tobytes()).hexdigest()
    return {"seconds": seconds, "cpu": cpu, "digest": digest}


def measure(*, rounds: int, size: int, concurrency: int) -> Report:
    loop = EventLoop("rollout")
    server = ChatServer(loop, temperature=1.0, top_p=1.0)
    prompts = [Prompt(index=index, text="21>", answer="12") for index in range(size // SAMPLES)]

    async def generate(request: GenerateRequest, **_: Any) -> Generation:
        return answers(request)

    def ours(function: Callable[[Episode], Any]) -> Side:
        sampler = EpisodeSampler(
            EpisodesConfig(concurrency=concurrency),
            SamplerContext(tokenizer=TOKENIZER, generate=generate, loop=loop, seed=0, params=PARAMS, calls=CALLS),
            function=EpisodeFunction(name="play", function=function),
            server=server,
        )

        def play() -> Any:
            return loop.run(sampler.sample(prompts, rollout_step=0, samples=SAMPLES, params=PARAMS)).batch.tokens

        return Side(lambda: timed(play))

    def alone() -> Any:
        return np.concatenate([encode(prompt).tokens for prompt in prompts for _ in range(SAMPLES)])

    kinds = {"plain functions": ours(play), "async functions": ours(play_async)}
    other = Side(lambda: timed(alone))
    name = "their conversations, encoded alone"
    comparisons, numbers = [], []
    for kind, side in kinds.items():
        side()  # what only the first ones pay
        side.cpu.clear()
        seconds, others = in_turns(rounds, side, other)
        if side.digest != other.digest:
            raise SystemExit(f"episodes of {kind} have other tokens than those of: {name}")
        comparisons.append(Comparison(what=f"episodes, {kind}", against=name, ours=seconds, other=others))
        for what, each, cpu in (
            (kind, seconds, side.cpu),
            (f"{name}, in turns with {kind}", others, other.cpu[-rounds:]),
        ):
            numbers.append(Number(what=f"episodes, {what}", values=[size / one for one in each], unit="a second"))
            numbers.append(Number(what="CPU of one of them", values=[1e3 * one / size for one in cpu], unit="ms"))
    server.close()
    loop.close()
    return Report(
        name="episodes",
        size=f"{size} episodes of {TURNS} turns, {concurrency} at a time",
        comparisons=comparisons,
        numbers=numbers,
        note=(
            "Plain functions, each in a thread, ask by `episode.chat`, async ones by `episode.chat_async`. Both sides "
            "make the same tokens of the same messages; ours also checks requests, runs the functions and makes the "
            "batch."
        ),
    )


if __name__ == "__main__":
    command = parser(__doc__, rounds=5, size=2000, unit="episodes")
    command.add_argument("--concurrency", type=int, default=256, help="episodes at a time (default: 256)")
    args = command.parse_args()
    finish(measure(rounds=args.rounds, size=args.size, concurrency=args.concurrency), args.output)
