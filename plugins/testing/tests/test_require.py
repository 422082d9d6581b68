"""What a comparison says that fails: what was compared, and both values where they first differ."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from corerl_testing.require import require_equal, require_near
from corerl_testing.tolerances import Tolerance

CLOSE = Tolerance(1e-3, 1e-6)


@pytest.mark.parametrize(
    ("found", "wanted", "said"),
    [
        (3, 2, "steps is 3, expected 2"),
        ("", "Unsupported", "steps is '', expected 'Unsupported'"),
        ([1.0, 2.0, 5.0], [1.0, 3.0, 4.0], "steps at 1 is 2.0, expected 3.0 (2 of 3 differ)"),
        ([1, 2], [1, 2, 3], "steps has 2 entries, 1, 2, expected 3, 1, 2, 3"),
        (["a", "b"], [], "steps is a, b, expected []"),
        ({"a": 1}, {"a": 1, "b": 2}, "steps lacks b"),
        (dict.fromkeys("abcdef"), {"a": None}, "steps has b, c, d and 2 more, which is not expected"),
        ({"c": 1}, {"a": 1}, "steps lacks a and has c, which is not expected"),
        ({"a": [1, 2]}, {"a": [1, 3]}, "steps of a at 1 is 2, expected 3 (1 of 2 differ)"),
    ],
)
def test_the_first_difference_is_told_with_both_values(found: Any, wanted: Any, said: str) -> None:
    require_equal("steps", wanted, wanted)
    with pytest.raises(AssertionError) as caught:
        require_equal("steps", found, wanted)
    assert str(caught.value) == said


@pytest.mark.parametrize(
    ("found", "wanted", "said"),
    [
        (1.1, 1.0, "the loss is 1.1, expected 1 within 0.001 of it or 1e-06"),
        (math.nan, 1.0, "the loss is nan, expected 1 within 0.001 of it or 1e-06"),
        ([1.0, 2.0, 3.5], [1.0, 2.1, 3.0], "the loss is 3.5 at 2, expected 3 within 0.001 of it or 1e-06"),
        (np.ones((2, 2)), np.ones(2), "the loss has shape (2, 2), expected (2,)"),
    ],
)
def test_the_entry_furthest_off_is_told_with_the_tolerance(found: Any, wanted: Any, said: str) -> None:
    require_near("the loss", np.asarray(wanted) * (1 + 5e-4), wanted, CLOSE)
    with pytest.raises(AssertionError) as caught:
        require_near("the loss", found, wanted, CLOSE)
    assert str(caught.value) == said
