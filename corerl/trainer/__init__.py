"""The driver's handle on a group of workers, and the worker that each rank runs."""
