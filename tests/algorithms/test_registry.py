import gc
import math
import sys
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve

from corerl.algorithms.losses import LossInputs, LossResult
from corerl.algorithms.registry import policy_loss, resolve_loss, users_estimate, users_postprocess
from corerl.errors import ConfigError, DataError
from corerl.types import LossSpec
from tests.marked import marked


def reinforce(inputs: LossInputs, *, entropy_coef: float = 0.0, offset: float) -> LossResult:
    return LossResult((inputs.columns["weights"] * -inputs.logprobs).sum() + offset)


def bare(inputs: LossInputs) -> LossResult:
    return LossResult(inputs.logprobs.sum())


def anything(inputs: LossInputs, **params: float) -> LossResult:
    return LossResult(inputs.logprobs.sum() * params["clip_low"])


def of_three(logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    return logprobs


def without_inputs(*, clip_low: float) -> LossResult:
    return LossResult(torch.tensor(clip_low))


@pytest.fixture(autouse=True)
def my_losses() -> Iterator[None]:
    """A user's module of losses, importable by name."""
    module = ModuleType("my_losses")
    for function in (reinforce, bare, anything, of_three, without_inputs):
        setattr(module, function.__name__, function)
    sys.modules["my_losses"] = module
    yield
    del sys.modules["my_losses"]


def spec_of(loss: str, *, kl_coef: float = 0.0, entropy_coef: float = 0.0) -> LossSpec:
    own = LossSpec(name="clipped", params={"clip_low": 0.2, "clip_high": 0.3})
    return policy_loss(own, loss=loss, entropy_coef=entropy_coef, kl_coef=kl_coef, kl_estimator="k2")


def test_losses_of_earlier_coefficients_are_not_kept() -> None:
    first = weakref.ref(resolve_loss(LossSpec(name="clipped", params={"kl_coef": 2.0})))
    for step in range(200):
        resolve_loss(LossSpec(name="clipped", params={"kl_coef": 3.0 + step}))
    gc.collect()
    assert first() is None


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        (
            "cliped",
            {},
            "unknown loss 'cliped'; known: clipped, value, weighted_logprobs, or 'module:function'; did you mean 'cli",
        ),
        ("no_such_module:f", {}, "cannot import 'no_such_module': ModuleNotFoundError"),
        ("my_losses:reinforced", {}, "has no function 'reinforced'; did you mean 'reinforce'?"),
        ("value", {"value_clpi": 0.1}, "^loss 'value' takes .* got an unexpected keyword argument 'value_clpi'$"),
        ("my_losses:reinforce", {"entropy_coef": 0.1}, "with the options entropy_coef: missing .* 'offset'$"),
        ("my_losses:of_three", {}, r"takes \(logprobs: .*, but is called as f\(inputs: .*: missing .* 'old_logprobs'$"),
        (
            "my_losses:without_inputs",
            {"clip_low": 0.1},
            r"takes \(\*, clip_low: float\) .*: too many positional arguments$",
        ),
    ],
)
def test_what_cannot_be_resolved_is_named(name: str, params: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_loss(LossSpec(name=name, params=params))


def test_a_users_loss_gets_the_fields_that_it_takes() -> None:
    assert spec_of("my_losses:bare").params == {}
    assert set(spec_of("my_losses:anything").params) == {
        "clip_low",
        "clip_high",
        "entropy_coef",
        "kl_coef",
        "kl_estimator",
    }


def test_a_coefficient_that_the_loss_would_leave_out_is_refused() -> None:
    with pytest.raises(ConfigError, match="algorithm.kl_coef=0.1, but loss 'my_losses:bare' has no such parameter"):
        spec_of("my_losses:bare", kl_coef=0.1)


# ---- the user's functions of a whole batch ---------------------------------------------------------------------------

REWARDS = np.array([1.0, 0.0], np.float32)
ZEROS = np.zeros(5, np.float32)
SAMPLES = marked(".x", ".xx", of_rows={"group": [0, 0]})


@pytest.fixture
def users(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A user's module, importable by name."""
    module = ModuleType("my_advantages")
    monkeypatch.setitem(sys.modules, "my_advantages", module)
    return module


def test_a_users_function_gives_advantages_of_samples_or_tokens(users: ModuleType) -> None:
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
def test_wrong_advantages_of_a_users_function_are_refused(
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
        (lambda samples: evolve(samples, row_columns={}), "returned samples without the column 'group'; keep it"),
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
