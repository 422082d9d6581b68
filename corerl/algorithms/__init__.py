"""Pure functions of tensors: advantages, losses, KL estimators, schedules."""
