"""What plugin authors test with: the plain backend, tolerances, worker pools, tiny models."""
