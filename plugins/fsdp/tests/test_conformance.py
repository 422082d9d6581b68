from corerl.testing.checks import BackendChecks
from tests.bare_loop import BareLoopChecks


class TestFsdp(BackendChecks):
    backend_name = "fsdp"


class TestFsdpAgainstBareTorch(BareLoopChecks):
    backend_name = "fsdp"
