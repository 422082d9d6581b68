"""Algorithms besides GRPO and PPO, one file each: what is compared, what is clipped, and how tokens are weighted."""
