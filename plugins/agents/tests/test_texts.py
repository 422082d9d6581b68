import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from corerl.rollout import TAGS
from corerl_agents.answers import AnswerReader
from corerl_agents.texts import end_of_reasoning, split
from plugins.agents.tests.test_conversation import byte_level, metaspace


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "rest"),
    [
        ("<think>\nI add.\n</think>\n\nIt is 4.", "", "I add.", "It is 4."),
        ("I add.\n</think>\n\nIt is 4.", "<think>\n", "I add.", "It is 4."),
        ("I add.", "<think>\n", "I add.", ""),
        ("<think>I add.", "", "I add.", ""),
        ("It is 4. <think>really</think>", "", "", "It is 4. <think>really</think>"),
        ("It is </think>", "", "", "It is </think>"),
        ("", "<think>\n", "", ""),
        ("<think>I add.</think>4", "<think>\n", "I add.", "4"),
    ],
)
def test_reasoning_is_split_from_what_follows(text: str, opened: str, reasoning: str, rest: str) -> None:
    assert split(text, opened) == (reasoning, rest)


def test_every_tag_of_the_table_ends_reasoning() -> None:
    for opening, closing in TAGS.items():
        assert split(f"{opening}I add.{closing}It is 4.") == ("I add.", "It is 4."), opening
        assert end_of_reasoning(f"I add.{closing}4", opening) == len(f"I add.{closing}")


@pytest.mark.parametrize(
    ("tokenizer", "said", "texts"),
    [
        (byte_level(), "a \u00e9", ["a", " ", "\ufffd", "\ufffd"]),
        (metaspace("first"), "ab a", [" a", "b", " a"]),
    ],
)
def test_a_token_has_its_text_behind_others(tokenizer: PreTrainedTokenizerBase, said: str, texts: list[str]) -> None:
    reader, tokens = AnswerReader(tokenizer), tokenizer.encode(said, add_special_tokens=False)
    assert reader.texts(np.array([*tokens, 99_999])) == [*texts, ""]  # the last: the model's, not the tokenizer's
