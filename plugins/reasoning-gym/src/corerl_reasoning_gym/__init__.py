"""Tasks of reasoning-gym as an environment of CoreRL."""
