"""Transformers models without a backend: built on meta, read slice by slice, named as on the hub."""
