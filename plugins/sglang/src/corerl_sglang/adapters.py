"""Adapters in SGLang's server, which has those of each version under a name of their own."""

from __future__ import annotations

import base64
import contextlib
import pickle
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from attrs import evolve
from packaging.version import Version
from safetensors.torch import load_file, save_file

from corerl.config import LoraConfig
from corerl.errors import ConfigError, CorerlError
from corerl.models import peft_config
from corerl.weights import adapted
from corerl_sglang.server import Server
from corerl_sglang.targets import misfits

OLDEST = Version("0.5.17")  # 0.5.15 takes the tensors of adapters in another form
KEPT = 2  # versions that the server has: requests of the last one may still be on their way while the next is loaded


def modules_of(adapters: Iterable[str]) -> list[str]:
    """The last names of the modules that these adapters belong to, as SGLang knows them."""
    return sorted({adapted(name).removesuffix(".weight").rpartition(".")[2] for name in adapters})


def require_able(modules: Collection[str]) -> None:
    """Raise ConfigError unless the installed SGLang can hold adapters of these modules."""
    for line in misfits(modules):
        raise ConfigError(f"lora.targets: {line}")
    with contextlib.suppress(PackageNotFoundError):  # a launcher may start another server
        if (found := Version(version("sglang"))) < OLDEST:
            raise ConfigError(
                f"weights.lora: 'adapter' needs SGLang {OLDEST} or later, but {found} is installed; set it to 'merged'"
            )


def write(file: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Called in one rank of the server, which has them whole."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)


class Adapters:
    """What the server has loaded, by version. SGLang takes a name once: each version has its own."""

    def __init__(
        self, server: Server, lora: LoraConfig, modules: Sequence[str], directory: Path, *, ranks: int
    ) -> None:
        self._server, self._lora, self._modules, self._directory = server, lora, modules, directory
        self._ranks = ranks
        self._loaded: list[int] = []
        self._stuck: set[int] = set()  # versions of which the server may count requests for ever

    def file(self, number: int) -> Path:
        """In which a rank leaves the adapters of this version."""
        return self._directory / f"adapters-{self.name(number)}.safetensors"

    @staticmethod
    def name(version: int) -> str:
        """By which a request asks for the adapters of this version; SGLang refuses one that it does not have."""
        return f"v{version}"

    def load(self, version: int) -> None:
        """Have the server load what a rank has written. Raises EngineFailed if it refuses."""
        tensors = load_file(self.file(version))
        # Not by the file's name: a server that has started without weights reads none. Each rank unpickles its own.
        payload = base64.b64encode(pickle.dumps(tensors)).decode()
        body = {
            "lora_name": self.name(version),
            "config_dict": peft_config(_as_sglang_scales(self._lora), base="", targets=self._modules),
            "serialized_named_tensors": [payload] * self._ranks,
        }
        self._server.post("/load_lora_adapter_from_tensors", body)
        self.file(version).unlink()
        self._loaded.append(version)
        while len(self._loaded) > KEPT:
            self._unload(self._loaded.pop(0))

    def interrupted(self) -> None:
        """Note that requests are aborted. Those that still wait SGLang never counts as ended, and unloading their
        adapters, which it first waits for, would hang: these stay in its host memory."""
        self._stuck.update(self._loaded[-1:])

    def _unload(self, version: int) -> None:
        if version in self._stuck:
            return
        with contextlib.suppress(CorerlError):  # one that is kept only takes memory
            self._server.post("/unload_lora_adapter", {"lora_name": self.name(version)})


def _as_sglang_scales(lora: LoraConfig) -> LoraConfig:
    """Adapters of the same scale, by alpha / rank, the only way that SGLang knows."""
    assert lora.rank is not None
    return evolve(lora, alpha=lora.scale * lora.rank, rslora=False)
