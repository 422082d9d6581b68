"""Core's own transports; their specs are in `corerl.plugin.transports`."""
