"""Keep the weights of the reference policy for forward passes, where it is an earlier actor."""

from __future__ import annotations

from attrs import define

from corerl.algorithms.base import REFERENCE
from corerl.config.schema import AlgorithmConfig
from corerl.driver.progress import Progress
from corerl.trainer.group import TrainGroup


@define(kw_only=True)
class ReferencePolicy:
    """A snapshot of the actor's weights in the host memory of the ranks of `group`, if a pass asks for it. Its verbs
    are called while the actor's parameters are resident."""

    group: TrainGroup
    asked: bool
    settings: AlgorithmConfig
    progress: Progress

    def begin(self, *, resumed: bool) -> None:
        """Recreate the snapshot, which newly started ranks do not have. Where a resumed run cannot recreate what an
        uninterrupted one would have, a notice says so."""
        if not self.asked:
            return
        step, every = self.progress.steps_done, self.settings.reference_every
        snapshot = self.group.snapshot(REFERENCE)
        if not (resumed and every):
            snapshot.load(self.settings.reference).result()
            return
        snapshot.create().result()  # from the checkpoint's weights, which are the reference at every such step
        if late := step % every:
            self.progress.notice(
                f"the reference policy is the actor of step {step}, not of step {step - late}, whose weights no "
                "checkpoint has"
            )

    def renews(self, steps: int) -> bool:
        """Whether it is to be renewed after so many rollout steps."""
        every = self.settings.reference_every
        return every > 0 and steps % every == 0

    def renew(self) -> None:
        """Make the actor's weights the reference policy."""
        self.group.snapshot(REFERENCE).create().result()
