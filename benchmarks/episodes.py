"""Measure what episodes cost the driver when clients ask by HTTP, with and without a stream: requests a second, CPU
seconds, the longest wait of the event loop, and memory over many episodes.

python -m benchmarks.episodes                          # 4,000 episodes of each kind in each round, 1,000 at a time
python -m benchmarks.episodes --size 20000 --rounds 1  # memory over 20,000 episodes
python -m benchmarks.episodes --tokens 200             # answers that are longer than one part of a stream

The engine answers at once. The clients, as small as they can be, are in a worker process (`samplers.episodes.workers`):
one core has the driver and another one the clients. Both kinds of episodes get the same tokens.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from benchmarks.report import Comparison, Number, Report, arguments, finish, in_turns
from corerl.data import Prompt
from corerl.engines import GenerateRequest, Generation, SamplingParams
from corerl.models import load_tokenizer
from corerl.rollout import EventLoop, SamplerContext
from corerl_agents import EpisodesConfig
from corerl_agents.sampler import EpisodeSampler

TURNS, SAMPLES, CALLS = 4, 8, 64
TICK = 0.01  # seconds between two looks at whether the event loop waits
TOKENIZER = load_tokenizer(tokenizer="characters:0123456789>s", path="")
ONE, END = TOKENIZER.encode("1")[-1], TOKENIZER.eos_token_id
TOOL = {"role": "tool", "content": "9>"}


# ---- the clients, in the worker --------------------------------------------------------------------------------------


async def play(episode: Any, *, stream: bool) -> float:
    """Four turns over one connection."""
    url = urlsplit(episode.base_url)
    reader, writer = await asyncio.open_connection(url.hostname, url.port, limit=2**20)
    messages = episode.messages
    try:
        for _ in range(TURNS):
            body = json.dumps({"model": episode.model, "messages": messages, "stream": stream}).encode()
            head = f"POST {url.path}/chat/completions HTTP/1.1\r\nhost: {url.netloc}\r\ncontent-length: {len(body)}"
            writer.write(f"{head}\r\n\r\n".encode() + body)
            content = await read_body(reader)
            messages += [{"role": "assistant", "content": said(content, stream=stream)}, TOOL]
    finally:
        writer.close()
    return 1.0


async def read_body(reader: asyncio.StreamReader) -> bytes:
    """The body of an answer, with a length or in chunks."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    if not head.startswith(b"http/1.1 200"):
        raise ValueError(head.decode())
    if (at := head.find(b"content-length:")) >= 0:
        return await reader.readexactly(int(head[at + 15 :].split(b"\r\n", 1)[0]))
    parts = []
    while length := int(await reader.readuntil(b"\r\n"), 16):
        parts.append((await reader.readexactly(length + 2))[:-2])
    await reader.readexactly(2)
    return b"".join(parts)


def said(content: bytes, *, stream: bool) -> str:
    if not stream:
        return str(json.loads(content)["choices"][0]["message"]["content"])
    events = [line[6:] for line in content.split(b"\n\n") if line.startswith(b"data: {")]
    return "".join(json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events)


# ---- the driver ------------------------------------------------------------------------------------------------------


