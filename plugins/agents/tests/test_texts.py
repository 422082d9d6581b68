import pytest

from corerl.rollout import TAGS
from corerl_agents.texts import end_of_reasoning, split


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
