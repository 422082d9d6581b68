"""The client of docs/tinker.md learns a row, with examples/serve.toml as its server."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from plugins.tinker.tests.recipes.conftest import Serving, run

ROOT = Path(__file__).resolve().parents[4]


def test_the_client_of_the_documentation_learns_a_row(tmp_path: Path) -> None:
    (client,) = re.findall(r"^```py\n(.*?)^```$", (ROOT / "docs/tinker.md").read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "client.py").write_text(client)
    shutil.copy(ROOT / "examples/serve.toml", tmp_path)
    with Serving(tmp_path, "serve.port=0", file="serve.toml") as serving:
        process, output = run(serving, "client", "client.py")
        assert process.wait(120.0) == 0, output.read_text()
    *losses, tokens, path = [line for line in output.read_text().splitlines() if line[:1] in {*"0123456789[t"}]
    assert float(losses[0].split()[0]) > 10.0 > 0.5 > float(losses[-1].split()[0])
    assert tokens == "[4, 5, 6, 9, 2]"
    assert path.startswith("tinker://session-") and path.endswith(":train:0/weights/learned")
