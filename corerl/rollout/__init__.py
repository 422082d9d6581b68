"""From prompts to scored samples: engines, sampler, rewards, sources of batches."""
