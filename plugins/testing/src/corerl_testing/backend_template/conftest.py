"""Load the pytest plugin of CoreRL's conformance suite, which brings its own fixtures."""

pytest_plugins = ["corerl_testing.plugin"]
