"""Adapters in SGLang's server, which has those of each version under a name of their own."""

from __future__ import annotations

import base64
import contextlib
import pickle
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from corerl.config import LoraConfig
from corerl.errors import CorerlError
from corerl.models import peft_config
from corerl.weights import adapted
from corerl_sglang.server import Server

KEPT = 2  # versions that the server has: requests of the last one may still be on their way while the next is loaded


def modules_of(adapters: Iterable[str]) -> list[str]:
    """The last names of the modules that these adapters belong to, as SGLang knows them."""
    return sorted({adapted(name).removesuffix(".weight").rpartition(".")[2] for name in adapters})


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

    def file(self, version: int) -> Path:
        """In which a rank leaves the adapters of this version."""
        return self._directory / f"adapters-{self.name(version)}.safetensors"

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
            "config_dict": peft_config(self._lora, base="", targets=self._modules),
            "serialized_named_tensors": [payload] * self._ranks,
        }
        self._server.post("/load_lora_adapter_from_tensors", body)
        self.file(version).unlink()
        self._loaded.append(version)
        while len(self._loaded) > KEPT:
            self._unload(self._loaded.pop(0))

    def _unload(self, version: int) -> None:
        with contextlib.suppress(CorerlError):  # one that is kept only takes memory
            self._server.post("/unload_lora_adapter", {"lora_name": self.name(version)})
