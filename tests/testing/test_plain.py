from corerl.testing.checks import BackendChecks
from tests.bare_loop import BareLoopChecks


class TestPlain(BackendChecks):
    backend_name = "plain"


class TestPlainAgainstBareTorch(BareLoopChecks):
    backend_name = "plain"
