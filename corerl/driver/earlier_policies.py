"""Keep earlier weights of the actor, such as the reference policy's, for forward passes."""

from __future__ import annotations

from collections.abc import Collection

from attrs import define

from corerl.algorithms.base import OLD, REFERENCE, ROLLOUT
from corerl.config.schema import AlgorithmConfig
from corerl.driver.progress import Progress
from corerl.trainer.group import TrainGroup

TURNS = ("update-0", "update-1")  # snapshots of the last two updates, made in turns


@define(kw_only=True)
class EarlierPolicies:
    """Snapshots of the actor's weights, one for each of the `tags`, in the host memory of the ranks of `group`. Its
    verbs are called while the actor's parameters are resident."""

    group: TrainGroup
    tags: Collection[str]
    settings: AlgorithmConfig
    progress: Progress
    _made: int = 0  # updates that were kept

    def begin(self, *, resumed: bool) -> None:
        """Recreate the snapshots that newly started ranks do not have. Where a resumed run cannot recreate what an
        uninterrupted one would have, a notice says so."""
        self._made = 0
        if REFERENCE in self.tags:
            self._load_reference(self.progress.steps_done, resumed=resumed)
        if resumed and OLD in self.tags:
            self.progress.notice(
                "until the second update, the old weights are those of the checkpoint, which has no others"
            )

    def _load_reference(self, step: int, *, resumed: bool) -> None:
        reference, every = self.group.snapshot(REFERENCE), self.settings.reference_every
        if not (resumed and every):
            reference.load(self.settings.reference).result()
            return
        reference.create().result()  # from the checkpoint's weights, which are the reference at every such step
        if late := step % every:
            self.progress.notice(
                f"the reference policy is the actor of step {step}, not of step {step - late}, whose weights no "
                "checkpoint has"
            )

    def renews(self, steps: int) -> bool:
        """Whether the reference policy is to be renewed after so many rollout steps."""
        every = self.settings.reference_every
        return every > 0 and steps % every == 0

    def renew(self) -> None:
        """Make the actor's weights the reference policy."""
        self.group.snapshot(REFERENCE).create().result()

    def updated(self) -> None:
        """Keep the weights that engines have just got, which are new to them."""
        if OLD in self.tags or ROLLOUT in self.tags:
            self.group.snapshot(TURNS[self._made % self._turns]).create().result()
            self._made += 1

    def name_of(self, tag: str) -> str:
        """The name of the snapshot with a tag; "" is that of the weights as they are. Before a second update, the old
        weights are those of the first."""
        if tag == ROLLOUT or (tag == OLD and self._made == 1):
            return TURNS[(self._made - 1) % self._turns]
        return TURNS[self._made % self._turns] if tag == OLD else tag

    @property
    def _turns(self) -> int:
        return 2 if OLD in self.tags else 1
