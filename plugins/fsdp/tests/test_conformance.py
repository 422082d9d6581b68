from corerl.testing.checks import BackendChecks
from corerl.testing.critic_checks import CriticChecks
from tests.bare_loop import BareLoopChecks


class TestFsdp(BackendChecks):
    backend_name = "fsdp"


class TestFsdpAsCritic(CriticChecks):
    backend_name = "fsdp"


class TestFsdpAgainstBareTorch(BareLoopChecks):
    backend_name = "fsdp"
