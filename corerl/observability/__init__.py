"""The extensions that come with CoreRL: displays, logs, trackers, traces and guards."""
