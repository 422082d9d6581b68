"""Benchmarks of CoreRL against something else that does the same work."""
