"""Which sampler a run has, and what is said where it cannot have it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve, frozen

from corerl.config.load import config_of
from corerl.config.options import option
from corerl.config.schema import Config
from corerl.errors import ConfigError, DataError, PluginBroken
from corerl.plan.data import _rows_of
from corerl.plan.make import make_plan
from corerl.plan.resolve import resolve_tables
from corerl.plugin.registry import Kind, load
from corerl.plugin.spec import Problem, SamplerSpec
from tests.driver.saved import config_in


@frozen(kw_only=True)
class Options:
    count: int = option("rows", default=3)


def check(options: Options, run: Any) -> Iterator[Problem]:
    if options.count > run.rollout.prompts:
        yield Problem("count", "too many")
        yield Problem(".rollout.prompts", "too few")


SPEC = SamplerSpec(
    implementation="corerl.rollout.sampler:PromptSampler",
    config=Options,
    api=(2, 0),
    summary="for tests",
    check=check,
    prompts=lambda options: [{"prompt": f"{index}>", "answer": str(index)} for index in range(options.count)],
)
WITHOUT_CLASS = evolve(SPEC, implementation="corerl.rollout.sampler:sampling_params", prompts=None)


def refused(options: Options) -> Any:
    raise DataError(f"no rows for count={options.count}")


REFUSES = evolve(SPEC, prompts=refused)
SILENT = evolve(SPEC, prompts=lambda options: [][options.count])
EMPTY = evolve(SPEC, prompts=lambda options: [])
STREAM = evolve(SPEC, prompts=lambda options: iter([{"prompt": "0>", "answer": "0"}]))


def evolve_rollout(config: Config, **changed: Any) -> Config:
    return evolve(config, rollout=evolve(config.rollout, **changed))


@pytest.mark.parametrize("name", ["SPEC", "SILENT"])
def test_options_are_refused_before_prompts_are_asked(name: str, tmp_path: Path) -> None:
    own = f"{__name__}:{name}"
    given = evolve(config_in(tmp_path / "run"), samplers={own: {"count": 10**6}})
    with pytest.raises(ConfigError) as caught:
        make_plan(evolve_rollout(given, sampler=own))
    assert caught.value.message.splitlines()[:2] == [f'samplers."{own}".count: too many', "rollout.prompts: too few"]
    assert "has no prompts" not in caught.value.message


def test_what_is_no_sampler_is_told_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(PluginBroken, match=r"params is <function .*>, wanted a subclass of corerl.rollout.Sampler"):
        make_plan(evolve_rollout(config_in(tmp_path / "run"), sampler=f"{__name__}:WITHOUT_CLASS"))


@pytest.mark.parametrize(
    ("name", "error", "why"),
    [
        ("REFUSES", DataError, "^no rows for count=3$"),
        ("SILENT", PluginBroken, "SILENT' has no prompts: IndexError: list index out of range"),
        ("EMPTY", PluginBroken, "EMPTY' has no prompts: with these options it returned no row"),
        ("STREAM", PluginBroken, "STREAM' has no prompts: TypeError: object of type"),
    ],
)
def test_prompts_of_a_sampler_must_be_a_sequence_with_rows(name: str, error: type[Exception], why: str) -> None:
    sampler = load(Kind.SAMPLERS, f"{__name__}:{name}")
    config = config_of({"backend": {"name": "plain"}, "rollout": {"sampler": sampler.name}})
    with pytest.raises(error, match=why):
        _rows_of(sampler, resolve_tables(config))
