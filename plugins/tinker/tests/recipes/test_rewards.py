"""math_rl and a game: rewards rise."""

from __future__ import annotations

from statistics import mean

from plugins.tinker.tests.recipes.conftest import Serving, begin

REWARD = "env/all/reward/total"


def test_math_rl_raises_its_reward(serving: Serving) -> None:
    steps = begin(
        serving,
        "math",
        "math_rl.train env=gsm8k loss_fn=importance_sampling learning_rate=2e-3 group_size=8 "
        "groups_per_batch=16 max_tokens=12 max_steps=12 eval_every=0 save_every=0",
    ).finish(REWARD)
    rewards = [step[REWARD] for step in steps]
    assert mean(rewards[-3:]) > mean(rewards[:3]) + 0.1
    # What was sampled is what is trained: the engine's log-probs are those of the ranks.
    assert max(abs(step["optim/kl_sample_train_v2"]) for step in steps) < 1e-5


def test_a_game_of_two_is_learned(serving: Serving) -> None:
    steps = begin(
        serving,
        "game",
        "multiplayer_rl.guess_number.train renderer_name=role_colon learning_rate=5e-4 group_size=4 "
        "batch_size=8 max_tokens=8 max_steps=6 eval_every=0 save_every=0",
    ).finish(REWARD)
    rewards = [step[REWARD] for step in steps]
    assert mean(rewards[-2:]) > mean(rewards[:2]) + 0.5
