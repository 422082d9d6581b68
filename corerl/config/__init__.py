"""One TOML file in, one frozen Config out; imports neither torch nor ray."""
