"""What is changed in DeepSpeed 0.19.8, and what tells when it need not be: a test that fails has a patch to remove."""

from __future__ import annotations

import inspect

import pytest
import torch
from attrs import evolve
from deepspeed.comm.torch import TorchBackend
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.utils import groups

from corerl_deepspeed.runtime import calling_deepspeed
from corerl_testing import RankFailed, RankPool, Runs
from plugins.deepspeed.tests import ranks


def test_deepspeed_still_compiles_an_operation_for_ranks_on_cpus() -> None:
    # runtime.join leaves it out: only tensor-parallel inference calls it.
    assert "build_shm_op()" in inspect.getsource(TorchBackend.__init__)
    assert "shm_comm_op" not in inspect.getsource(TorchBackend.all_reduce)


def test_deepspeed_still_sends_and_copies_parameters_that_hold_nothing(runs: Runs, rank_pool: RankPool) -> None:
    # build.nothing_to_copy
    with pytest.raises(RankFailed, match="_broadcast_model"):
        rank_pool.run(ranks.start_with_copies, evolve(runs.setup("deepspeed", "qwen3"), options={"stage": 2}))


def test_deepspeed_still_makes_gradients_in_stage_3_and_drops_them() -> None:
    # build.nothing_to_copy
    made = inspect.getsource(DeepSpeedZeroOptimizer_Stage3.initialize_optimizer_states)
    assert "gradient_buffer = torch.zeros(int(largest_numel)" in made and "group.grad = None" in made


def test_deepspeed_still_makes_a_second_group_of_all_ranks() -> None:
    # runtime.join
    assert "_WORLD_GROUP = dist.new_group(" in inspect.getsource(groups._clone_world_group)


def test_deepspeed_still_keeps_every_stage_3_model_that_has_trained() -> None:
    # state.let_go
    assert "    @functools.lru_cache(maxsize=None)\n    def __params_to_release(" in inspect.getsource(
        PartitionedParameterCoordinator
    )


def test_stage_1_with_bfloat16_alone_still_takes_another_optimizer() -> None:
    # build.always_zero
    choice = inspect.getsource(DeepSpeedEngine._do_optimizer_sanity_check)
    assert "self.zero_optimization_stage(\n            ) == 1 and not self.zero_cpu_offload()" in choice
    assert choice.count("return BFLOAT16") == 2 and choice.count("return ZERO_OPTIMIZATION") == 1


def test_matrices_are_multiplied_by_torch_again_after_each_call() -> None:
    multiply = torch.nn.functional.linear
    with calling_deepspeed(partitioned=True):
        assert torch.nn.functional.linear is not multiply
    assert torch.nn.functional.linear is multiply
