"""What `corerl doctor` looks at, as findings: nothing that it looks at can end it."""
