"""Communicators are suspended in one order on all ranks, and in no group that another one holds is anything changed."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from corerl.memory import communicators
from corerl.memory.communicators import Communicators, refusal
from corerl_testing.pool import RankPool

Backend: Any = torch._C._distributed_c10d.Backend


def over_two_groups() -> dict[str, Any]:
    """What a rank's groups are told, by the ranks in each; gloo has no memory to give back, and stands for NCCL."""
    told: list[tuple[str, list[int]]] = []
    single = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    both = dist.new_group([0, 1])
    cpu = torch.device("cpu")
    # Held, so that each stays the same object in Python.
    known = [(group._get_backend(cpu), dist.get_process_group_ranks(group)) for group in (single, both)]

    def noted(verb: str) -> Any:
        def note(backend: Any) -> None:
            names = [ranks for each, ranks in known if each is backend]
            if not names:  # the pool's own group, in which no collective has run
                raise RuntimeError("NCCL communicator not initialized.")
            told.extend((verb, ranks) for ranks in names)

        return note

    with (
        mock.patch.object(communicators, "refusal", return_value=""),
        mock.patch.object(Backend, "suspend", noted("suspend")),
        mock.patch.object(Backend, "resume", noted("resume")),
    ):
        on_cpu, of_nccl = Communicators(cpu, library="gloo"), Communicators(cpu)
        of_nccl.suspend()
        before = list(told)
        for _ in range(2):
            on_cpu.suspend()
        for _ in range(2):
            on_cpu.resume()
    total = torch.ones(())
    dist.all_reduce(total, group=both)
    for group in (both, single):
        dist.destroy_process_group(group)
    return {"of another library": before, "told": told, "total": float(total)}


def test_every_group_with_a_communicator_is_suspended_once_and_in_the_order_of_their_making(
    rank_pool: RankPool,
) -> None:
    for rank, found in enumerate(rank_pool.run(over_two_groups)):
        assert found["of another library"] == []
        assert found["told"] == [(verb, ranks) for verb in ("suspend", "resume") for ranks in ([rank], [0, 1])]
        assert found["total"] == 2.0


def over_a_broken_group() -> str:
    """What is raised where a group's communicator cannot be suspended."""

    def fail(backend: Any) -> None:
        raise RuntimeError("NCCL error: unhandled system error")

    with mock.patch.object(communicators, "refusal", return_value=""), mock.patch.object(Backend, "suspend", fail):
        try:
            Communicators(torch.device("cpu"), library="gloo").suspend()
        except RuntimeError as error:
            return str(error)
    return ""


def test_a_communicator_that_fails_to_suspend_is_no_group_without_one(rank_pool: RankPool) -> None:
    assert rank_pool.run(over_a_broken_group) == ["NCCL error: unhandled system error"] * 2


@pytest.mark.parametrize(
    ("available", "version", "reason"),
    [
        (False, (2, 29, 7), "was built without NCCL"),
        (True, (2, 28, 9), ": NCCL 2.28.9 cannot suspend them; use 2.29.7 or later"),
        (True, (2, 29, 7), ""),
        (True, (2, 30, 4, "suffix"), ""),
    ],
)
def test_what_cannot_be_suspended_says_why(
    monkeypatch: pytest.MonkeyPatch, available: bool, version: tuple[Any, ...], reason: str
) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: available)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: version)
    monkeypatch.setattr(Backend, "suspend", None, raising=False)
    said = refusal()
    assert said.endswith(reason) and bool(said) == bool(reason)


def test_a_torch_that_cannot_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch._C._distributed_c10d, "Backend", object)
    assert refusal().endswith("cannot suspend them; use 2.12 or later")
