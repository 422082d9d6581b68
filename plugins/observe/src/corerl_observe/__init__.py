"""The console, curves, trackers, traces, profiles and guards of CoreRL's runs."""
