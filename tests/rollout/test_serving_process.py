"""The end of a process that another thread learns of first."""

from __future__ import annotations

import os
import threading
from multiprocessing.connection import Connection

import pytest

from corerl.rollout import ServingProcess
from tests.machine import paced

pytestmark = pytest.mark.processes


def _never_ends(connection: Connection) -> None:
    connection.send(os.getpid())
    connection.recv()


def test_an_exit_status_that_another_thread_took_is_known() -> None:
    served = ServingProcess(_never_ends)
    pid = served.connection.recv()
    assert served.wait(0.0) is None
    served.process.kill()
    os.waitpid(pid, 0)  # as another thread of multiprocessing does, and notes the status a moment later
    popen = served.process._popen  # type: ignore[attr-defined]
    noting = threading.Timer(0.3, setattr, (popen, "returncode", -9))
    noting.start()
    assert served.wait(paced(20)) == -9
    noting.join()
    served.end()
