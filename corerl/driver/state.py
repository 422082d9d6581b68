"""Read the state that a run's driver put into a checkpoint, and check that all that a run continues from is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from corerl.checkpoint.commit import read_state
from corerl.checkpoint.format import DRIVER_FILE, require_fields

SHOWN = {"prompt": str, "response": str, "answer": str, "reward": float}  # an answer of the first evaluation


def read_run(checkpoint: Path) -> dict[str, Any]:
    """The driver's state. Raises CheckpointError, also if it lacks a field or has one of another type."""
    state = read_state(checkpoint)
    where = f"{checkpoint / DRIVER_FILE}: state"
    require_fields(state, {"rollout_step": int, "source": dict, "config": dict}, where=where)
    if "kl_coef" in state:
        require_fields(state, {"kl_coef": float}, where=where)
    if "before" in state:
        require_fields(state, {"before": list}, where=where)
        for number, shown in enumerate(state["before"]):
            require_fields(shown, SHOWN, where=f"{where}: before[{number}]")
    source, where = state["source"], f"{where}: source"
    require_fields(source, {"rollout_step": int}, where=where)
    if "prompts" in source:
        require_fields(source, {"prompts": dict}, where=where)
        _require_position(source["prompts"], where=f"{where}: prompts")
    return state


def _require_position(position: dict[str, Any], *, where: str) -> None:
    """The position in the prompts: one epoch and offset, or one for each source of a mixture."""
    lists: dict[str, type] = {name: list for name in ("sources", "returned") if name in position}
    require_fields(position, lists, where=where)
    epochs = {"epoch": int, "offset": int}
    if "sources" not in position:
        require_fields(position, epochs, where=where)
    for number, stand in enumerate(position.get("sources", ())):
        require_fields(stand, {**epochs, "name": str, "prompts": int}, where=f"{where}: sources[{number}]")
