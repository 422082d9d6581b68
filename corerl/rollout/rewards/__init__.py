"""Score samples: the user's function, its processes, and what is built in."""
