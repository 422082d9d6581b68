from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from corerl_testing.subject import Runs, Subject


def test_a_check_skips_ranks_that_the_spec_refuses(tmp_path: Path) -> None:
    def subject(**options: Any) -> Subject:
        runs = Runs({}, {})
        backend = "plugins.testing.tests.faults:SPLIT"
        return Subject(backend=backend, world_size=2, runs=runs, directory=tmp_path, options=options)

    subject(parts=2).require_ranks(2)
    subject().require_ranks(1)
    with pytest.raises(pytest.skip.Exception, match=r"^the spec refuses these options on 1 rank\(s\): parts = 2"):
        subject(parts=2).require_ranks(1)
