"""Environments of OpenEnv as environments of CoreRL."""
