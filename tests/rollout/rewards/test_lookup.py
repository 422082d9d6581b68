from types import ModuleType

import pytest
from attrs import evolve

from corerl.config.schema import RewardConfig, RewardFunction
from corerl.data.prompts import Prompt
from corerl.errors import ConfigError, RewardError
from corerl.rollout.rewards.base import Failure, Reward, Term, WeightedSum
from corerl.rollout.rewards.lookup import require_part, resolve_reward, reward_of

SORT = Prompt(index=35018, text="35018>", answer="01358")


@pytest.mark.parametrize(
    ("response", "position", "exact"),
    [("01358", 1.0, 1.0), ("01385", 3 / 5, 0.0), ("013", 3 / 5, 0.0), ("0135889", 5 / 7, 0.0), ("", 0.0, 0.0)],
)
def test_built_in_rewards_count_positions_and_exact_answers(response: str, position: float, exact: float) -> None:
    assert resolve_reward("position-match", {})(SORT, response) == pytest.approx(position)
    assert resolve_reward("exact-match", {})(SORT, response) == exact


def test_a_built_in_reward_refuses_a_prompt_without_an_answer() -> None:
    with pytest.raises(RewardError, match="has no answer to compare with"):
        resolve_reward("position-match", {})(Prompt(index=0, text="hello", answer=""), "x")


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("exact_match", "; built in: exact-match, position-match; did you mean 'exact-match'?"),
        ("rewards.correct", "installed; did you mean 'rewards:correct'?"),
        ("rewards.py", "installed; did you mean 'rewards:FUNCTION'?"),
        ("correct", "; write your own as 'module:function', where module.py is in the working directory or installed"),
    ],
)
def test_an_unknown_name_is_answered_with_what_is_wanted(name: str, end: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_reward(name, {})
    assert caught.value.message.startswith(f"reward.name: unknown reward {name!r}; ")
    assert caught.value.message.endswith(end)


def test_what_cannot_be_called_is_a_config_error(mine: ModuleType) -> None:
    mine.number = 3  # type: ignore[attr-defined]
    for name, options, text in [
        ("my_rewards:number", {}, "has no function"),
        ("exact-match", {"strict": True}, "'strict'"),
    ]:
        with pytest.raises(ConfigError, match=text):
            resolve_reward(name, options)


def swapped(response: str, prompt: Prompt) -> float:
    return 1.0


def by_name(*, prompt: Prompt, response: str) -> float:
    return 1.0


def one(prompt: Prompt) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (swapped, r"takes \(response: .* swap its first two parameters"),
        (by_name, "make its first two parameters positional"),
        (one, "make its first two parameters positional"),
    ],
)
def test_a_reward_with_a_wrong_signature_is_refused(mine: ModuleType, function: object, text: str) -> None:
    mine.reward = function  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=text):
        resolve_reward("my_rewards:reward", {})


def test_errors_of_several_functions_name_their_place(mine: ModuleType) -> None:
    mine.odd = lambda prompt, response: "x"  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"^reward.functions\[1\].name: unknown reward 'exact-mach'; built in"):
        reward_of(RewardConfig(functions=(RewardFunction(name="exact-match"), RewardFunction(name="exact-mach"))))
    twice = (RewardFunction(name="exact-match"), RewardFunction(name="exact-match"))
    with pytest.raises(ConfigError, match="two functions are named 'exact-match'; give each a different label"):
        reward_of(RewardConfig(functions=twice))
    inside = (RewardFunction(name="exact-match", label="exact-match.a"), RewardFunction(name="exact-match"))
    with pytest.raises(ConfigError, match="'exact-match.a' could also be a part of 'exact-match'; give it a label"):
        reward_of(RewardConfig(functions=inside))
    with pytest.raises(ConfigError, match="reward.functions: cannot be combined with reward.name"):
        reward_of(RewardConfig(name="exact-match", functions=twice[:1]))
    odd = reward_of(RewardConfig(functions=(twice[0], RewardFunction(name="my_rewards:odd")))).outcome((SORT, "x", ()))
    assert isinstance(odd, Failure)
    assert odd.message.startswith("reward 'exact-match + odd' (odd) returned 'x', wanted a finite number, on prompt")


def test_a_part_that_a_reward_cannot_have_is_refused() -> None:
    free = Reward(name="mine:free", function=lambda prompt, text: {"a": 1.0})
    listed = evolve(free, weights={"right": 1.0, "length": 0.5})
    terms = [Term(label="free", weight=1.0, reward=free), Term(label="listed", weight=1.0, reward=listed)]
    several = WeightedSum(name="free + listed", terms=terms)
    for reward, name in [(free, "a"), (free, "b"), (listed, "right"), (several, "free"), (several, "free.a")]:
        require_part(reward, name, setting="here")  # what a function returns is known once it is called
    require_part(several, "listed.length", setting="here")
    for reward, name, end in [
        (listed, "rihgt", "its parts are 'right', 'length'; did you mean 'right'?"),
        (several, "right", "its parts are 'free', 'listed', 'listed.right', 'listed.length'"),
        (several, "listed.a", "its parts are 'free', 'listed', 'listed.right', 'listed.length'"),
        (resolve_reward("exact-match", {}), "right", "'exact-match' has no parts"),
    ]:
        with pytest.raises(ConfigError) as caught:
            require_part(reward, name, setting="here")
        assert caught.value.message.startswith(f"here: {name!r} is no part of the reward; {end}")
