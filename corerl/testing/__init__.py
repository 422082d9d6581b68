"""Test tools for plugin authors: the conformance suite, the plain backend, tolerances, worker pools, tiny models."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from corerl.models.smallest import smallest_config as smallest_config
    from corerl.plugin.contract import build_manager as build_manager
    from corerl.plugin.host import PluginHost as PluginHost
    from corerl.plugin.observers import Observers as Observers
    from corerl.testing.allocations import Allocations as Allocations
    from corerl.testing.compare import assert_follows as assert_follows
    from corerl.testing.compare import different as different
    from corerl.testing.compare import grad_norm_of as grad_norm_of
    from corerl.testing.compare import in_order as in_order
    from corerl.testing.compare import loss_of as loss_of
    from corerl.testing.compare import mean_apart as mean_apart
    from corerl.testing.compare import metrics_of as metrics_of
    from corerl.testing.compare import transformers_outputs as transformers_outputs
    from corerl.testing.compare import weights_apart as weights_apart
    from corerl.testing.compare import whole as whole
    from corerl.testing.episodes import scripted as scripted
    from corerl.testing.harness import Setup as Setup
    from corerl.testing.harness import State as State
    from corerl.testing.harness import error_of as error_of
    from corerl.testing.harness import forward as forward
    from corerl.testing.harness import make_samples as make_samples
    from corerl.testing.harness import make_worker as make_worker
    from corerl.testing.harness import packed_for_training as packed_for_training
    from corerl.testing.harness import running as running
    from corerl.testing.harness import samples_at as samples_at
    from corerl.testing.harness import start as start
    from corerl.testing.harness import state_of as state_of
    from corerl.testing.harness import step_at as step_at
    from corerl.testing.harness import train as train
    from corerl.testing.marks import with_variants as with_variants
    from corerl.testing.models import drawn_model as drawn_model
    from corerl.testing.models import tiny_config as tiny_config
    from corerl.testing.models import tiny_fields as tiny_fields
    from corerl.testing.pool import RankFailed as RankFailed
    from corerl.testing.pool import RankPool as RankPool
    from corerl.testing.pool import Ranks as Ranks
    from corerl.testing.routing import assert_replays as assert_replays
    from corerl.testing.subject import Checkpoint as Checkpoint
    from corerl.testing.subject import Runs as Runs
    from corerl.testing.subject import Subject as Subject
    from corerl.testing.tolerances import BFLOAT16_GRAD_NORM as BFLOAT16_GRAD_NORM
    from corerl.testing.tolerances import BFLOAT16_LOSS as BFLOAT16_LOSS
    from corerl.testing.tolerances import GRAD_NORM as GRAD_NORM
    from corerl.testing.tolerances import LOGPROBS as LOGPROBS
    from corerl.testing.tolerances import LOSS as LOSS
    from corerl.testing.tolerances import Tolerance as Tolerance
    from corerl.testing.trial import Trial as Trial
else:
    from corerl.imports import on_demand

    __getattr__, __dir__ = on_demand(__name__, __file__)
