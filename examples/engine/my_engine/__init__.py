"""What the entry point names: the engine described, importable without torch."""

from attrs import frozen

from corerl.config import option
from corerl.plugin import EngineSpec


@frozen(kw_only=True)
class LoopOptions:
    cache: bool = option("keep the keys and values of tokens that were read; else each is read again", default=True)


SPEC = EngineSpec(
    implementation="my_engine.loop:LoopEngine",
    config=LoopOptions,
    api=(2, 0),
    summary="a loop over a transformers model, one prompt at a time",
)
