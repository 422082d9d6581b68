"""What a rank does on a GPU for one check, and the device memory that the driver reports meanwhile."""

from __future__ import annotations

import gc
import subprocess
from collections.abc import Mapping, Sequence

import torch
from attrs import evolve, frozen

from corerl.memory.device import empty_cache
from corerl.trainer.worker import Worker
from corerl.types import Array, MemoryKind, TrainResult
from corerl_testing.harness import Setup, State, running, state_of, train
from corerl_testing.inprocess import InProcessSender

KINDS = frozenset(MemoryKind)
# Sizes at which the model dominates its process's memory: about 0.4 GB in float32, and twice that for moments.
SMALL = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}  # one layer per pipeline stage
FIELDS = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 6, "vocab_size": 8009}


def used() -> int:
    """Bytes in use on this rank's device, as the driver reports them, contexts included."""
    torch.cuda.synchronize()
    empty_cache(torch.device("cuda"))
    free, total = torch.cuda.mem_get_info()
    return total - free


@frozen(kw_only=True)
class Memory:
    before: int  # bytes used with a context and loaded kernels, but no model
    trained: int  # after two steps
    # Put to sleep one by one: bytes freed by storages, as the rank read them from the driver, and as read here.
    freed: Mapping[MemoryKind, tuple[int, int, int]]
    residual: int  # as the rank read it when all kinds sleep
    asleep: int  # when all kinds sleep
    twice: tuple[int, int]  # freed by sleeping again, restored by waking again
    awake: int
    equal: bool  # weights and moments, to the last bit


def measure_sleep(setup: Setup) -> Memory:
    # A first model leaves a context and loaded kernels, which no backend can free before the process ends.
    with running(evolve(setup, fields={**setup.fields, **SMALL})) as worker:
        train(worker, setup, 0)
    gc.collect()
    before = used()
    with running(setup) as worker:
        for number in (0, 1):
            train(worker, setup, number)
        state, trained = state_of(worker), used()
        freed = {}
        for kind in (MemoryKind.OPTIMIZER, MemoryKind.MASTER, MemoryKind.GRAD, MemoryKind.PARAM):
            at = used()
            said = worker.sleep({kind})
            freed[kind] = (said.freed_bytes, said.driver_freed_bytes, at - used())
        asleep, again = used(), worker.sleep(KINDS)
        worker.wake_up(KINDS)
        restored = worker.wake_up(KINDS).restored_bytes
        return Memory(
            before=before,
            trained=trained,
            freed=freed,
            residual=again.residual_bytes,
            asleep=asleep,
            twice=(again.freed_bytes, restored),
            awake=used(),
            equal=_equal(state_of(worker), state),
        )


@frozen(kw_only=True)
class Cycles:
    used: list[int]  # after each cycle
    equal: list[bool]  # whether each sleep kept weights and moments
    results: list[TrainResult]


def cycle(setup: Setup, cycles: int, sleeps: bool) -> Cycles:
    """Train, sleep and wake up, `cycles` times."""
    with running(setup) as worker:
        held, equal, results = [], [], []
        for number in range(cycles):
            results.append(train(worker, setup, number))
            if sleeps:
                before = state_of(worker)
                worker.sleep(KINDS)
                worker.wake_up(KINDS)
                equal.append(_equal(state_of(worker), before))
            held.append(used())
        return Cycles(used=held, equal=equal, results=results)


def push_after_waking(setup: Setup) -> tuple[dict[str, Array], State]:
    """What an update sends as soon as parameters are awake, and the trained state."""
    arrived: dict[str, Array] = {}
    with running(setup) as worker:
        train(worker, setup, 0)
        state = state_of(worker)
        worker.sleep(KINDS)
        worker.wake_up({MemoryKind.PARAM})
        _push(worker, arrived)
        worker.wake_up(KINDS)
        return arrived, state


def _push(worker: Worker, arrived: dict[str, Array]) -> None:
    worker.host.update_weights(
        InProcessSender(
            lambda bucket: arrived.update({name: value.float().cpu().numpy() for name, value in bucket.items()})
        ),
        1,
    )


def memory_of_other_devices(setup: Setup, own: Sequence[int]) -> tuple[dict[int, int], dict[int, int]]:
    """Bytes in use on each device that no rank owns, before a worker trains and while it exists."""
    torch.zeros(1, device="cuda")
    before = _others(own)
    with running(setup) as worker:
        for number in (0, 1):
            train(worker, setup, number)
        _push(worker, {})
        return before, _others(own)


def _others(own: Sequence[int]) -> dict[int, int]:
    # Asking torch would create a context on each device.
    answer = subprocess.run(
        ["nvidia-smi", "--query-gpu=index,memory.used", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    rows = [tuple(map(int, line.split(","))) for line in answer.splitlines()]
    return {index: mib * 2**20 for index, mib in rows if index not in own}


def _equal(found: State, wanted: State) -> bool:
    return all(
        a.name == b.name and a.values.tobytes() == b.values.tobytes()
        for key in wanted
        for a, b in zip(found[key], wanted[key], strict=True)
    )
