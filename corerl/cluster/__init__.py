"""Processes on machines: the only package that imports ray."""
