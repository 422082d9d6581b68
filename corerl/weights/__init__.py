"""HF-named weights on their way: chunks, manifest, buckets, transports."""
