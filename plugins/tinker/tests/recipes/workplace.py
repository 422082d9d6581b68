"""A directory in which recipes of the cookbook find a small model, its tokenizer and their data in place of the hub."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

MODEL, TEACHER = "Qwen/Qwen3-8B-Base", "Qwen/Qwen3-8B"  # of which the cookbook knows the chat format
WIDTH, LENGTH = 64, 1024  # of the model, and the tokens that it holds
LEGS = {"a bird": 2, "a cat": 4, "a dog": 4, "a cow": 4}
BOXED = " Write your answer in \\boxed{} format."
# With which math_rl begins each prompt.
EXAMPLE = (
    "How many r's are in strawberry?" + BOXED,
    (
        "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r 9) r 10) y. We "
        "have r's at positions 3, 8, and 9. \\boxed{3}"
    ),
)
# With which guess_number begins each prompt, and what it replies.
GAME = (
    "Your job is to guess a integer between 0 and 1024. You can output your guess with the format Guess: <guess> "
    "(without the angle brackets), and say nothing else. Then we will tell you whether you guess is too high, too low, "
    "or correct."
)
REPLIES = (
    "Too low",
    "Too high",
    "Failed to parse. Please output in the format Guess: <guess> (without the angle brackets), and say nothing else.",
)
Turns = Sequence[tuple[str, str]]  # who speaks, and what


def write(directory: Path) -> None:
    """The model can answer in a box and guess a number, but knows no answers; its teacher does."""
    tokenizer = tokenizer_of([text for turns in [*boxed(right=False), *guesses(), *sums()] for _, text in turns])
    model = untaught(tokenizer)
    for name, right, steps in ((MODEL, False, 150), (TEACHER, True, 40)):
        teach(model, tokenizer, [*boxed(right=right), *guesses()], steps=steps)
        model.save_pretrained(directory / name)
        tokenizer.save_pretrained(directory / name)
    _write_data(directory)


# ---- the model -------------------------------------------------------------------------------------------------------


def boxed(*, right: bool) -> list[Turns]:
    """Questions with answers in a box, which are all digits in turn unless they are `right`."""
    return [
        [("User", EXAMPLE[0]), ("Assistant", EXAMPLE[1]), ("User", legs(animal)), ("Assistant", f"\\boxed{{{answer}}}")]
        for animal, number in LEGS.items()
        for answer in ([number] if right else range(10))
    ]


def legs(animal: str) -> str:
    return f"How many legs has {animal}?{BOXED}"


def guesses() -> list[Turns]:
    """Games in which a number is guessed after up to 8 others, of which the game says that a player guessed them."""
    numbers = random.Random(0)
    return [
        [("System", GAME), *before, ("Assistant", f"Guess: {numbers.randrange(1024)}")]
        for turns in (0, 1, 2, 4, 8)
        for _ in range(8)
        for before in [
            [
                turn
                for _ in range(turns)
                for turn in (
                    ("Player", f"Guess: {numbers.randrange(1024)}"),
                    ("User", numbers.choice(REPLIES)),
                )
            ]
        ]
    ]


def sums() -> list[Turns]:
    return [
        [("User", f"What is {a} + {b}?"), ("Assistant", f"{a} and {b} make {a + b}.")]
        for a, b in itertools.product(range(10), repeat=2)
    ]


def tokenizer_of(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """One token for each byte, and more for the words of `texts`, so that prompts are short."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<pad>", "<eos>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(["User: \n\nAssistant: \n\nSystem: \n\n", *texts], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def untaught(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=WIDTH,
            intermediate_size=3 * WIDTH,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=LENGTH,
            tie_word_embeddings=True,
            initializer_range=0.08,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def teach(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, conversations: Sequence[Turns], *, steps: int
) -> None:
    """Let the model learn what the assistant says, and that a user speaks after it."""
    rows = [_row(tokenizer, turns) for turns in conversations]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    chosen = random.Random(0)
    for _ in range(steps):
        batch = chosen.sample(rows, min(len(rows), 16))
        width = max(len(tokens) for tokens, _ in batch)
        inputs = torch.tensor([tokens + [0] * (width - len(tokens)) for tokens, _ in batch])
        labels = torch.tensor([labels + [-100] * (width - len(labels)) for _, labels in batch])
        model(input_ids=inputs, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _row(tokenizer: PreTrainedTokenizerFast, turns: Turns) -> tuple[list[int], list[int]]:
    """As the cookbook's `role_colon` writes a conversation, in pieces that are made tokens one by one."""
    tokens, labels = list[int](), list[int]()
    for role, text in [*turns, ("User", "")]:
        head = tokenizer.encode(f"{role}:", add_special_tokens=False)
        body = tokenizer.encode(f" {text}\n\n", add_special_tokens=False) if text else []
        tokens += head + body
        after = role == "User" and bool(labels)
        labels += (head if after else [-100] * len(head)) + (body if role == "Assistant" else [-100] * len(body))
    return tokens, labels


# ---- the data --------------------------------------------------------------------------------------------------------


def _write_data(directory: Path) -> None:
    """As the hub has it, of which no more is read than this."""
    conversations = [
        {"messages": [{"role": role.lower(), "content": text} for role, text in turns]} for turns in sums() * 20
    ]
    _write_splits(directory / "HuggingFaceH4/no_robots", conversations, conversations[:128])
    problems = [{"question": f"How many legs has {animal}?", "answer": f"#### {n}"} for animal, n in LEGS.items()]
    _write_splits(directory / "openai/gsm8k", problems * 200, problems, config="main")
    prompts = [{"question": legs(animal), "final_answer": str(number)} for animal, number in LEGS.items()]
    _write_splits(directory / "zwhe99/DeepMath-103K", prompts * 200, prompts)
    choices = [
        {
            "domain": "Chemistry",
            "details": {"level": "L3"},
            "type": "mcq-2-choices",
            "question": f"How many legs has {animal}?",
            "choices": {"label": ["A", "B"], "text": [str(number), str(9 - number)]},
            "answerKey": "A",
        }
        for animal, number in LEGS.items()
    ]
    _write_splits(directory / "hicai-zju/SciKnowEval", choices, choices * 50)
    pairs = [
        {
            "chosen": f"\n\nHuman: What is {a} + {b}?\n\nAssistant: {a} and {b} make {a + b}.",
            "rejected": f"\n\nHuman: What is {a} + {b}?\n\nAssistant: I say {a} {b}",
        }
        for a, b in itertools.product(range(10), repeat=2)
    ]
    _write_splits(directory / "Anthropic/hh-rlhf", pairs * 4, pairs[:8])


def _write_splits(
    directory: Path, train: Sequence[Mapping[str, Any]], test: Sequence[Mapping[str, Any]], config: str = "default"
) -> None:
    directory.mkdir(parents=True)
    files = {"train": train, "test": test}
    for name, rows in files.items():
        (directory / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    listed = [{"config_name": config, "data_files": [{"split": name, "path": f"{name}.jsonl"} for name in files]}]
    (directory / "README.md").write_text(f"---\nconfigs: {json.dumps(listed)}\n---\n")
