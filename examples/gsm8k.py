"""A reward for GSM8K (Cobbe et al. 2021): is the last number of a response the last number of the worked answer?"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from corerl.data import Prompt

NUMBER = r"-?\$?\d[\d,]*(?:\.\d+)?|-?\$?\.\d+"
# Where a response says which of its numbers is meant; the last such place counts.
MARKED = re.compile(rf"(?:####|\\boxed\{{|[Tt]he answer is:?)\s*({NUMBER})")


def final_number(text: str) -> Decimal | None:
    """The number after the last `####`, `\\boxed{` or "The answer is", else the last number of all; None without any.

    Thousands separators and dollar signs are taken off.
    """
    found = MARKED.findall(text) or re.findall(NUMBER, text)
    if not found:
        return None
    try:
        return Decimal(found[-1].replace(",", "").replace("$", ""))
    except InvalidOperation:
        return None


def reward(prompt: Prompt, response: str, *, format_bonus: float = 0.1) -> float:
    """1 for the right number; else `format_bonus` where one was marked as the answer, so that there is something to
    learn from before the first right one; else 0. `prompt.answer` is a row's worked answer, `... #### 42`."""
    wanted = final_number(prompt.answer)
    if wanted is None:
        raise ValueError(f"the answer {prompt.answer!r} has no number; GSM8K's rows end in '#### 42'")
    if final_number(response) == wanted:
        return 1.0
    return format_bonus if MARKED.search(response) else 0.0
