"""Pictures in prompts: files at a tower's size, the tokens that stand for them, and what towers take."""
