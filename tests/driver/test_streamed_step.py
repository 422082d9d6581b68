from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import numpy as np

from corerl.driver.streamed_step import StreamedStep
from corerl.rollout.source import Arrived
from tests.pictured import PICTURES, Row, batch_of, rows_in


def test_samples_that_came_in_another_order_keep_their_pictures() -> None:
    names = list(PICTURES)
    shown = ["", names[2], names[0], names[1]]
    rows: list[Row] = [[(10 + 2 * place, name), (40, "")] for place, name in enumerate(shown)]
    whole = batch_of(rows)
    nothing: Any = None
    step = StreamedStep(step=0, trained=None, with_passes=seen, with_advantages=nothing, progress=Mock())
    for prompts in ([3], [1, 2], [0]):
        part = batch_of([rows[prompt] for prompt in prompts]).with_row_columns(group=np.arange(len(prompts)))
        step.add(Arrived(prompts=np.array(prompts), of=4, batch=part, rewards=np.zeros(len(prompts), np.float32)))
    done = step.completed(whole)
    assert rows_in(done) == rows and done.columns["old_logprobs"].tolist() == (-whole.tokens).tolist()


def seen(batch: Any) -> Any:
    """With a column of a pass."""
    return batch.with_columns(old_logprobs=-batch.tokens.astype(np.float32))
