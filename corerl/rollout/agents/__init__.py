"""Episodes: a user's function talks with the policy through an OpenAI-compatible server."""
