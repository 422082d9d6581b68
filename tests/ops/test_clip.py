from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed import multi_threaded_pg as threaded

from corerl.ops.clip import clip_factor, grad_norm, scale_grads
from corerl_testing.pool import RankPool
from tests.ops import ranks


def plain_params() -> list[nn.Parameter]:
    params = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(3))]
    params[0].grad, params[1].grad = torch.tensor([3.0, 0.0]), torch.tensor([[0.0, 4.0], [12.0, 0.0]])
    return params  # 3, 4, 12: norm 13; the last has no gradient


@pytest.mark.parametrize(("bound", "norm_after"), [(6.5, 6.5), (100.0, 13.0), (0.0, 13.0)])
def test_gradients_are_scaled_down_to_the_bound_and_never_up(bound: float, norm_after: float) -> None:
    params = plain_params()
    scale_grads(params, clip_factor(bound, float(grad_norm(params))))
    assert float(grad_norm(params)) == pytest.approx(norm_after, rel=1e-6)
    assert params[0].grad is not None and float(params[0].grad[0]) == pytest.approx(3 * norm_after / 13, rel=1e-6)
    assert params[2].grad is None


def on_ranks(world_size: int, body: Callable[[int], None]) -> None:
    """Run `body(rank)` on threads that are ranks of one process group, with real collectives between them.

    The groups live in the threads' own world, which goes with them; torch 2.11 cannot destroy them one by one.
    """
    errors: list[BaseException] = []
    store = dist.HashStore()

    def rank_thread(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=world_size, store=store)
            body(rank)
        except BaseException as error:
            errors.append(error)
            threaded.ProcessLocalGroup.exception_handle(error)  # wakes the others

    threaded._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    try:
        threads = [threading.Thread(target=rank_thread, args=(rank,)) for rank in range(world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        threaded._uninstall_threaded_pg()
        threaded.ProcessLocalGroup.reset()
    if errors:
        raise errors[0]


def sharded(full: torch.Tensor, mesh: DeviceMesh, placements: list[Placement]) -> DTensor:
    """Each rank's part of a tensor that all of them know."""
    local = full
    for axis, placement in enumerate(placements):
        if not placement.is_replicate():
            pieces, _ = placement._split_tensor(local, mesh.size(axis), with_padding=False)
            local = pieces[mesh.get_local_rank(axis)]
    return DTensor.from_local(local.clone(), mesh, placements, run_check=False, shape=full.shape, stride=full.stride())


def test_gradients_on_several_meshes_sharded_and_replicated_count_once_each() -> None:
    layouts: list[tuple[str, list[Placement]]] = [
        ("grid", [Shard(0), Shard(1)]),
        ("grid", [Replicate(), Shard(0)]),
        ("grid", [_StridedShard(0, split_factor=2), Shard(0)]),
        ("line", [Shard(0)]),  # 5 rows over 4 ranks: 2, 2, 1, 0
        ("line", [Replicate()]),
        ("plain", []),
    ]
    generator = torch.Generator().manual_seed(0)
    fulls = [torch.randn(5 if where == "line" else 8, 6, generator=generator) for where, _ in layouts]
    wanted = torch.cat([full.flatten() for full in fulls]).norm()
    norms, tripled, after = ([torch.zeros(()) for _ in range(4)] for _ in range(3))

    def body(rank: int) -> None:
        meshes = {"grid": init_device_mesh("cpu", (2, 2)), "line": init_device_mesh("cpu", (4,))}
        params = []
        for (where, placements), full in zip(layouts, fulls, strict=True):
            grad = full.clone() if where == "plain" else sharded(full, meshes[where], placements)
            param = nn.Parameter(torch.zeros_like(grad))
            param.grad = grad
            params.append(param)
        absent = nn.Parameter(sharded(torch.zeros(4, 2), meshes["line"], [Shard(0)]))
        if rank == 2:  # a gradient on one rank alone must not hang the others
            absent.grad = torch.zeros_like(absent)
        params.append(absent)
        norms[rank] = grad_norm(params)
        scale_grads(params, 3.0)
        tripled[rank] = grad_norm(params)
        scale_grads(params, clip_factor(1.0, float(tripled[rank])))
        after[rank] = grad_norm(params)

    on_ranks(4, body)
    for norm, larger, clipped in zip(norms, tripled, after, strict=True):
        torch.testing.assert_close(norm, wanted, rtol=1e-6, atol=0)
        torch.testing.assert_close(larger, 3 * wanted, rtol=1e-6, atol=0)
        torch.testing.assert_close(clipped, torch.ones(()), rtol=1e-5, atol=0)


def test_replicas_whose_norms_differ_in_the_last_bit_end_with_the_same_one(rank_pool: RankPool) -> None:
    ulp = torch.finfo(torch.float32).eps
    larger = float(torch.tensor(1.0 + ulp).square().sqrt())
    assert larger > 1.0
    assert rank_pool.run(ranks.norm_of_replicas, ulp) == [larger, larger]


def test_a_gradient_that_is_still_a_partial_sum_is_refused() -> None:
    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        param = nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Replicate()], src_data_rank=None))
        param.grad = DTensor.from_local(torch.ones(4), mesh, [Partial()], run_check=False)
        with pytest.raises(ValueError, match="partial sum"):
            grad_norm([param])

    on_ranks(2, body)
