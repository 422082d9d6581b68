from __future__ import annotations

from pathlib import Path

import numpy as np

from corerl_testing.references import reference


def test_a_reference_is_computed_once_for_equal_arguments_and_anew_for_others() -> None:
    asked = []

    @reference
    def total(directory: Path, values: np.ndarray, *, scale: float = 1.0) -> float:
        asked.append((directory.name, scale))
        return scale * float(values.sum())

    for _ in range(2):
        assert total(Path("a"), np.arange(4)) == 6.0
        assert total(Path("b"), np.arange(4)) == 6.0
        assert total(Path("a"), np.arange(5)) == 10.0
        assert total(Path("a"), np.arange(4), scale=2.0) == 12.0
    assert asked == [("a", 1.0), ("b", 1.0), ("a", 1.0), ("a", 2.0)]
