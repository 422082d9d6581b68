from corerl.testing.checks import BackendChecks


class TestFsdp(BackendChecks):
    backend_name = "fsdp"
