"""Sums of two numbers: an environment with prompts and rewards of its own; importable without torch."""

from attrs import frozen

from corerl.config import at_least, option
from corerl.plugin import SamplerSpec


@frozen(kw_only=True)
class SumsConfig:
    largest: int = option("the largest number that is added", default=99, validator=at_least(1))


def prompts(options: SumsConfig) -> list[dict[str, str]]:
    numbers = range(options.largest + 1)
    return [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in numbers for b in numbers]


SPEC = SamplerSpec(
    implementation="my_sums.environment:Sums",
    config=SumsConfig,
    api=(2, 0),
    summary="sums of two numbers, with prompts and rewards",
    prompts=prompts,
)
