from __future__ import annotations

from pathlib import Path

from corerl.config.load import load_config
from corerl.config.toml_text import to_plain
from corerl.driver.run_dir import write_config
from tests.driver.saved import make_config


def test_a_config_that_says_something_else_is_kept(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("# the user's own\n")
    first, second = (make_config(run={"dir": str(tmp_path), "seed": seed}) for seed in (1, 2))
    for config in (first, first, second):
        write_config(tmp_path, to_plain(config))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config-1.toml", "config-2.toml", "config.toml"]
    assert (tmp_path / "config-1.toml").read_text() == "# the user's own\n"
    assert [load_config(tmp_path / name) for name in ("config-2.toml", "config.toml")] == [first, second]
