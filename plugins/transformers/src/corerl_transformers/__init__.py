"""CoreRL's engine on transformers' own `generate`, on a CPU or a GPU."""
