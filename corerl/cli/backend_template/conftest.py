"""The conformance suite of CoreRL brings its own fixtures."""

pytest_plugins = ["corerl.testing.plugin"]
