"""A user's own function between the rewards and the advantages, on the whole scored batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from attrs import frozen

from corerl.errors import DataError
from corerl.rollout.sources import Scored, Source


@frozen
class Postprocessed:
    """A source whose batches pass through `function`, `(Scored) -> Scored`: rewards shaped, samples left out, loss
    masks changed. Raises DataError where it raises, or returns a batch that cannot be trained on."""

    source: Source
    function: Callable[[Scored], Any]
    name: str  # in the config

    def __iter__(self) -> Iterator[Scored]:
        for scored in self.source:
            try:
                result = self.function(scored)
            except Exception as error:
                raise DataError(
                    f"rollout.postprocess={self.name!r} raised {type(error).__name__}: {error} at step {scored.step}"
                ) from error
            if not isinstance(result, Scored):
                raise DataError(f"rollout.postprocess={self.name!r} returned {type(result).__name__}, wanted a Scored")
            if flaw := _flaw(result):
                raise DataError(f"rollout.postprocess={self.name!r} returned a batch {flaw}")
            yield result

    @property
    def position(self) -> dict[str, Any]:
        return self.source.position

    def restore(self, position: Mapping[str, Any]) -> None:
        self.source.restore(position)


def _flaw(scored: Scored) -> str:
    """Why the batch cannot be trained on; "" where it can."""
    batch = scored.rollout.batch
    if not len(batch):
        return "without samples"
    if len(scored.rewards) != len(batch) or len(scored.rollout.texts) != len(batch):
        return (
            f"of {len(batch)} samples with {len(scored.rewards)} rewards and {len(scored.rollout.texts)} texts; "
            "each sample wants one of both"
        )
    if not np.isfinite(scored.rewards).all():
        return "whose rewards are not all finite"
    if not batch.columns["loss_mask"].any():
        return "without a single loss token"
    return ""
