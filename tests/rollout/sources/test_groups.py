"""Prompts that are sampled and scored one by one: what their sources do with them is tested there."""

from __future__ import annotations

import numpy as np
import pytest

from corerl.data.prompts import Prompt
from corerl.engines.base import GenerateRequest, SamplingParams
from corerl.errors import RewardError
from corerl.rollout.sources.groups import Groups, PromptGroup
from tests.rollout.engines import Engines
from tests.rollout.sources.drawing import drawing


def test_a_batch_without_rewards_is_told_with_its_own_first_failure(engines: Engines) -> None:
    failed = np.ones(2, np.bool_)
    request = GenerateRequest(
        tokens=np.zeros(0, np.int64), offsets=np.zeros(3, np.int64), noise_keys=np.arange(2), params=SamplingParams()
    )
    group = PromptGroup(number=0, prompt=Prompt(index=0, text="a", answer="b"), request=request)
    group.failed, group.first_failure = failed, "reward 'mine' raised ValueError: no"
    fresh = Groups(drawing(engines), lambda group: None)  # which has heard of no failure since the last batch
    with pytest.raises(RewardError, match=r"^reward 'mine' raised ValueError: no; all 2 samples failed$"):
        fresh.batch([group], step=1)
