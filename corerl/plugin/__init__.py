"""The contract of hooks, and everything between a plugin's name and its checked, callable code."""
