"""Memory of CoreRL's runs, predicted before the first step, and recomputation chosen by it."""
