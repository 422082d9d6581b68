"""Pure torch operations for backends to call: packed attention, chunked log-probs and entropy."""
