"""The checks of `corerl doctor`, as findings: nothing that it checks can crash it."""
