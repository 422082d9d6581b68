"""A weight transport of CoreRL that writes only what has changed."""
