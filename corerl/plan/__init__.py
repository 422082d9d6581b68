"""From a config to the plan of its run: everything that can be known, and checked, before the first process."""
