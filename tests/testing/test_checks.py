"""The checks themselves: each fails for the fault that it is there for."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from corerl.testing.checks import BackendChecks, Runs, Subject
from tests.testing.broken import Broken


@pytest.mark.parametrize("fault", Broken.__subclasses__(), ids=lambda fault: fault.__name__)
def test_a_check_fails_for_the_fault_that_it_is_there_for(fault: type[Broken], runs: Runs, tmp_path: Path) -> None:
    directory = tmp_path / "subject"
    directory.mkdir()
    name = f"{fault.__module__}:{fault.__name__}.spec"
    subject = Subject(backend=name, world_size=1, runs=runs, directory=directory)
    check = getattr(BackendChecks(), fault.seen_by)
    takes_path = "tmp_path" in inspect.signature(check).parameters
    with pytest.raises(AssertionError):
        check(subject, **fault.arguments, **({"tmp_path": tmp_path} if takes_path else {}))
