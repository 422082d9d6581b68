"""The plain backend, but that its spec declares less."""

from attrs import evolve

from corerl.plugin.capabilities import Capability, not_implemented
from corerl_testing.plain import SPEC

WITHOUT_LORA = evolve(SPEC, capabilities={**SPEC.capabilities, Capability.LORA: not_implemented("it has none")})
