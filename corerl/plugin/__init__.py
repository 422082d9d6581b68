"""The hook contract, and everything from a plugin's name to its checked, callable code."""
