"""The episodes of `benchmarks.episodes` on commit 04b8963, which had a thread and an HTTP request for each turn.

    PYTHONPATH=TREE python episodes_04b8963.py SIZE CONCURRENCY CALLS

TREE holds that commit. Prints seconds, CPU seconds of the process, and the tokens' number and hash.
"""

# mypy: ignore-errors
# (of another tree)

from __future__ import annotations

import gc
import hashlib
import json
import os
import sys
import time
from typing import Any

import numpy as np

from corerl.config.schema import EpisodesConfig
from corerl.data.prompts import Prompt
from corerl.models.tokenizer import load_tokenizer
from corerl.rollout.engine import GenerateRequest, Generation, SamplingParams
from corerl.rollout.episodes import EpisodeFunction
from corerl.rollout.front import Front
from corerl.rollout.play import EpisodeSampler

TURNS, SAMPLES = 4, 8


def answers(request: GenerateRequest) -> Generation:
    rows = len(request)
    return Generation(
        tokens=np.tile(np.array([5, 6, 2]), rows),
        offsets=np.arange(rows + 1) * 3,
        logprobs=np.zeros(3 * rows, np.float32),
        versions=np.zeros(3 * rows, np.int64),
        truncated=np.zeros(rows, np.bool_),
    )


def play(episode: Any) -> float:
    messages = episode.messages
    for _ in range(TURNS):
        messages += [episode.chat(messages)["message"], {"role": "tool", "content": "9>"}]
    return 1.0


def main(size: int, concurrency: int, calls: int) -> None:
    sampler = EpisodeSampler(
        tokenizer=load_tokenizer(tokenizer="characters:0123456789>s", path=""),
        generate=answers,
        seed=0,
        function=EpisodeFunction(name="play", function=play),
        front=Front(temperature=1.0, top_p=1.0),
        config=EpisodesConfig(concurrency=concurrency),
        aside=answers,
        calls=calls,
    )

    def sample(episodes: int) -> Any:
        prompts = [Prompt(index=index, text="21>", answer="12") for index in range(episodes // SAMPLES)]
        params = SamplingParams(max_tokens=100, stop_tokens=(2,))
        return sampler.sample(prompts, rollout_step=0, samples=SAMPLES, params=params)

    sample(min(size, concurrency))  # what only the first ones pay
    gc.freeze()  # as that commit's `corerl train` does behind its imports
    began, used = time.perf_counter(), time.process_time()
    tokens = sample(size).batch.tokens
    found = {"seconds": time.perf_counter() - began, "cpu": time.process_time() - used}
    digest = hashlib.sha256(np.asarray(tokens, np.int64).tobytes()).hexdigest()
    print(json.dumps({**found, "tokens": len(tokens), "digest": digest}), flush=True)
    os._exit(0)  # its server may hang at exit


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
