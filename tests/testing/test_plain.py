from corerl.testing.checks import BackendChecks


class TestPlain(BackendChecks):
    backend_name = "plain"