class Engine:
    """Answers with so many tokens at once, the last of which is an end."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self.calls = 0

    async def generate(self, request: GenerateRequest, **_: Any) -> Generation:
        self.calls += 1
        rest = self._tokens - request.answered
        lengths = np.minimum(rest, request.left)
        tokens = np.full(int(lengths.sum()), ONE)
        tokens[(np.cumsum(lengths) - 1)[lengths == rest]] = END
        return Generation(
            tokens=tokens,
            offsets=np.concatenate([[0], np.cumsum(lengths)]),
            logprobs=np.zeros(len(tokens), np.float32),
            versions=np.zeros(len(tokens), np.int64),
            truncated=lengths < rest,
        )


class Side:
    """Plays all episodes, with or without streams, each time that it is called."""

    def __init__(self, *, stream: bool, size: int, concurrency: int, tokens: int) -> None:
        self.stream, self._size = stream, size
        self._concurrency = min(concurrency, size)
        self.requests = size * TURNS
        self.cpu: list[float] = []  # seconds of the driver
        self.waits: list[float] = []  # seconds
        self.memory: list[float] = []  # MiB, after each batch of as many episodes as play at once
        self.digest = ""
        self._engine, self._loop = Engine(tokens), EventLoop("rollout")
        self._params = SamplingParams(max_tokens=TURNS * (tokens + 4), stop_tokens=(END,))
        at_once, function = self._concurrency, "benchmarks.episodes:play"
        config = EpisodesConfig(
            function=function, options={"stream": stream}, workers=1, concurrency=at_once, timeout=120.0
        )
        generate = self._engine.generate
        context = SamplerContext(
            tokenizer=TOKENIZER, generate=generate, loop=self._loop, seed=0, params=self._params, calls=CALLS
        )
        self._sampler = EpisodeSampler(config, context)
        self._loop.run(self._batch(step=-1, count=SAMPLES))  # starts the worker

    def __call__(self, _: int = 0) -> float:
        gc.collect()
        gc.freeze()  # as `corerl train` does behind its imports
        began, used = time.perf_counter(), time.process_time()
        self._loop.run(self._batches())
        self.cpu.append(time.process_time() - used)
        return time.perf_counter() - began

    async def _batches(self) -> None:
        watching = asyncio.create_task(self._watch())
        digest = hashlib.sha256()
        for step in range(self._size // self._concurrency):
            digest.update(await self._batch(step=step, count=self._concurrency))
            self.memory.append(resident())
        watching.cancel()
        self.digest = digest.hexdigest()

    async def _batch(self, *, step: int, count: int) -> bytes:
        """Play so many episodes; returns their tokens."""
        prompts = [Prompt(index=index, text="21>", answer="12") for index in range(count // SAMPLES)]
        rollout = await self._sampler.sample(prompts, rollout_step=step + 1, samples=SAMPLES, params=self._params)
        if failed := next((outcome for outcome in rollout.outcomes if outcome != 1.0), None):
            raise SystemExit(f"an episode failed: {failed}")
        return rollout.batch.tokens.tobytes()

    async def _watch(self) -> None:
        """Note the longest wait of the event loop."""
        longest = 0.0
        try:
            while True:
                began = time.perf_counter()
                await asyncio.sleep(TICK)
                longest = max(longest, time.perf_counter() - began - TICK)
        finally:
            self.waits.append(longest)

    def close(self) -> None:
        self._sampler.close()
        self._loop.close()


def resident() -> float:
    """MiB of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def measure(*, rounds: int, size: int, concurrency: int, tokens: int) -> Report:
    options: Mapping[str, int] = {"size": size, "concurrency": concurrency, "tokens": tokens}
    streamed, whole = Side(stream=True, **options), Side(stream=False, **options)
    try:
        seconds, others = in_turns(rounds, streamed, whole)
    finally:
        streamed.close()
        whole.close()
    if streamed.digest != whole.digest:
        raise SystemExit("streamed episodes have other tokens than whole ones")
    numbers = []
    for name, side, took in (("streamed", streamed, seconds), ("whole", whole, others)):
        quarter = max(1, len(side.memory) // 4)
        grown = side.memory[-1] - side.memory[quarter - 1]
        rows: Mapping[tuple[str, str], Sequence[float]] = {
            ("requests", "a second"): [side.requests / each for each in took],
            ("the driver's CPU", "ms"): [1e3 * each / side.requests for each in side.cpu],
            ("the event loop's longest wait", "s"): side.waits,
            ("memory at the end", "MiB"): side.memory[-1:],
            ("what it grew by in the last three quarters", "MiB"): [grown],
        }
        numbers += [Number(what=f"{name}: {what}", values=each, unit=unit) for (what, unit), each in rows.items()]
    return Report(
        name="episodes",
        size=f"{size} episodes of {TURNS} turns, {concurrency} at a time, answers of {tokens} tokens",
        comparisons=[Comparison(what="streamed", against="whole", ours=seconds, other=others, target=1.0)],
        numbers=numbers,
        note="Clients in one worker process, one connection for each episode. CPU is of the driver, for a request.",
    )


if __name__ == "__main__":
    command = arguments(__doc__, rounds=3, tiny=False)
    command.add_argument("--size", type=int, default=4000, help="episodes of each kind in a round (default: 4000)")
    command.add_argument("--concurrency", type=int, default=1000, help="episodes at a time (default: 1000)")
    command.add_argument("--tokens", type=int, default=3, help="of an answer, its end included (default: 3)")
    args = command.parse_args()
    found = measure(rounds=args.rounds, size=args.size, concurrency=args.concurrency, tokens=args.tokens)
    finish(found, args.output)
