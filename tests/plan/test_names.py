"""Which names are told to be wrong where no more of a config can be checked."""

import sys
from pathlib import Path

import pytest

from corerl.config.load import config_of
from corerl.plan.names import wrong_apart, wrong_names


def test_names_of_plugins_and_rewards_are_looked_up_without_importing_them() -> None:
    config = config_of(
        {
            "backend": {"name": "no.such.module:SPEC"},  # may be one, which only its import tells
            "roles": {"actor": {"backend": "plian"}},
            "rollout": {"engine": "fake"},
            "extensions": [{"name": ""}, {"name": "jsonnl"}],
            "reward": {"functions": [{"name": "exact-match"}, {"name": "no_such_module:f"}, {"name": "exakt-match"}]},
        }
    )
    assert [line.partition(";")[0] for line in wrong_names(config)] == [
        "roles.actor.backend: unknown backend 'plian'",
        "extensions[1].name: unknown extension 'jsonnl'",
        "reward.functions[2].name: unknown reward 'exakt-match'",
    ]
    assert "no" not in sys.modules


def test_a_run_that_only_scores_needs_no_algorithm() -> None:
    config = {"backend": {"name": "plain"}, "algorithm": {"name": "grp"}}
    assert [line.partition(";")[0] for line in wrong_names(config_of(config))] == [
        "algorithm.name: unknown algorithm 'grp'"
    ]
    assert list(wrong_names(config_of({**config, "run": {"mode": "eval"}}))) == []


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_options_functions_and_directories_are_checked_each_by_itself(here: Path) -> None:
    (here / "names_spec.py").write_text("raise RuntimeError('no such library')\n")
    (here / "names_functions.py").write_text("def there(): ...\n")
    config = config_of(
        {
            "backend": {"name": "names_spec:SPEC"},
            "model": {"path": "no/model"},
            "data": {"sources": [{"source": "sort-digits"}, {"source": "name_functions.py"}, {"source": "no.jsonl"}]},
            "roles": {"actor": {"backend": "plain", "options": {"no_such_option": 1}}},
            "backends": {"plain": {"nor_this": 1}},
            "rollout": {"engine": "fke", "sampler": "episodes", "postprocess": "names_functions:there"},
            "samplers": {"episodes": {"function": "no_such_module:f"}},
            "engines": {"fake": {"no_such_option": 2}},
            "extensions": [{"name": "jsonl", "options": {"sampels": 3}}],
            "reward": {"functions": [{"name": "exact-match"}, {"name": "names_functions:absent"}]},
            "algorithm": {"name": "grpo", "loss": "no_loss:f", "advantages": "no_advantages:f"},
        }
    )
    lines = list(wrong_apart(config))
    assert lines[2].endswith("did you mean 'names_functions.py'?")
    assert lines[3].startswith("data.sources: cannot read no.jsonl: No such file or directory; expected a ")
    assert lines[4].endswith("cannot be loaded from names_spec:SPEC: RuntimeError: no such library")
    assert [line.partition(": ")[0] for line in lines] == [
        "rollout.engine",
        "model.path",
        "data.sources",
        "data.sources",
        "backend.name",
        "backends.plain.nor_this",
        "extensions[0].options.sampels",
        "roles.actor.options.no_such_option",
        "engines.fake.no_such_option",
        "reward.functions[1].name",
        "samplers.episodes.function",
        "algorithm.loss",
        "algorithm.advantages",
    ]


def test_functions_of_the_algorithm_are_looked_for_unless_the_run_only_evaluates() -> None:
    named = {"loss": "no_loss:f", "advantages": "no_advantages:f", "postprocess": "no_postprocess:f"}
    settings = {"backend": {"name": "plain"}, "algorithm": {"name": "grpo", **named}}
    told = {
        mode: [line.partition(":")[0] for line in wrong_apart(config_of({**settings, "run": {"mode": mode}}))]
        for mode in ("train", "eval")
    }
    assert told == {"train": ["algorithm.loss", "algorithm.advantages", "algorithm.postprocess"], "eval": []}


def test_nothing_is_imported_in_a_models_directory_with_code(here: Path) -> None:
    (here / "names_of_a_model.py").write_text("")
    config = config_of({"model": {"path": "."}, "backend": {"name": "plain"}, "reward": {"name": "names_of_a_model:f"}})
    assert [line.partition(": ")[0] for line in wrong_apart(config)] == ["model.path"]
    assert "names_of_a_model" not in sys.modules
