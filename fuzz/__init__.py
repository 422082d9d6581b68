"""Look for inputs that CoreRL answers with anything but a result or one clear line: `python -m fuzz --minutes 60`."""
