"""Every way in which Ray says that a process has ended; a process that ends is in test_group.py."""

from __future__ import annotations

import pytest
from ray.core.generated.common_pb2 import ActorDiedErrorContext  # type: ignore[attr-defined]
from ray.exceptions import (
    ActorDiedError,
    ActorPlacementGroupRemoved,
    ActorUnavailableError,
    ActorUnschedulableError,
    LocalRayletDiedError,
    NodeDiedError,
    ObjectLostError,
    ObjectStoreFullError,
    OutOfMemoryError,
    RayError,
    RaySystemError,
    RayTaskError,
    RuntimeEnvSetupError,
    WorkerCrashedError,
)

from corerl.cluster.failures import death

# What Ray 2.60 says, with fewer of its lines.
SAID = """1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 10.0.0.2, ID: 6aca) \
was 6.01GB used / 23.54GB limit (0.255512)
OOM kill reason: Memory usage 6453690368B exceeded threshold of 1263825536B (5.0% of 25276510208B limit)
Ray killed 1 worker(s) based on the killing policy
Considered workers: [
Selected to kill: (Task: job ID=01, task name=Process.__init__, pid=16558, actual memory used=0.06GB, worker ID=2e)
(Task: job ID=01, task name=Process.__init__, pid=16559, actual memory used=1.25GB, worker ID=2f)
]
Top 10 memory users: PID\tMEM(GB)\tCOMMAND
16127\t1.41\tpython -u other.py
Refer to the documentation on how to address the out of memory issue: https://docs.ray.io/. Consider provisioning"""


def message(error: RayError) -> str:
    died = death(error, "engine-0", "generate")
    assert died is not None
    assert died.details == str(error)
    assert "\n" not in died.message
    return died.message


def test_a_death_names_the_step_and_the_last_known_place() -> None:
    died = death(WorkerCrashedError(), "actor rank 1", "train at optimizer step 3", place="step.py:7 in pack")
    assert died is not None
    assert died.message.startswith("actor rank 1: its process died during train at optimizer step 3 (")
    assert "; last heartbeat in step.py:7 in pack); unless someone killed it" in died.message
    ended = death(WorkerCrashedError(), "actor rank 1", "train", killed="no heartbeat for 16 s")
    assert ended is not None
    assert ended.message == "actor rank 1: its process was killed during train: no heartbeat for 16 s"


@pytest.mark.parametrize(
    ("text", "numbers"), [(SAID, " (6.01 of 23.54 GB in use)"), ("in words of another version", "")]
)
def test_a_process_killed_for_memory_is_one_line_with_numbers(text: str, numbers: str) -> None:
    told = f"engine-0: its process was killed by Ray during generate: the machine ran out of memory{numbers}; "
    assert message(OutOfMemoryError(text)).startswith(told)


def of_context(message: str, **more: object) -> ActorDiedError:
    whose = {"class_name": "Process", "actor_id": b"\1" * 16, "pid": 7}
    return ActorDiedError(ActorDiedErrorContext(error_message=message, **whose, **more))


DIED = """The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: \
Worker unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1) the process was \
killed by the OOM killer due to high memory usage."""
NODE_DIED = "The actor is dead because its node has died.\n\tthe node missed heartbeats"


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (of_context(DIED), "Worker unexpectedly exits with a connection error code 2. End of file"),
        (of_context(NODE_DIED, never_started=True), NODE_DIED.replace("\n\t", " ")),
        (ActorDiedError(), "The actor died unexpectedly before finishing this task"),
        (NodeDiedError("the node 10.0.0.2 is dead"), "the node 10.0.0.2 is dead"),
        (LocalRayletDiedError(), ""),
        (RuntimeEnvSetupError("agent timed out"), "Failed to set up runtime environment. agent timed out"),
        (ActorPlacementGroupRemoved(), ""),
        (ActorUnschedulableError("no such node"), "The actor is not schedulable: no such node"),
        (RaySystemError("the worker did not start"), "System error: the worker did not start"),
        (WorkerCrashedError(), ""),
        (ActorUnavailableError("no connection", b"\0" * 16), ""),
        (ObjectLostError("ab", None, ""), ""),
    ],
    ids=lambda each: type(each).__name__,
)
def test_every_other_death_names_its_cause(error: RayError, why: str) -> None:
    assert message(error).startswith(f"engine-0: its process died during generate ({why}")


def test_an_exception_inside_a_process_is_no_death() -> None:
    inside = RayTaskError("call", "Traceback", NodeDiedError("another's node")).as_instanceof_cause()
    assert isinstance(inside, NodeDiedError)
    assert death(inside, "engine-0", "generate") is None
    assert death(RaySystemError(TypeError("no"), "Traceback"), "engine-0", "generate") is None
    assert death(ObjectStoreFullError(), "engine-0", "generate") is None
