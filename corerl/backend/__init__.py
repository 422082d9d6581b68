"""The base class that every training backend extends."""
