"""The portable training checkpoint: sharded, complete or invisible, readable by every backend."""
