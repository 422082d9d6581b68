"""What tests of core and of plugins share."""

pytest_plugins = ["corerl.testing.fixtures"]
