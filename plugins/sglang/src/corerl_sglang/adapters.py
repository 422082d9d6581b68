"""Adapters in SGLang's server, which has those of each version under a name of their own."""

from __future__ import annotations

import base64
import contextlib
import functools
import math
import operator
import os
import pickle
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Self

import torch
from attrs import evolve, frozen
from packaging.version import Version

from corerl.config import LoraConfig
from corerl.errors import ConfigError, CorerlError
from corerl.models import peft_config
from corerl.weights import Manifest, adapted, is_adapter
from corerl_sglang.arguments import adapter_misfits
from corerl_sglang.server import Server

OLDEST = Version("0.5.17")  # 0.5.15 takes the tensors of adapters in another form
ALIGNED = 16  # bytes: where any dtype may begin


def modules_of(adapters: Iterable[str]) -> list[str]:
    """The last names of the modules that these adapters belong to, as SGLang knows them."""
    return sorted({adapted(name).removesuffix(".weight").rpartition(".")[2] for name in adapters})


def require_able(modules: Collection[str]) -> None:
    """Raise ConfigError unless the installed SGLang can hold adapters of these modules."""
    for line in adapter_misfits(modules):
        raise ConfigError(f"lora.targets: {line}")
    with contextlib.suppress(PackageNotFoundError):  # a launcher may start another server
        if (found := Version(version("sglang"))) < OLDEST:
            raise ConfigError(
                f"weights.lora: 'adapter' needs SGLang {OLDEST} or later, but {found} is installed; set it to 'merged'"
            )


@frozen
class Packed:
    """Where each adapter of an update lies in one piece of bytes."""

    places: Mapping[str, tuple[int, str, tuple[int, ...]]]  # by name: where it begins, its dtype and shape
    nbytes: int

    @classmethod
    def of(cls, manifest: Manifest) -> Self:
        places: dict[str, tuple[int, str, tuple[int, ...]]] = {}
        end = 0
        found = [entry for bucket in manifest.buckets for entry in bucket.entries if is_adapter(entry.name)]
        for entry in sorted(found, key=lambda entry: entry.name):  # the same for all updates, whatever their buckets
            dtype = entry.dtype or manifest.dtype
            places[entry.name] = end, dtype, entry.shape
            end += -(-entry.numel * getattr(torch, dtype).itemsize // ALIGNED) * ALIGNED
        return cls(places, end)

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """The adapters as views of `flat`, bytes [nbytes]."""
        return {
            name: flat.narrow(0, begin, math.prod(shape) * getattr(torch, dtype).itemsize)
            .view(getattr(torch, dtype))
            .view(shape)
            for name, (begin, dtype, shape) in self.places.items()
        }

    def pickled(self, path: str) -> bytes:
        """What unpickles as the adapters by name, views of the file at `path`, which must exist then. Of functions of
        Python and torch alone: SGLang unpickles little else."""
        flat = _Made(functools.partial(torch.from_file, dtype=torch.uint8), path, True, self.nbytes)
        made = {}
        for name, (begin, dtype, shape) in self.places.items():
            width = math.prod(shape) * getattr(torch, dtype).itemsize
            own = _Made(operator.methodcaller("narrow", 0, begin, width), flat)
            typed = _Made(operator.methodcaller("view", getattr(torch, dtype)), own)
            made[name] = _Made(operator.methodcaller("view", shape), typed)
        return pickle.dumps(made)


class _Made:
    """Unpickles as what a function returns."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self._reduced = function, arguments

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self._reduced


class Room:
    """Host memory for an update's adapters that a rank of the server writes and all ranks read, under a path of this
    process. It has no name in a file system: it goes with the last process that has mapped it, however that ends."""

    def __init__(self, packed: Packed) -> None:
        self.packed = packed
        self._descriptor = os.memfd_create("corerl-adapters")
        os.ftruncate(self._descriptor, packed.nbytes)
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def close(self) -> None:
        os.close(self._descriptor)


class Adapters:
    """What the server has loaded, by version. SGLang takes a name once: each version has its own.

    A version's room is the server's for as long as it is loaded, once for all ranks, and is then written again: memory
    that has been mapped and pinned before takes an update in a fraction of the time.
    """

    def __init__(self, server: Server, lora: LoraConfig, modules: Sequence[str], *, ranks: int) -> None:
        self._server, self._lora, self._modules = server, lora, modules
        self._ranks = ranks
        self._loaded: dict[int, Room] = {}  # by version, the oldest first
        self._stuck: set[int] = set()  # versions of which the server may count requests for ever
        self._rooms: list[Room] = []
        self._free: list[Room] = []

    @staticmethod
    def name(version: int) -> str:
        """By which a request asks for the adapters of this version; SGLang refuses one that it does not have."""
        return f"v{version}"

    def room(self, manifest: Manifest) -> Room:
        """Where a rank is to write the adapters of this update; nothing that the server has lies there."""
        packed = Packed.of(manifest)
        for room in self._free:
            if room.packed == packed:
                return room
        self._rooms.append(Room(packed))
        self._free.append(self._rooms[-1])
        return self._rooms[-1]

    def load(self, version: int, room: Room, stay: Collection[int]) -> None:
        """Have the server load what a rank has written, and unload what does not `stay`, but for the last of it:
        requests of that may still be on their way. Raises EngineFailed if it refuses."""
        # By no file that SGLang reads itself: a server that has started without weights reads none.
        payload = base64.b64encode(room.packed.pickled(room.path)).decode()
        body = {
            "lora_name": self.name(version),
            "config_dict": peft_config(_as_sglang_scales(self._lora), base="", targets=self._modules),
            "serialized_named_tensors": [payload] * self._ranks,
        }
        self._server.post("/load_lora_adapter_from_tensors", body)
        self._free.remove(room)
        self._loaded[version] = room
        for old in [each for each in self._loaded if each not in stay][:-1]:
            self._unload(old)

    def keep(self, version: int) -> None:
        """Note that a request was aborted before it began, or after it lost its place. SGLang never counts it as ended,
        and unloading its adapters, which first waits for that, would hang: they stay in the server's host memory."""
        self._stuck.add(version)

    def _unload(self, version: int) -> None:
        room = self._loaded.pop(version)
        if version not in self._stuck:
            with contextlib.suppress(CorerlError):
                self._server.post("/unload_lora_adapter", {"lora_name": self.name(version)})
                self._free.append(room)
                return
        self._rooms.remove(room)  # the server keeps it, which only takes memory
        room.close()

    def close(self) -> None:
        while self._rooms:
            self._rooms.pop().close()


def _as_sglang_scales(lora: LoraConfig) -> LoraConfig:
    """Adapters of the same scale, by alpha / rank, the only way that SGLang knows."""
    assert lora.rank is not None
    return evolve(lora, alpha=lora.scale * lora.rank, rslora=False)
