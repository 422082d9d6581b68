"""multiplayer_rl.twenty_questions: a policy is trained in games against the model that it began as."""

from __future__ import annotations

from pathlib import Path

import pytest

from plugins.tinker.tests.recipes.conftest import SERVER, Serving, begin
from plugins.tinker.tests.recipes.test_rewards import REWARD
from plugins.tinker.tests.recipes.workplace import MODEL, Turns, teach, tokenizer_of, untaught

ANSWERER = "Qwen/Qwen3.5-9B"  # the recipe knows no other name of it
# With which the recipe begins a player's prompt, and the words of its first games.
PLAYER = (
    "You are the player in a game of 20 questions. You will ask a series of yes/no questions to the answerer. You will "
    "win if you can guess the answer in 20 questions or less. You will lose if you ask more than 20 questions. To "
    "guess the answer, write a line of the form 'Guess: <answer>' (without the angle brackets). The answer is always a "
    "single word -- don't use articles like 'a' or 'the'. Your questions should be one line, and less than 20 words."
)
WORDS = ("garden", "park", "orange", "zucchini", "parent", "ladder", "hotel", "coat", "table", "watch", "fire", "egg")


def games() -> list[Turns]:
    """Games in which a word is guessed, after up to 4 others."""
    return [
        [
            ("System", PLAYER),
            *(turn for other in range(before) for turn in (("Player", f"Guess: {WORDS[other]}"), ("User", "no"))),
            ("Assistant", f"Guess: {word}"),
        ]
        for before in (0, 1, 2, 4)
        for word in WORDS
    ]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("games")
    tokenizer = tokenizer_of([text for turns in games() for _, text in turns])
    tokenizer.add_tokens(["<think>", "</think>"])  # which the chat format of the answerer has as one token each
    model = untaught(tokenizer)
    teach(model, tokenizer, games(), steps=150)
    model.save_pretrained(directory / MODEL)
    for name in (MODEL, ANSWERER):
        tokenizer.save_pretrained(directory / name)
    (directory / "server.toml").write_text(SERVER)
    return directory


def test_a_policy_learns_in_games_against_what_it_was(workplace: Path) -> None:
    overrides = ("lora.rank=32", "weights.lora=adapter", f'serve.aliases=["{ANSWERER}"]')
    with Serving(workplace, *overrides) as serving:
        steps = begin(
            serving,
            "questions",
            "multiplayer_rl.twenty_questions.train renderer_name=role_colon learning_rate=1e-3 group_size=4 "
            "batch_size=4 max_tokens=12 num_epochs=1 max_steps=3 eval_every=0 save_every=0",
        ).finish(REWARD)
    assert len(steps) == 3 and max(step[REWARD] for step in steps) > 0
    # What was sampled in between of the answerer's weights has changed nothing: these are the player's own.
    assert max(abs(step["optim/kl_sample_train_v2"]) for step in steps) < 1e-5
