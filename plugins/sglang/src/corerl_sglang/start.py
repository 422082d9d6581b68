"""Start an engine: first its server, which imports for as long as torch is imported here. Imports nothing heavy."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from corerl.errors import ConfigError
from corerl_sglang.arguments import FEATURES_CACHED, HEALTH_GENERATES, PRELOAD, plain_allocator
from corerl_sglang.config import INSTALL, LAUNCHER
from corerl_sglang.server import Server

if TYPE_CHECKING:
    from corerl.config import ModelConfig
    from corerl.engines import EngineContext
    from corerl_sglang.config import SglangConfig
    from corerl_sglang.engine import SglangEngine


def start_engine(model: ModelConfig, options: SglangConfig, context: EngineContext) -> SglangEngine:
    server = start_server(model, options, context)
    try:
        from corerl_sglang.engine import SglangEngine
    except BaseException:
        server.stop()
        raise
    return SglangEngine(model, options, context, server)


def start_server(model: ModelConfig, options: SglangConfig, context: EngineContext) -> Server:
    """Start the server of an engine, which `Server.configure` then gives its arguments. Raises ConfigError where SGLang
    is not installed."""
    if options.launcher == LAUNCHER and find_spec("sglang") is None:
        raise ConfigError(
            "rollout.engine: 'sglang' starts SGLang's server, but SGLang is not installed with this Python "
            f"({sys.executable}); run {INSTALL} on a machine with a GPU, or choose rollout.engine='transformers'"
        )
    directory = Path(tempfile.mkdtemp(prefix="corerl-sglang-"))  # not writable by others: ranks unpickle what is in it
    try:
        return Server(
            context.name,
            launcher=options.launcher,
            environment={
                **plain_allocator(os.environ),
                PRELOAD: str(preloaded(options, context)),
                HEALTH_GENERATES: "false",
                # Features of a tower that is trained are of its old weights after an update.
                **({FEATURES_CACHED: "0"} if model.pictures and model.tower != "frozen" else {}),
                **({"CUDA_VISIBLE_DEVICES": ",".join(context.devices)} if context.devices else {}),
            },
            directory=directory,
            log=Path(context.run_dir) / "logs" / f"{context.name}.log" if context.run_dir else directory / "log",
            health_timeout=options.health_timeout,
        )
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise


def preloaded(options: SglangConfig, context: EngineContext) -> int:
    """Ranks that import while their server does. None with a launcher of one's own, whose module they would run before
    there are arguments, nor with data parallelism, for which another process starts the ranks."""
    if not options.preload or options.launcher != LAUNCHER or context.device != "cuda" or options.data_parallel > 1:
        return 0
    return options.tensor_parallel
