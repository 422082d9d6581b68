"""Turn prompts into scored samples: samplers, rewards, sources of batches."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from corerl.event_loop import EventLoop as EventLoop
    from corerl.event_loop import in_thread as in_thread
    from corerl.event_loop import start_user_coroutine as start_user_coroutine
    from corerl.rollout.encoding import OPENING as OPENING
    from corerl.rollout.encoding import TAGS as TAGS
    from corerl.rollout.encoding import Openings as Openings
    from corerl.rollout.encoding import Rejected as Rejected
    from corerl.rollout.encoding import encode_texts as encode_texts
    from corerl.rollout.encoding import expand as expand
    from corerl.rollout.encoding import left_open as left_open
    from corerl.rollout.encoding import render as render
    from corerl.rollout.encoding import wrong_option as wrong_option
    from corerl.rollout.rewards import Failure as Failure
    from corerl.rollout.rewards import Judged as Judged
    from corerl.rollout.rewards import Outcome as Outcome
    from corerl.rollout.rewards import Reward as Reward
    from corerl.rollout.rewards import described as described
    from corerl.rollout.rewards import exact_match as exact_match
    from corerl.rollout.rewards import number as number
    from corerl.rollout.rewards import position_match as position_match
    from corerl.rollout.rewards import short as short
    from corerl.rollout.sampler import PromptSampler as PromptSampler
    from corerl.rollout.sampler import Rollout as Rollout
    from corerl.rollout.sampler import Sampler as Sampler
    from corerl.rollout.sampler import SamplerContext as SamplerContext
    from corerl.rollout.sampler import assemble as assemble
    from corerl.rollout.sampler import rows_of as rows_of
    from corerl.rollout.sampler import sampling_params as sampling_params
    from corerl.rollout.scored import ScoredRollout as ScoredRollout
    from corerl.rollout.serving_process import ServingProcess as ServingProcess
    from corerl.rollout.serving_process import exit_status as exit_status
else:
    from corerl.imports import on_demand

    __getattr__, __dir__ = on_demand(__name__, __file__)
