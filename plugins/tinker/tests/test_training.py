"""What clients ask of the trained model, on a tiny one, against plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from attrs import evolve

from corerl_tinker.requests import Draw, ModelWanted, Pass, Policy, Refused
from plugins.tinker.tests.served import ADAM, LORA, MODEL, Served, datum, serving, supervised

ROWS = ([1, 7, 8, 9, 4], [1, 4, 5], [1, 6, 6, 6, 6, 9, 20, 21])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("served")) as found:
        yield found


def test_smoke(served: Served) -> None:
    policy: Policy = served.policy
    served.new_model("a:train:0")
    before = policy.run(supervised(*ROWS))
    m = policy.step(ADAM)
    print(m)
    after = policy.run(supervised(*ROWS))
    print(before.metrics, after.metrics)
    sampler, _ = policy.save_for_sampler(None, ttl=None, inflight=False, user_metadata={})
    print(served.draw(Draw(sampler=sampler, prompt=np.array([1, 2, 3]), samples=2)))
    print(served.logprobs(sampler, [1, 2, 3, 4]))
