"""Numbers against something else that does the same work, measured in one run: `python -m benchmarks.run`."""
