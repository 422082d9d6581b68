"""Write DeepSpeed's own checkpoint next to CoreRL's, for tools that read no other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from corerl.errors import SaveFailed
from corerl.types import Step
from corerl.weights import gather_plain
from corerl_deepspeed.build import Model

DIRECTORY = "deepspeed"  # in the directory of the role


def write(model: Model, directory: Path, step: Step) -> None:
    """Write what `engine.save_checkpoint` writes, and the file `latest`, which names it. Called on every rank, inside
    `calling_deepspeed`; if one cannot write, raises SaveFailed on all."""
    engine, failures = model.engine, list[str]()

    def kept(call: Callable[..., Any]) -> Callable[..., None]:
        """Collect errors of `call` instead of raising: ranks synchronize between files, and would wait for this one."""

        def wrapped(*args: Any, **kwargs: Any) -> None:
            try:
                call(*args, **kwargs)
            except (OSError, RuntimeError) as error:  # the second is torch's, for a full disk
                failures.append(" ".join(str(error).split()))

        return wrapped

    engine.global_steps = step.optimizer_step  # DeepSpeed counts from the start of this process
    tag, files = f"global_step{step.optimizer_step}", engine.checkpoint_engine
    with (
        mock.patch.object(files, "makedirs", kept(files.makedirs)),
        mock.patch.object(files, "save", kept(files.save)),
        mock.patch.object(engine, "_copy_recovery_script", kept(engine._copy_recovery_script)),
    ):
        engine.save_checkpoint(str(directory), tag=tag, save_latest=False)
    if dist.get_rank() == 0:
        kept((directory / "latest").write_text)(tag)
    for rank, failure in enumerate(gather_plain(next(iter(failures), ""))):
        if failure:
            raise SaveFailed(f"cannot write {directory}: rank {rank}: {failure}")
