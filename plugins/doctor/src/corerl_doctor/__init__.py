"""CoreRL's doctor: what is installed, what a config would meet here, and which models it can train. Nothing that it
examines can crash it."""
