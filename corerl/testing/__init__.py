"""Test tools for plugin authors: the conformance suite, the plain backend, tolerances, worker pools, tiny models."""
