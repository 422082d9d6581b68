"""What a run shows of itself, as extensions."""
