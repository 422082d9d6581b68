from corerl.testing.checks import BackendChecks
from corerl.testing.critic_checks import CriticChecks
from tests.bare_loop import BareLoopChecks


class TestPlain(BackendChecks):
    backend_name = "plain"


class TestPlainAsCritic(CriticChecks):
    backend_name = "plain"


class TestPlainAgainstBareTorch(BareLoopChecks):
    backend_name = "plain"
