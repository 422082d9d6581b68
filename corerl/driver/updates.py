"""Send the actor's weights to all engines, and make sure that an engine that missed an update serves nothing.

The driver starts every part of an update, and their results end it: ranks send, engines receive. An engine that fails
meanwhile is reported to the ranks, which would wait for it. The first failure is the cause; later ones follow from it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from attrs import define, field

from corerl.calls import POLL_SECONDS
from corerl.config.schema import WeightsConfig
from corerl.driver.progress import Progress
from corerl.driver.residency import Residency
from corerl.engines.base import Received
from corerl.engines.fleet import EngineFleet
from corerl.errors import CorerlError, InsufficientResources, WeightUpdateError, WorkerDied
from corerl.plan.residency import REST, UPDATE
from corerl.plugin.transports import abandon
from corerl.rollout.source import Source
from corerl.trainer.group import TrainGroup
from corerl.types import IntArray, UpdateResult
from corerl.weights.checksums import difference
from corerl.weights.manifest import Manifest
from corerl.weights.transport import Address

if TYPE_CHECKING:
    from corerl.driver.control import Control


@define(kw_only=True, eq=False)
class WeightUpdates:
    """Sends the actor's weights to the engines of one run, and replaces engines that miss an update."""

    config: WeightsConfig
    group: TrainGroup  # the actor's
    fleet: EngineFleet
    version: int  # of the next update
    address_of: Callable[[Sequence[str]], Address]  # of updates to these receivers, without a rendezvous
    separate_adapters: bool = False  # they travel alone to engines that hold all other weights
    residency: Residency
    progress: Progress

    manifest: Manifest = field(init=False)
    adapters: Manifest | None = field(init=False)  # of these alone
    address: Address = field(init=False)
    _updates: int = 0  # that reached all engines
    _again: list[int] = field(factory=list)  # versions of weights that the version before had already, ascending
    _unverified: bool = False  # the engines cannot report `weight_sums`
    _served: set[str] = field(factory=set)  # engines whose current process has taken an update

    def __attrs_post_init__(self) -> None:
        self.new_rendezvous()

    # ---- one update -------------------------------------------------------------------------------------------------

    def push(self, source: Source, control: Control) -> None:
        """Update all engines to the actor's weights, replacing those that miss the update. Raises WeightUpdateError, or
        the cause of an engine's death, if replacing does not help."""
        first = self.version
        while failed := self._attempt(source):
            self._replace(failed, control)
        self._again += range(first + 1, self.version)
        self._updates += 1

    def weights_of(self, versions: IntArray) -> IntArray:
        """The versions, without counting those that only sent the same weights again because an engine had failed."""
        again: IntArray = np.searchsorted(self._again, versions, side="right").astype(np.int64)
        return versions - again

    def _attempt(self, source: Source) -> dict[str, CorerlError]:
        """Run one update; returns the engines to replace, which now serve nothing, and why."""
        with contextlib.ExitStack() as stack:
            if source.overlaps:
                with self.progress.phase("hold"):
                    stack.enter_context(source.updating(self.version))
            if self.fleet.dead:
                return self.fleet.died
            self.residency.enter(UPDATE)
            with self.progress.phase("update_weights"):
                failed = self._update()
            # Before any call to all engines, even to resume or sleep: an engine that hangs does not answer, and one
            # with a failed device fails again.
            self.fleet.leave_out(failed)
            return failed

    def _update(self) -> dict[str, CorerlError]:
        # Used up even if no engine takes it: engines refuse a version that they have.
        version, self.version = self.version, self.version + 1
        group, fleet, every = self.group, self.fleet, self.config.verify_every
        verify = every > 0 and self._updates % every == 0
        alone = self.adapters if fleet.all_serve else None
        sending = group.update_weights(self.address, version, verify=verify, adapters=alone is not None)
        receiving = fleet.receive(alone or self.manifest, version, self.address)
        causes: set[str] = set()  # engines that failed first
        reported: set[str] = set()
        while not sending.ready(POLL_SECONDS):
            failed = {name: each.error for name, each in fleet.received(receiving, 0.0).items() if each.error}
            for name in failed.keys() - reported:
                group.engine_failed(self.address, name, failed[name])
            causes, reported = causes or set(failed), reported | failed.keys()
        sent = sending.result()
        incomplete = any(sent.engines.values())
        if incomplete:
            abandon(self.address)
        # As long as a sender waits for an engine: over a disk, engines only begin to read now.
        received = fleet.received(receiving, self.address.timeout)
        missed = {name: received.get(name) for name in fleet.names if name not in received or received[name].error}
        taken = [name for name in fleet.names if name not in missed]
        fleet.updated(taken)
        self._served.update(taken)
        if missed:
            return self._to_replace(missed, causes, sent)
        if incomplete:  # engines have all they need, but their senders do not know
            self.new_rendezvous()
        if sent.sums:
            self._require_loaded(sent.sums, version)
        return {}

    def _to_replace(
        self, missed: Mapping[str, Received | None], causes: Collection[str], sent: UpdateResult
    ) -> dict[str, CorerlError]:
        """Which of the engines that missed an update to replace, and why: those that died or gave no answer; if all
        are alive and answered, those that failed first.

        Raises WeightUpdateError if one of these has never taken an update: the next one would fail too.
        """
        gone = [name for name, each in missed.items() if each is None or each.died]
        silent = f"no answer within {self.address.timeout:g} s after the update's end"
        errors = {name: _reason(missed[name], sent.engines.get(name, ""), silent) for name in gone or causes or missed}
        if not gone and (never := sorted(errors.keys() - self._served)):
            reasons = "; ".join(f"{name}: {errors[name]}" for name in never)
            raise WeightUpdateError(f"weights version {self.version - 1} did not reach every engine: {reasons}")
        return {
            name: WorkerDied(error) if (one := missed[name]) and one.died else WeightUpdateError(f"{name}: {error}")
            for name, error in errors.items()
        }

    def _require_loaded(self, sums: Mapping[str, int], version: int) -> None:
        """Raise WeightUpdateError if an engine holds anything other than what was sent."""
        for name, loaded in self.fleet.weight_sums(self.manifest.dtype).items():
            if loaded is None:
                if not self._unverified:
                    self.progress.notice(
                        f"{name} cannot report what it has loaded (Engine.weight_sums), so it is not compared with "
                        "what was sent; set weights.verify_every=0 to stop checking"
                    )
                self._unverified = True
            elif wrong := difference(sums, loaded):
                raise WeightUpdateError(
                    f"{name} holds different weights than it was sent as version {version}: {wrong}; it loads them "
                    "incorrectly"
                )

    def _replace(self, failed: Mapping[str, CorerlError], control: Control) -> None:
        """Start new engines in the place of these, which takes as long as any start of one; `failed` says why."""
        self.residency.enter(REST)
        for engine, error in failed.items():
            self.progress.notice(f"{engine} is replaced: {error.message}")
        with self.progress.phase("replace"):
            try:
                control.failed("; ".join(error.message for error in failed.values()), ranks=False)
            except InsufficientResources as refused:
                raise refused.with_cause(next(iter(failed.values()))) from refused
            self.fleet.replace({name: error for name, error in failed.items() if name in self.fleet.names})
        self.residency.engines_changed()
        self._served -= failed.keys()
        self.new_rendezvous()

    # ---- rendezvous of ranks and engines ----------------------------------------------------------------------------

    def ranks_ended(self) -> None:
        """Note that the ranks have ended, maybe in an update: engines must not wait for them."""
        abandon(self.address)

    def new_rendezvous(self) -> None:
        """Give the next update an address of its own, for the current ranks and engines."""
        self.manifest = self.group.manifest().result()
        self.adapters = self.group.manifest(adapters=True).result() if self.separate_adapters else None
        self.address = self.group.rendezvous(self.address_of(self.fleet.receivers))

    def resized(self, address_of: Callable[[Sequence[str]], Address]) -> None:
        """Note that there are other ranks, or other engines; `address_of` is of updates to these receivers."""
        self.meets_at(address_of)  # first: if ranks die now, those that are started in their place meet there
        self.new_rendezvous()

    def meets_at(self, address_of: Callable[[Sequence[str]], Address]) -> None:
        """The same, of ranks that are yet to start."""
        self.address_of = address_of
        self._served &= set(self.fleet.names)


def _reason(answer: Received | None, sender: str, silent: str) -> str:
    """Why an engine missed an update, `silent` if it gave no answer. Either side may know the cause while the other
    only sees a closed connection."""
    if answer is None:
        return f"{silent}; {sender}" if sender else silent
    # Senders may just repeat an engine's reason, and a death is the cause of their error.
    known = answer.died or sender in answer.error
    return answer.error if known else f"{answer.error}; {sender}"
