"""A local page on runs, read from their directories: curves, samples token by token, idle time, processes, notices."""
