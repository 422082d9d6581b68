"""A step of four samples, one of them an episode of two conversations, in characters."""

from __future__ import annotations

import numpy as np

from corerl.plugin import SampleShown
from corerl.types import TURN_REWARDS, SampleBatch

LETTERS = "abcdefgh"  # the texts of tokens 0 to 7; h ends answers
END = 7
ROWS = (  # tokens, of which the policy chose those in capitals; then the group, sample, episode
    ("abCDH", 0, 0, 0),
    ("abEFG", 0, 1, 1),  # cut off
    ("baCdeFH", 1, 0, 2),  # two turns
    ("baCabGH", 1, 0, 2),  # branches off after three tokens
    ("baAAH", 1, 1, 3),
)
TRUNCATED = (False, True, False, False, False)
FINAL = (True, True, False, True, True)
ENGINES = (0, 1, 0, 1, 1)  # of the row's tokens
SHAPED = (1.0, 0.0, 0.5, 0.5, 0.25)


def decode(tokens: list[int]) -> str:
    return "".join(LETTERS[token] for token in tokens)


def batch() -> SampleBatch:
    text = "".join(row[0] for row in ROWS)
    mask = np.array([letter.isupper() for letter in text])
    size = len(text)
    engine = np.where(mask, -0.1 * np.arange(1, size + 1), 0.0).astype(np.float32)
    trainer = np.where(mask, engine + 0.01 * np.arange(size), 0.0).astype(np.float32)
    turn_rewards = np.zeros(size, np.float32)
    turn_rewards[12] = 0.5  # the first turn of the episode's first conversation
    group, sample, episode = (np.array([row[at] for row in ROWS]) for at in (1, 2, 3))
    return SampleBatch(
        tokens=np.array([LETTERS.index(letter.lower()) for letter in text]),
        offsets=np.cumsum([0, *(len(row[0]) for row in ROWS)]),
        columns={
            "loss_mask": mask,
            "rollout_logprobs": engine,
            "old_logprobs": trainer,
            "versions": np.where(mask, np.arange(size) // 10, 0),
            "engines": np.where(mask, np.repeat(ENGINES, [len(row[0]) for row in ROWS]), 0).astype(np.int16),
            "advantages": np.where(mask, 1.5, 0.0).astype(np.float32),
            TURN_REWARDS: turn_rewards,
        },
        row_columns={
            "group": group,
            "sample": sample,
            "episode": episode,
            "truncated": np.array(TRUNCATED),
            "final": np.array(FINAL),
            "shaped_rewards": np.array(SHAPED, np.float32),
            "prompt_length": np.array([2, 2, 2, 2, 2]),
            "response_length": np.array([sum(map(str.isupper, row[0])) for row in ROWS]),
        },
    )


def shown() -> list[SampleShown]:
    return [
        SampleShown(
            prompt=f"prompt {number}", response=f"text {number}", answer="", reward=number / 4, parts={"form": 0.5}
        )
        for number in range(4)
    ]
