from __future__ import annotations

import math
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from corerl.algorithms.functions import users_estimate, users_postprocess
from corerl.errors import DataError
from corerl.types import SampleBatch

REWARDS = np.array([1.0, 0.0], np.float32)
ZEROS = np.zeros(5, np.float32)
SAMPLES = SampleBatch(  # two of one prompt: a token of prompt, then one and two of response
    tokens=np.arange(5),
    offsets=np.array([0, 2, 5]),
    columns={"loss_mask": np.array([False, True, False, True, True])},
    rows={"group": np.array([0, 0])},
)


@pytest.fixture
def users(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A user's module, importable by name."""
    module = ModuleType("my_advantages")
    monkeypatch.setitem(sys.modules, "my_advantages", module)
    return module


def test_a_function_of_the_user_may_give_advantages_of_samples_or_of_tokens(users: ModuleType) -> None:
    def found(token_rewards: Any = ZEROS) -> list[float]:
        estimated = users_estimate("my_advantages:mine")(SAMPLES, REWARDS, token_rewards)
        return list(estimated.advantages.tolist())

    users.mine = lambda samples, rewards, token_rewards: 2 * rewards  # type: ignore[attr-defined]
    assert found() == [0.0, 2.0, 0.0, 0.0, 0.0]
    users.mine = lambda samples, rewards, token_rewards: np.arange(5)  # type: ignore[attr-defined]
    assert found() == [0.0, 1.0, 0.0, 3.0, 4.0]
    users.mine = lambda samples, rewards, token_rewards: token_rewards  # type: ignore[attr-defined]
    assert found(np.array([9.0, -0.5, 9.0, 0.0, 0.125], np.float32)) == [0.0, -0.5, 0.0, 0.0, 0.125]


@pytest.mark.parametrize(
    ("function", "line"),
    [
        (
            lambda *_: [1.0],
            r"returned an array of shape \[1\], wanted \[2\], a number of each sample, or \[5\], of each",
        ),
        (lambda *_: [1.0, math.inf], "returned advantages that are not finite"),
        (lambda *_: {}["no"], "raised KeyError: 'no'"),
        (lambda *_: "none", "raised ValueError: could not convert string to float"),
    ],
)
def test_what_a_function_of_the_user_may_not_return_is_told(
    users: ModuleType, function: Callable[..., Any], line: str
) -> None:
    users.mine = function  # type: ignore[attr-defined]
    with pytest.raises(DataError, match=f"^algorithm.advantages: 'my_advantages:mine' {line}"):
        users_estimate("my_advantages:mine")(SAMPLES, REWARDS, ZEROS)


@pytest.mark.parametrize(
    ("function", "line"),
    [
        (lambda samples: None, "returned None, wanted a corerl.types.SampleBatch"),
        (lambda samples: [samples], "returned a list, wanted a corerl.types.SampleBatch"),
        (lambda samples: 1 / 0, "raised ZeroDivisionError: division by zero"),
        (
            lambda samples: evolve(samples, columns={"loss_mask": samples.columns["loss_mask"]}),
            "returned samples without the column 'advantages'; keep it",
        ),
        (
            lambda samples: samples.with_columns(loss_mask=np.zeros(5, np.bool_)),
            "returned samples without a loss token; keep some",
        ),
        (
            lambda samples: samples.with_columns(advantages=np.full(5, np.nan, np.float32)),
            "returned advantages that are not finite",
        ),
    ],
)
def test_samples_that_could_not_be_trained_on_are_told(
    users: ModuleType, function: Callable[..., Any], line: str
) -> None:
    users.mine = function  # type: ignore[attr-defined]
    with pytest.raises(DataError, match=f"^algorithm.postprocess: 'my_advantages:mine' {line}"):
        users_postprocess("my_advantages:mine")(SAMPLES.with_columns(advantages=ZEROS))
