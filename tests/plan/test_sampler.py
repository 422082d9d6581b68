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
from corerl.data.files import Rows
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
OWN = f"{__name__}:SPEC"


def config(**tables: Any) -> Config:
    return config_of({"backend": {"name": "plain"}, **tables})


def rows_of(name: str, **options: Any) -> Rows | None:
    sampler = load(Kind.SAMPLERS, name)
    return _rows_of(sampler, resolve_tables(config(rollout={"sampler": name}, samplers={sampler.name: options})))


def test_prompts_are_not_asked_of_options_that_cannot_be_used(tmp_path: Path) -> None:
    given = evolve(config_in(tmp_path / "run"), samplers={f"{__name__}:SILENT": {"count": 10**6}})
    with pytest.raises(ConfigError) as caught:
        make_plan(evolve_rollout(given, sampler=f"{__name__}:SILENT"))
    assert "has no prompts" not in caught.value.message


def evolve_rollout(config: Config, **changed: Any) -> Config:
    return evolve(config, rollout=evolve(config.rollout, **changed))


def test_a_samplers_spec_refuses_options_by_their_paths(tmp_path: Path) -> None:
    given = evolve(config_in(tmp_path / "run"), samplers={OWN: {"count": 10**6}})
    with pytest.raises(ConfigError) as caught:
        make_plan(evolve_rollout(given, sampler=OWN))
    assert caught.value.message.splitlines()[:2] == [f'samplers."{OWN}".count: too many', "rollout.prompts: too few"]


def test_what_is_no_sampler_is_told_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(
        PluginBroken, match=r"sampling_params is <function .*>, wanted a subclass of corerl.rollout.Sam"
    ):
        make_plan(evolve_rollout(config_in(tmp_path / "run"), sampler=f"{__name__}:WITHOUT_CLASS"))


def test_what_a_sampler_refuses_is_said_in_its_own_words() -> None:
    with pytest.raises(DataError, match="^no rows for count=3$"):
        rows_of(f"{__name__}:REFUSES")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("SILENT", "IndexError: list index out of range"),
        ("EMPTY", "with these options it returned no row"),
        ("STREAM", "TypeError: object of type"),
    ],
)
def test_prompts_of_a_sampler_must_be_a_sequence_with_rows(name: str, why: str) -> None:
    with pytest.raises(PluginBroken, match=f"{name}' has no prompts: {why}"):
        rows_of(f"{__name__}:{name}")
