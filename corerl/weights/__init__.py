"""Move HF-named weights from trainer to engines: chunks, manifest, buckets, transports."""
