from __future__ import annotations

import pytest
from attrs import evolve

from corerl.errors import Unsupported
from corerl.plugin.capabilities import Capability, check_capabilities, not_implemented, unsupported
from corerl.plugin.registry import Kind, load


def test_a_missing_capability_is_refused_with_its_reason() -> None:
    capabilities = {Capability.CRITIC: unsupported("no value head")}
    spec = evolve(load(Kind.BACKENDS, "plain").spec, capabilities=capabilities)
    check_capabilities(spec, {Capability.SLEEP: "cluster.placement = 'colocated'"})  # not named: counts as full
    with pytest.raises(Unsupported) as caught:
        check_capabilities(spec, {Capability.CRITIC: "roles.critic"}, name="mine")
    assert caught.value.message == (
        "roles.critic requires 'critic', which the backend 'mine' does not support: no value head; "
        "change that setting, or choose another backend"
    )
    later = evolve(spec, capabilities={Capability.MOE: not_implemented("experts are not sharded")})
    with pytest.raises(Unsupported, match="which the backend 'mine' does not support yet: experts are not sharded"):
        check_capabilities(later, {Capability.MOE: "model.config"}, name="mine")
