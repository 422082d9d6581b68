"""Prompts in, packed micro-batches out."""
