"""The driver's side of a run: assemble its parts, direct them for the loop, and shut them down."""
