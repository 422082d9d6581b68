"""Start SGLang's HTTP server in this process: `python -m corerl_sglang.launch ARGUMENTS.json`.

The only module that imports SGLang. The file holds fields of SGLang's ServerArgs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import sys
from pathlib import Path

from corerl.errors import ConfigError
from corerl.messages import did_you_mean
from corerl_sglang.arguments import Key
from corerl_sglang.fp8 import for_device
from corerl_sglang.parent import end_with_parent, read_arguments


def main() -> None:
    """Run the server until it ends. Exits with one line if this SGLang does not know an argument."""
    file = Path(sys.argv[1])
    end_with_parent(file.parent)
    with contextlib.suppress(ModuleNotFoundError):  # run_server imports it late, from where this SGLang has it
        importlib.import_module("sglang.srt.entrypoints.http_server")
    from sglang.launch_server import run_server
    from sglang.srt.server_args import ServerArgs

    arguments = read_arguments(file)
    known = [field.name for field in dataclasses.fields(ServerArgs)]
    for name in arguments:
        if name not in known:
            sys.exit(f"SGLang's server has no argument {name!r}{did_you_mean(name, known)}")
    if arguments.get("quantization"):
        import torch

        try:
            arguments = for_device(arguments, torch.cuda.get_device_capability())
        except ConfigError as refused:
            sys.exit(refused.message)
    run_server(ServerArgs(**{**arguments, "api_key": Key(arguments["api_key"])}))


def prepare_rank() -> None:
    """In float32, run norms, activations and rotary embeddings in plain torch, since SGLang's kernels for them only
    take half precision. Called in each process that the server spawns, before it builds a model."""
    if json.loads(Path(sys.argv[1]).read_text()).get("dtype") != "float32":
        return
    from sglang.srt.layers.activation import SiluAndMul
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    for operation in (RMSNorm, SiluAndMul, RotaryEmbedding):
        operation.forward_cuda = operation.forward_native


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":  # a spawned process imports its parent's main module, with the same sys.argv
    prepare_rank()
