"""Sources of scored batches: on demand, one step ahead, continuous, recorded."""
