import math
from collections.abc import Callable

import pytest

from corerl.config.schema import DataSource, RewardConfig, RewardFunction


@pytest.mark.parametrize(
    "make",
    [
        lambda value: DataSource(source="a.jsonl", weight=value),
        lambda value: RewardFunction(name="exact-match", weight=-value),
        lambda value: RewardConfig(weights={"right": value}),
        lambda value: RewardConfig(timeout=value),
    ],
)
def test_a_number_that_no_float_can_be_is_not_finite(make: Callable[[float], object]) -> None:
    for value, shown in ((10**400, "-?1[0]{115,116}"), (10**5000, "int that is too large"), (math.inf, "-?inf")):
        with pytest.raises(ValueError, match=rf"must be finite, got ('right' = )?{shown}"):
            make(value)
