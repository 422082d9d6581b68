"""A group of workers as one object on the driver, and the worker that each rank runs."""
