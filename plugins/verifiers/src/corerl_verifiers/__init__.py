"""Environments of verifiers as environments of CoreRL."""
