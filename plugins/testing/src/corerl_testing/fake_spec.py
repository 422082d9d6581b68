"""The spec of the engine `fake`."""

from __future__ import annotations

from attrs import frozen

from corerl.config import at_least, option
from corerl.plugin import EngineSpec


@frozen(kw_only=True)
class FakeConfig:
    vocab_size: int = option("tokens are sampled from [0, vocab_size)", default=16, validator=at_least(1))


SPEC = EngineSpec(
    implementation="corerl_testing.fake_engine:FakeEngine",
    config=FakeConfig,
    api=(2, 0),
    summary="no model: tokens are a function of prompt, noise and weights version; for tests",
)
