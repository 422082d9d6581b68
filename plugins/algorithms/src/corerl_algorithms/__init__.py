"""Algorithms besides GRPO, one file each: what is compared, what is clipped, and how tokens are weighted."""
