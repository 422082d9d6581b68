"""Start SGLang's HTTP server in this process: `python -m corerl_sglang.launch ARGUMENTS.json`.

The only module that imports SGLang. The file holds fields of SGLang's ServerArgs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import math
import multiprocessing
import os
import resource
import runpy
import shutil
import signal
import sys
import threading
import time
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from corerl.errors import ConfigError
from corerl.messages import did_you_mean
from corerl_sglang.arguments import PRELOAD, TRANSPORT, VOCABULARY, Key
from corerl_sglang.fp8 import for_device
from corerl_sglang.waiting import NAME, Waiting, environment, lend

POLL_SECONDS = 0.05
STATIC_SPLITS = "SGLANG_TRITON_DECODE_ATTN_STATIC_KV_SPLITS"

# Of this version it is known what is set between the start of the server and that of a rank, and when it is read.
PRELOADED = "0.5.17"
# `_set_envs_and_config` in entrypoints/engine.py and `_handle_environment_variables` in server_args.py set these, and
# modules of a rank read them as they are imported, as does CUDA, which some of them ask for the GPU's capability.
SET = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "8",
    "CUDA_MODULE_LOADING": "AUTO",
    "SGLANG_ENABLE_TORCH_COMPILE": "0",
    "SGLANG_DISABLE_OUTLINES_DISK_CACHE": "0",
}
SET_IF_UNSET = {
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "TRTLLM_ENABLE_PDL": "1",
    "CUTE_DSL_LOG_LEVEL": "30",
    "CUTE_DSL_LOG_TO_CONSOLE": "1",
}
# They also set these, which depend on arguments or the GPU, and which a rank reads after its imports alone: in
# functions, or (FP8_WO_A_GEMM) in a module of models, which are imported when the model is built.
READ_LATE = (
    "NCCL_ALGO",
    "SGLANG_ENABLE_CP_V2",
    "SGLANG_ENABLE_DETERMINISTIC_INFERENCE",
    "SGLANG_ENABLE_UNIFIED_RADIX_TREE",
    "SGLANG_MAMBA_SSM_DTYPE",
    "SGLANG_OPT_FP8_WO_A_GEMM",
    "SGLANG_RUN_ID",
    "SGLANG_USE_CUDA_IPC_TRANSPORT",
)
SAVER = "torch_memory_saver_hook_mode_preload"  # its library, of each version of CUDA
FILES = 65535  # to which `set_ulimit` raises the number of open files, and the stack in KiB


def main() -> None:
    """Run the server until it ends. Exits with one line if this SGLang does not know an argument."""
    file = Path(sys.argv[1])
    end_with_parent(file.parent)
    ranks = start_ranks(int(os.environ.pop(PRELOAD, "0")))
    with contextlib.suppress(ModuleNotFoundError):  # run_server imports it late, from where this SGLang has it
        importlib.import_module("sglang.srt.entrypoints.http_server")
    from sglang.launch_server import run_server
    from sglang.srt.server_args import ServerArgs

    arguments = read_arguments(file)
    arguments.pop(VOCABULARY, None)
    known = [field.name for field in dataclasses.fields(ServerArgs)]
    if arguments.get("enable_multimodal") and TRANSPORT not in known:
        sys.exit(f"model.pictures wants SGLang 0.5.17 or later, but {metadata.version('sglang')} is installed")
    for name in arguments:
        if name not in known:
            sys.exit(f"SGLang's server has no argument {name!r}{did_you_mean(name, known)}")
    if arguments.get("quantization"):
        import torch

        try:
            arguments = for_device(arguments, torch.cuda.get_device_capability())
        except ConfigError as refused:
            sys.exit(refused.message)
    if ranks:
        lend(ranks, importlib.import_module("sglang.srt.entrypoints.engine"), "run_scheduler_process")
    run_server(ServerArgs(**{**arguments, "api_key": Key(arguments["api_key"])}))


def end_with_parent(directory: Path) -> None:
    """Call this first in a process whose standard input is a pipe from its parent and which leads its own session.
    `directory`, which the parent made for it, is removed at the end.

    A pipe closes when its last writer is gone, killed or not. (The kernel's parent-death signal is tied to the thread
    that started the process, and a Ray actor's threads come and go.)
    """

    def wait() -> None:
        while os.read(0, 1):
            pass
        shutil.rmtree(directory, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)  # including the ranks, which this process started

    threading.Thread(target=wait, name="corerl-parent", daemon=True).start()


def read_arguments(file: Path) -> dict[str, Any]:
    """What the parent has written to `file`, once it has. A server is started before they are known, so as to import
    meanwhile what it needs."""
    while not file.exists():
        time.sleep(POLL_SECONDS)
    arguments: dict[str, Any] = json.loads(file.read_text())
    return arguments


def start_ranks(count: int) -> list[Waiting]:
    """Processes that import what a rank needs, with the limits and the environment that SGLang starts ranks with."""
    if not count:
        return []
    if (version := metadata.version("sglang")) != PRELOADED:
        only = f"only for SGLang {PRELOADED}, not {version}, is it known how to start them before"
        print(f"corerl: ranks import after the server: {only}", file=sys.stderr, flush=True)
        return []
    raise_limits()
    unset = {name: value for name, value in SET_IF_UNSET.items() if name not in os.environ}
    with environment({**unset, **SET, **memory_saver()}):
        return [Waiting("sglang.srt.managers.scheduler", prepare_rank, late=READ_LATE) for _ in range(count)]


def memory_saver() -> dict[str, str]:
    """The variable by which a process preloads the library behind SGLang's sleep, which is found here as
    torch_memory_saver (0.0.10) does: that would import torch first, for seconds. Without it, or with another, the
    process is not used."""
    package, torch = (find_spec(name) for name in ("torch_memory_saver", "torch"))
    if package is None or package.origin is None or torch is None or torch.origin is None:
        return {}
    cuda = runpy.run_path(str(Path(torch.origin).with_name("version.py")))["cuda"] or ""
    pattern, directory = f"{SAVER}_cu{cuda.partition('.')[0]}.*.so", Path(package.origin).parent
    found = [*directory.glob(pattern), *directory.parent.glob(pattern)]
    before = [os.environ["LD_PRELOAD"]] if "LD_PRELOAD" in os.environ else []
    return {"LD_PRELOAD": ":".join([str(found[0]), *before])} if found else {}


def raise_limits() -> None:
    """As SGLang (0.5.17: `set_ulimit`) does before it starts a rank."""
    for limit, wanted in ((resource.RLIMIT_NOFILE, FILES), (resource.RLIMIT_STACK, 1024 * FILES)):
        soft, hard = resource.getrlimit(limit)
        if soft < wanted:
            with contextlib.suppress(ValueError):  # above the hard limit, of which SGLang warns
                resource.setrlimit(limit, (wanted, hard))


def prepare_rank() -> None:
    """Called in each process that the server spawns, before it builds a model. It changes attributes of classes: names
    that others import are theirs already in a rank that has imported before."""
    arguments = json.loads(Path(sys.argv[1]).read_text())
    split_keys_of_equal_rows(model_config(arguments))
    if VOCABULARY in arguments:
        sample_below(arguments[VOCABULARY])
    if arguments.get("dtype") == "float32":
        compute_in_float32()
    if arguments.get("enable_multimodal") and model_config(arguments)["model_type"] == "gemma3":
        mask_rows_of_text()


def model_config(arguments: dict[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((Path(arguments["model_path"]) / "config.json").read_text())
    return config


def split_keys_of_equal_rows(config: dict[str, Any]) -> None:
    """Let Triton's attention divide the keys of each row into `triton_attention_num_kv_splits` parts when it decodes.
    Its own rule (0.5.17: `get_num_kv_splits_triton`) takes as many only where rows differ in length: of 64 rows that
    have begun together it divides the keys in 2 and leaves multiprocessors without work, which is a fifth slower at
    4,000 tokens. An environment that sets the variable has the last word, and so has
    `enable_deterministic_inference`. Latent attention allows hundreds of parts (`_mla_decode_kv_splits_cap`), so
    there the rule stays."""
    if "kv_lora_rank" not in {**config, **(config.get("text_config") or {})}:
        os.environ.setdefault(STATIC_SPLITS, "true")


def sample_below(vocabulary: int) -> None:
    """Give the ids from `vocabulary` on, which are padding of the embedding, probability 0. SGLang (0.5.15 to 0.5.17)
    has a `logit_bias` for this, which takes a request's entries one by one, again for each request."""
    from sglang.srt.layers.sampler import Sampler

    forward = Sampler.forward

    def masked(self: Any, logits_output: Any, *args: Any, **kwargs: Any) -> Any:
        logits_output.next_token_logits[:, vocabulary:] = -math.inf
        return forward(self, logits_output, *args, **kwargs)

    Sampler.forward = masked
    with contextlib.suppress(ModuleNotFoundError):  # in 0.5.15, with which prompts are not scored
        score_below(vocabulary)


def score_below(vocabulary: int) -> None:
    """The same where prompts get log-probs, before the sampler has the logits."""
    from sglang.srt.layers.logprob_processor import InputLogprobProcessor

    forward = InputLogprobProcessor.forward

    def masked(self: Any, *, get_logits_fn: Any, **kwargs: Any) -> Any:
        def below(*args: Any, **named: Any) -> Any:
            logits = get_logits_fn(*args, **named)
            logits[:, vocabulary:] = -math.inf
            return logits

        return forward(self, get_logits_fn=below, **kwargs)

    InputLogprobProcessor.forward = masked


def compute_in_float32() -> None:
    """Run norms, activations and rotary embeddings in plain torch, since SGLang's kernels for them only take half
    precision."""
    from sglang.srt.layers.activation import SiluAndMul
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    for operation in (RMSNorm, SiluAndMul, RotaryEmbedding):
        operation.forward_cuda = operation.forward_native


def mask_rows_of_text() -> None:
    """Let rows without pictures be in one batch with others. SGLang (0.5.17) ends itself at the first such row of a
    Gemma 3, for which its batch has None in the place of pictures; Gemma 4's class looks for that."""
    from sglang.srt.models.gemma3_mm import Gemma3ForConditionalGeneration as Model

    prepare = Model.prepare_attn_masks

    def prepared(self: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> None:
        own = forward_batch.mm_inputs
        forward_batch.mm_inputs = [SimpleNamespace(mm_items=()) if each is None else each for each in own]
        try:
            prepare(self, forward_batch, *args, **kwargs)
        finally:
            forward_batch.mm_inputs = own

    Model.prepare_attn_masks = prepared


if __name__ == "__main__":
    main()
# A spawned process imports its parent's main module, with the same sys.argv. One that waits has no arguments yet.
elif __name__ == "__mp_main__" and multiprocessing.current_process().name != NAME:
    prepare_rank()
