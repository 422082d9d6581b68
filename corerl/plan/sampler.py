"""Plan what turns a run's prompts into samples: what its spec says, its options, and the prompts that it brings."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from attrs import fields

from corerl.config.load import structure
from corerl.config.schema import Config, DataConfig
from corerl.data.files import GivenRows, Rows
from corerl.errors import CorerlError, PluginBroken, PluginError
from corerl.messages import one_line
from corerl.plan.resolve import check_spec
from corerl.plugin.registry import Kind, load, load_implementation
from corerl.plugin.spec import SamplerRun, SamplerSpec
from corerl.rollout.sampler import Sampler, SamplerContext

MakeSampler = Callable[[SamplerContext], Sampler]


def sampler_spec(config: Config) -> SamplerSpec | None:
    """The spec of the run's sampler; None if it cannot be loaded, which `load_plugins` reports."""
    try:
        spec: SamplerSpec = load(Kind.SAMPLERS, config.rollout.sampler).spec
    except PluginError:
        return None
    return spec


def brings_rewards(config: Config) -> bool:
    """Whether samples may bring rewards with parts that nobody knows before."""
    spec = sampler_spec(config)
    return spec is None or spec.rewards


def plays_episodes(config: Config) -> bool:
    """Whether a sample may have another number of rows than one, or none of the policy's tokens."""
    spec = sampler_spec(config)
    return spec is None or spec.episodes


def names_prompts(data: DataConfig) -> bool:
    """Whether `[data]` names a source, other than the default one."""
    return bool(data.sources) or data.source not in ("", fields(DataConfig).source.default)


def brings_prompts(config: Config) -> bool:
    """Whether prompts are the sampler's own: it has some, and `[data]` names no others."""
    spec = sampler_spec(config)
    return spec is not None and spec.prompts is not None and not names_prompts(config.data)


def prompts_unknown(config: Config) -> bool:
    """Whether the run's sampler cannot be loaded, which is reported elsewhere, and might have brought the prompts."""
    return config.run.samples and sampler_spec(config) is None and not names_prompts(config.data)


def rows_of_sampler(config: Config) -> Rows | None:
    """The rows that the sampler brings, if prompts are its own. Raises ConfigError for wrong options, PluginBroken if
    the sampler fails with an error that is none of CoreRL's."""
    if not brings_prompts(config):
        return None
    loaded = load(Kind.SAMPLERS, config.rollout.sampler)
    options = config.samplers.get(loaded.name, {})
    if not isinstance(options, loaded.spec.config):
        options = structure(options, loaded.spec.config, path=f"samplers.{loaded.name}")
    try:
        rows = loaded.spec.prompts(options)
        count = len(rows)
    except CorerlError:
        raise
    except Exception as error:
        raise PluginBroken(f"sampler {loaded} has no prompts: {one_line(error)}") from error
    if not count:
        raise PluginBroken(f"sampler {loaded} has no prompts: with these options it returned no row")
    return GivenRows(rows, name=f"sampler {loaded.name!r}")


def plan_sampler(config: Config) -> MakeSampler:
    """What makes the sampler of a config whose plugins' tables are resolved. Raises ConfigError for options that cannot
    be used, PluginBroken if its class is none."""
    loaded = load(Kind.SAMPLERS, config.rollout.sampler)
    options = config.samplers[loaded.name]
    check_spec(loaded, options, SamplerRun(rollout=config.rollout, reward=config.reward), config=config)
    implementation = load_implementation(Kind.SAMPLERS, loaded)
    if not (isinstance(implementation, type) and issubclass(implementation, Sampler)):
        raise PluginBroken(
            f"sampler {loaded}: {loaded.spec.implementation} is {implementation!r}, wanted a subclass of "
            "corerl.rollout.Sampler"
        )
    return partial(implementation, options)
