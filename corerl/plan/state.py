"""Read the state that a run's driver put into a checkpoint, and check that all that a run continues from is there."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from corerl.checkpoint.commit import read_state
from corerl.checkpoint.format import DRIVER_FILE, require_fields
from corerl.errors import CheckpointError
from corerl.messages import short_repr

SHOWN = {"prompt": str, "response": str, "answer": str, "reward": float}  # an answer of the first evaluation


def read_run(checkpoint: Path) -> dict[str, Any]:
    """The driver's state. Raises CheckpointError, also if it lacks a field or has one of another type."""
    state = read_state(checkpoint)
    where = f"{checkpoint / DRIVER_FILE}: state"
    require_fields(state, {"rollout_step": int, "source": dict, "config": dict}, where=where)
    if "kl_coef" in state:
        require_fields(state, {"kl_coef": float}, where=where)
    if "kept" in state:
        require_fields(state, {"kept": dict}, where=where)
        require_fields(state["kept"], dict.fromkeys(state["kept"], str), where=f"{where}: kept")
    if "before" in state:
        require_fields(state, {"before": list}, where=where)
        for number, shown in enumerate(state["before"]):
            require_fields(shown, SHOWN, where=f"{where}: before[{number}]")
    _require_counts(state, ["rollout_step"], where=where)
    if "schedules" in state:
        require_fields(state, {"schedules": dict}, where=where)
        for role, stand in state["schedules"].items():
            own = f"{where}: schedules: {role}"
            _require_counts(stand, ["optimizer_step", "rollout_step"], where=own)
            require_fields(stand, {"progress": float}, where=own)
    if "prompts" in state["source"]:
        _require_data(state, where=where)
    source, where = state["source"], f"{where}: source"
    _require_counts(source, ["rollout_step", *(["begun"] if "begun" in source else [])], where=where)
    for name in ("prompts", "sampled"):
        if name in source:
            require_fields(source, {name: dict}, where=where)
            _require_position(source[name], sources=len(state["data"]["sources"]), where=f"{where}: {name}")
    return state


def _require_data(state: dict[str, Any], *, where: str) -> None:
    """What the run knows of its rows."""
    require_fields(state, {"data": dict}, where=where)
    require_fields(state["data"], {"sources": list, "identity": str}, where=f"{where}: data")
    for number, rows in enumerate(state["data"]["sources"]):
        wanted = {"name": str, "weight": float, "rows": str, "held_out": str, "added": list}
        require_fields(rows, wanted, where=f"{where}: data: sources[{number}]")
        for at, added in enumerate(rows["added"]):
            _require_counts(added, ["epoch", "rows"], where=f"{where}: data: sources[{number}]: added[{at}]")


def _require_position(position: dict[str, Any], *, sources: int, where: str) -> None:
    """The position in the prompts: how far each source is."""
    require_fields(position, {"data": str, "seed": int, "sources": list}, where=where)
    if len(position["sources"]) != sources:
        raise CheckpointError(
            f"{where}: 'sources' has {len(position['sources'])}, wanted {sources}; resume from another checkpoint"
        )
    for number, stand in enumerate(position["sources"]):
        own = f"{where}: sources[{number}]"
        _require_counts(stand, ["epoch", "offset", "prompts", "taken"], where=own)
        if stand["offset"] > stand["prompts"]:
            raise CheckpointError(
                f"{own}: 'offset' is {short_repr(stand['offset'], 40)}, wanted at most {stand['prompts']}, the number "
                "of prompts; resume from another checkpoint"
            )
    if "returned" in position:
        require_fields(position, {"returned": list}, where=where)
        returned = {str(number): index for number, index in enumerate(position["returned"])}
        _require_counts(returned, returned, where=f"{where}: returned")


def _require_counts(content: Any, names: Iterable[str], *, where: str) -> None:
    """Raise CheckpointError unless each of these fields is an integer of at least 0."""
    require_fields(content, dict.fromkeys(names, int), where=where)
    for name in names:
        if content[name] < 0:
            found = short_repr(content[name], 40)
            raise CheckpointError(f"{where}: {name!r} is {found}, wanted at least 0; resume from another checkpoint")
