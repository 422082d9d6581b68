"""The protocol of weight updates, and core's own transports, whose specs are in `corerl.plugin.transports`."""
