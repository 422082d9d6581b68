"""A server of the Tinker API over any CoreRL backend."""
