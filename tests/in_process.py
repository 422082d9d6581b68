"""A whole run in the test's own process: the driver as it is, its ranks and engines as objects with threads."""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from attrs import frozen

from corerl.cluster.arrangement import Placement
from corerl.cluster.placement import Bundle, Slot
from corerl.config.load import load_config
from corerl.config.schema import Config
from corerl.driver import processes
from corerl.driver.run import Summary
from corerl.errors import CorerlError
from corerl.loop import train
from corerl.plan.make import Plan, make_plan
from corerl.trainer import group
from tests.end_to_end.command import write_small

BUILDING = threading.Lock()  # a model: transformers does it with a switch for the whole process


@frozen(eq=False)
class Calls:
    """Under way."""

    futures: dict[int, Future[Any]]
    method: str = ""


class Objects:
    """What `corerl.cluster.RayGroup` is to the driver; each call of a member runs in one of its threads."""

    def __init__(self, names: Sequence[str], target: str, *_: Any, threads: int = 1, **__: Any) -> None:
        self.names = list(names)
        module, _, name = target.partition(":")
        self._class = getattr(importlib.import_module(module), name)
        self._objects: list[Any] = []
        self._threads = [ThreadPoolExecutor(threads) for _ in names]
        self.nodes = ["here" for _ in names]
        self.slots, self.watching = [], None

    def __len__(self) -> int:
        return len(self.names)

    def listen(self, member: int) -> tuple[str, int, None]:
        return "127.0.0.1", 0, None

    def construct(self, arguments: Sequence[tuple[Any, ...]]) -> Calls:
        with BUILDING:
            self._objects = [self._class(*each) for each in arguments]
        return Calls({})

    def replace(self, member: int, arguments: tuple[Any, ...]) -> None:
        with BUILDING:
            self._objects[member] = self._class(*arguments)

    def start(self, method: str, *args: Any, at: str = "") -> Calls:
        return self.start_each(method, [args] * len(self))

    def start_each(self, method: str, arguments: Sequence[tuple[Any, ...]], *, at: str = "") -> Calls:
        return self.start_some(method, dict(enumerate(arguments)))

    def start_some(self, method: str, arguments: Mapping[int, tuple[Any, ...]]) -> Calls:
        return Calls(
            {
                member: self._threads[member].submit(self._call, member, method, *args)
                for member, args in arguments.items()
            }
        )

    def _call(self, member: int, method: str, *args: Any) -> Any:
        with BUILDING if method == "init" else contextlib.nullcontext():
            return getattr(self._objects[member], method)(*args)

    def call(self, method: str, *args: Any) -> list[Any]:
        return self.wait(self.start(method, *args))

    def wait(self, pending: Calls) -> list[Any]:
        return [future.result() for future in pending.futures.values()]

    def answers(self, pending: Calls, *, timeout: float | None = None, on_ended: Any = None) -> dict[int, Any]:
        done = wait(pending.futures.values(), timeout).done
        return {
            member: error if isinstance(error := future.exception(), CorerlError) else future.result()
            for member, future in pending.futures.items()
            if future in done
        }

    def ready(self, pending: Calls, timeout: float) -> bool:
        return not wait(pending.futures.values(), timeout).not_done

    ended = False  # a failure here leaves the others as they are

    def kill(self) -> None:
        for threads in self._threads:
            threads.shutdown(wait=False)


HERE = [
    *("backend.name=plain", "roles.actor.ranks=1", "reward.processes=0", "weights.transport=disk"),
    *("eval.every=0", "train.mini_batches=1", "checkpoint.background=false"),
]


def small(directory: Path, *overrides: str) -> Config:
    """The end-to-end tests' small run on one plain rank and one engine."""
    return load_config(write_small(directory), [*HERE, f"run.dir={directory}/run", *overrides])


@contextlib.contextmanager
def without_ray() -> Iterator[None]:
    """A context in which ranks and engines are objects of this process."""

    @contextlib.contextmanager
    def nothing(**_: Any) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def reserved(placement: Placement, **_: Any) -> Iterator[dict[str, list[Any]]]:
        nowhere: Any = None  # these processes are no processes
        yield {
            name: [Slot((Bundle(nowhere, place),), 0.0, 0.0) for place in places]
            for name, places in placement.places.items()
        }

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "ray_session", nothing)
        patch.setattr(processes, "reserved", reserved)
        patch.setattr(processes, "RayGroup", Objects)
        patch.setattr(group, "RayGroup", Objects)
        patch.setattr(group, "put", lambda value: value)
        before = set(threading.enumerate())
        try:
            yield
        finally:
            left = set(threading.enumerate()) - before
            assert not [thread.name for thread in left if thread.name in ("rollout", "engines")]
            if dist.is_initialized():  # by a rank of a run that failed: a process would have ended
                dist.destroy_process_group()


def planned(config: Config) -> Plan:
    """What a run of this config would do."""
    return make_plan(config)


def execute_here(config: Config, **_: Any) -> Summary:
    """What `corerl train` does with this config, without Ray. How processes start is ignored: there are none."""
    with without_ray():
        return train(config)
