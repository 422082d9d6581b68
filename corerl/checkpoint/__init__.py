"""The portable training checkpoint: sharded, published atomically, readable by every backend."""
