"""Runs whose configs and versions are known here: what differs, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

from corerl_page.differences import differences
from corerl_page.runs import runs_of


def write(run_dir: Path, config: str = "", versions: dict[str, str] | None = None) -> Path:
    run_dir.mkdir()
    (run_dir / "config.toml").write_text(f'run.dir = "{run_dir}"\nrun.steps = 9\n{config}')
    if versions is not None:
        (run_dir / "versions.json").write_text(json.dumps(versions))
    return run_dir


def test_settings_and_versions_that_differ_are_told(tmp_path: Path) -> None:
    one = write(tmp_path / "a", "rollout.max_tokens = 7\ndata.seed = 0", {"torch": "2.13.0", "ray": "2.50"})
    changed = 'rollout.max_tokens = 3\ndata.seed = 0\nalgorithm.loss = "mine"'
    other = write(tmp_path / "b", changed, {"torch": "2.14.0", "ray": "2.50"})
    unknown = write(tmp_path / "c", 'rollout.max_tokens = 7\ndata.seed = 0\nalgorithm.loss = ""')
    found = {each.name: each.values for each in differences(runs_of([one, other, unknown]))}
    assert found == {
        "algorithm.loss": [None, "mine", '""'],
        "rollout.max_tokens": ["7", "3", "7"],
        "version of torch": ["2.13.0", "2.14.0", None],
    }
    assert list(found)[-1] == "version of torch"


def test_lists_of_named_tables_are_compared_by_name(tmp_path: Path) -> None:
    one = write(tmp_path / "a", 'extensions = [{ name = "x", options.every = 1 }, { name = "y", options.every = 2 }]')
    other = write(tmp_path / "b", 'extensions = [{ name = "y", options.every = 3 }, { name = "x", options.every = 1 }]')
    (found,) = differences(runs_of([one, other]))
    assert (found.name, found.values) == ("extensions.y.options.every", ["2", "3"])
