"""Ray's own processes are killed, one in each session of a process; a run of which GCS dies is in tests/end_to_end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from corerl.cluster import services
from corerl.descendants import descendants
from tests.cluster.nodes import session
from tests.forks.client import Forked, processes_of
from tests.forks.server import FORK_PYTHON
from tests.machine import FOREVER, paced

pytestmark = pytest.mark.processes


def test_what_several_processes_are_asked_is_not_cut_short_by_a_death_but_what_comes_after_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "AGAIN_SECONDS", FOREVER)  # told once, in the block
    process = subprocess.Popen(["sleep", "600"])
    watch = services.Watch([services.Service("raylet", tmp_path, os.pidfd_open(process.pid))])
    monkeypatch.setattr(services, "_watch", watch)
    before = signal.signal(services.INTERRUPT, watch.interrupt)
    watcher = threading.Thread(target=watch.run, args=(True,))
    watcher.start()
    asked = []

    def ask() -> None:
        with services.unbroken():
            process.kill()
            process.wait()
            for member in range(20):
                asked.append(member)
                time.sleep(0.01)
        time.sleep(FOREVER)

    try:
        with pytest.raises(KeyboardInterrupt):
            ask()
    finally:
        watch.close(watcher)
        signal.signal(services.INTERRUPT, before)
        watch.free()
    assert asked == list(range(20))


DEATHS = """
import signal, sys, time
import ray
from corerl.cluster import services
from corerl.cluster.runtime import ray_session
from corerl.errors import WorkerDied

@ray.remote
def endless():
    time.sleep(600)

for name in sys.argv[1:]:
    try:
        with ray_session(address="", cpus=1):
            shared = ray.put(bytes(2**20))  # of which Ray tells its store if the node is lost, and ends this process
            waiting = endless.remote()
            (service,) = (each for each in services._watch.services if each.name == name)
            began = time.monotonic()
            signal.pidfd_send_signal(service.handle, signal.SIGKILL)
            ray.wait([waiting])
    except WorkerDied as error:
        print(error, flush=True)
        assert services._watch is None and time.monotonic() - began < 30.0  # not the minute that Ray waits
"""


@pytest.mark.nightly
def test_whichever_of_rays_processes_dies_is_named_with_its_log_and_ray_can_start_again(tmp_path: Path) -> None:
    logs = {
        "raylet": "raylet.out",
        "dashboard agent": "dashboard_agent.log",
        "runtime-env agent": "runtime_env_agent.log",
    }
    logs |= {"gcs_server": "gcs_server.out"}
    with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
        driver = Forked(["-c", *logs], DEATHS, environment={**os.environ, FORK_PYTHON: "1"}, stdout=out, stderr=err)
    status = driver.wait(paced(240.0))
    deadline = time.monotonic() + paced(30.0)
    while left := processes_of(driver.pid):
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.05)
    assert status == 0, (tmp_path / "err").read_text()
    # Ray may print what it has heard of the death, to the same output.
    lines = [line for line in (tmp_path / "out").read_text().splitlines() if line.startswith("Ray's ")]
    for line, (name, log) in zip(lines, logs.items(), strict=True):
        assert re.fullmatch(
            rf"Ray's {name} has died; unless someone killed it, see the machine's log \(dmesg: out of memory\?\) and "
            rf"its own \(/.*/ray/session_\d+.*_{driver.pid}/logs/{log}\)",
            line,
        )


AT_ITS_STORE = """
import os, sys
import ray
from corerl.cluster.runtime import ray_session
from corerl.errors import WorkerDied
try:
    with ray_session(address="", cpus=1):
        print(ray._private.worker._global_node.all_processes["raylet"][0].process.pid, flush=True)
        while True:
            ray.get(ray.put(bytes(2**22)))
except WorkerDied as error:
    print(f"corerl: error: {error}", file=sys.stderr)
    sys.exit(1)
"""


@pytest.mark.nightly
def test_a_driver_that_ray_ends_as_it_reads_its_store_is_told_of_by_another_process(tmp_path: Path) -> None:
    """Or it hears of raylet's end in time, and tells of it itself."""
    with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
        driver = Forked(["-c"], AT_ITS_STORE, environment={**os.environ, FORK_PYTHON: "1"}, stdout=out, stderr=err)
    deadline = time.monotonic() + paced(240.0)
    while not (raylet := (tmp_path / "out").read_text().strip()):
        assert time.monotonic() < deadline and driver.poll() is None, (tmp_path / "err").read_text()
        time.sleep(0.05)
    os.kill(driver.pid, signal.SIGSTOP)  # so that whoever looks on sees raylet's end first
    os.kill(int(raylet), signal.SIGKILL)
    time.sleep(paced(1.0))
    os.kill(driver.pid, signal.SIGCONT)
    status = driver.wait(paced(60.0))
    while left := processes_of(driver.pid):
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.05)
    told = (tmp_path / "err").read_text()
    assert status == 1
    assert re.fullmatch(
        r"corerl: error: Ray's raylet has died; unless someone killed it, see the machine's log \(dmesg: out of "
        r"memory\?\) and its own \(/.*/ray/session_\d+.*/logs/raylet.out\)\n",
        told,
    ), told


def test_descendants_are_all_that_comes_of_a_process() -> None:
    with subprocess.Popen(["sh", "-c", "sh -c 'sleep 60; :'; :"], start_new_session=True) as parent:
        deadline = time.monotonic() + paced(30.0)
        while len(there := session(parent.pid)) < 3:
            assert time.monotonic() < deadline, there
            time.sleep(0.01)
        assert {parent.pid, *descendants(parent.pid)} == set(there)
        for pid in there:
            os.kill(pid, signal.SIGKILL)
    assert descendants(parent.pid) == []
