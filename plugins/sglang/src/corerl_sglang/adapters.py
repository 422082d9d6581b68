"""Adapters in SGLang's server: a directory of PEFT for each version, which its ranks read from memory-backed files."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from corerl.config import LoraConfig
from corerl.errors import CorerlError
from corerl.models import PEFT_CONFIG, PEFT_WEIGHTS, peft_config
from corerl.weights import adapted
from corerl_sglang.server import Server

KEPT = 2  # versions that the server has: requests of the last one may still be on their way while the next is loaded


def modules_of(adapters: Iterable[str]) -> list[str]:
    """The last names of the modules that these adapters belong to, as SGLang knows them."""
    return sorted({adapted(name).removesuffix(".weight").rpartition(".")[2] for name in adapters})


def write(directory: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Called in one rank of the server, which has them whole."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / PEFT_WEIGHTS)


class Adapters:
    """What the server has loaded, by version. SGLang takes a name once: each version has its own."""

    def __init__(self, server: Server, lora: LoraConfig, modules: list[str], directory: Path) -> None:
        self._server, self._lora, self._modules, self._directory = server, lora, modules, directory
        self._loaded: list[int] = []

    def directory(self, version: int) -> Path:
        return self._directory / self.name(version)

    @staticmethod
    def name(version: int) -> str:
        """By which a request asks for the adapters of this version; SGLang refuses one that it does not have."""
        return f"v{version}"

    def load(self, version: int) -> None:
        """Have the server load what a rank has written. Raises EngineFailed if it refuses."""
        directory = self.directory(version)
        config = peft_config(self._lora, base="", targets=self._modules)
        (directory / PEFT_CONFIG).write_text(json.dumps(config))
        self._server.post("/load_lora_adapter", {"lora_name": self.name(version), "lora_path": str(directory)})
        self._loaded.append(version)
        while len(self._loaded) > KEPT:
            self._unload(self._loaded.pop(0))

    def _unload(self, version: int) -> None:
        with contextlib.suppress(CorerlError):  # one that is kept only takes memory
            self._server.post("/unload_lora_adapter", {"lora_name": self.name(version)})
        shutil.rmtree(self.directory(version), ignore_errors=True)
