"""Turn prompts into scored samples: engines, sampler, rewards, sources of batches."""
