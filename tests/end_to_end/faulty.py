"""A backend that fails as its options say, named in a config as 'tests.end_to_end.faulty:SPEC'."""

from __future__ import annotations

from typing import Literal

from attrs import evolve, frozen

from corerl.config.options import option
from corerl_fsdp.config import FsdpConfig
from corerl_fsdp.spec import SPEC as FSDP

NAME = "tests.end_to_end.faulty:SPEC"


@frozen(kw_only=True)
class FaultyConfig(FsdpConfig):
    hook: Literal["", "init", "optimizer_step", "save", "update_weights"] = option(
        "where it fails; empty never", default=""
    )
    how: Literal["raise", "kill", "freeze", "wait", "full"] = option(
        "raise ValueError, SIGKILL itself, SIGSTOP itself, wait for a file `go` in the run directory, or write no "
        "large file any more",
        default="raise",
    )
    rank: int = option("the rank that fails", default=1)
    step: int = option("the rollout step at which it fails, in an update the weights' version", default=0)
    once: bool = option("not again if it has failed before in this run directory", default=False)


SPEC = evolve(FSDP, implementation="tests.end_to_end.faulty_backend:FaultyBackend", config=FaultyConfig)


def fault(hook: str, how: str, *, step: int = 0, once: bool = False) -> list[str]:
    """The overrides of a run whose rank 1 fails. With `once` the ranks are restarted; otherwise the run ends."""
    table = f'backends."{NAME}"'
    options = {"hook": hook, "how": how, "step": step, "once": str(once).lower()}
    return [
        *(f"backend.name={NAME}", f"train.restarts={int(once)}"),
        *(f"{table}.{name}={value}" for name, value in options.items()),
    ]
