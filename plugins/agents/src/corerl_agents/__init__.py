"""Episodes of agents for CoreRL: the policy behind an OpenAI-compatible URL, trained on what it sampled."""
