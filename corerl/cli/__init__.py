"""The `corerl` command and its subcommands."""
