"""Transformers models, independent of backends: built on meta, read slice by slice, named as on the hub."""
