"""Test tools for plugin authors: the conformance suite, the plain backend, tolerances, worker pools, tiny models."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from corerl.plugin.contract import build_manager as build_manager
    from corerl.plugin.host import PluginHost as PluginHost
    from corerl.plugin.observers import Observers as Observers
    from corerl_doctor.smallest import drawn_model as drawn_model
    from corerl_doctor.smallest import smallest_config as smallest_config
    from corerl_testing.allocations import Allocations as Allocations
    from corerl_testing.compare import assert_follows as assert_follows
    from corerl_testing.compare import different as different
    from corerl_testing.compare import grad_norm_of as grad_norm_of
    from corerl_testing.compare import in_order as in_order
    from corerl_testing.compare import loss_of as loss_of
    from corerl_testing.compare import mean_apart as mean_apart
    from corerl_testing.compare import metrics_of as metrics_of
    from corerl_testing.compare import transformers_outputs as transformers_outputs
    from corerl_testing.compare import weights_apart as weights_apart
    from corerl_testing.compare import whole as whole
    from corerl_testing.episodes import scripted as scripted
    from corerl_testing.harness import Setup as Setup
    from corerl_testing.harness import State as State
    from corerl_testing.harness import error_of as error_of
    from corerl_testing.harness import forward as forward
    from corerl_testing.harness import make_samples as make_samples
    from corerl_testing.harness import make_worker as make_worker
    from corerl_testing.harness import packed_for_training as packed_for_training
    from corerl_testing.harness import running as running
    from corerl_testing.harness import samples_at as samples_at
    from corerl_testing.harness import start as start
    from corerl_testing.harness import state_of as state_of
    from corerl_testing.harness import step_at as step_at
    from corerl_testing.harness import train as train
    from corerl_testing.marks import with_variants as with_variants
    from corerl_testing.models import tiny_config as tiny_config
    from corerl_testing.models import tiny_fields as tiny_fields
    from corerl_testing.pool import RankFailed as RankFailed
    from corerl_testing.pool import RankPool as RankPool
    from corerl_testing.pool import Ranks as Ranks
    from corerl_testing.routing import assert_replays as assert_replays
    from corerl_testing.subject import Checkpoint as Checkpoint
    from corerl_testing.subject import Runs as Runs
    from corerl_testing.subject import Subject as Subject
    from corerl_testing.tolerances import BFLOAT16_GRAD_NORM as BFLOAT16_GRAD_NORM
    from corerl_testing.tolerances import BFLOAT16_LOSS as BFLOAT16_LOSS
    from corerl_testing.tolerances import GRAD_NORM as GRAD_NORM
    from corerl_testing.tolerances import LOGPROBS as LOGPROBS
    from corerl_testing.tolerances import LOSS as LOSS
    from corerl_testing.tolerances import Tolerance as Tolerance
    from corerl_testing.trial import Trial as Trial
else:
    from corerl.imports import on_demand

    __getattr__, __dir__ = on_demand(__name__, __file__)
