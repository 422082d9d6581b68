"""Benchmarks of CoreRL against something else that does the same work, in one run: `python -m benchmarks.run`."""
