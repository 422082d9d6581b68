"""Send the actor's weights to all engines, and make sure that an engine that missed an update serves nothing.

The driver starts every part of an update, and their results end it: ranks send, engines receive. An engine that fails
meanwhile is reported to the ranks, which would wait for it. The first failure is the cause; later ones follow from it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping

from attrs import define, field, frozen

from corerl.calls import POLL_SECONDS
from corerl.config.schema import WeightsConfig
from corerl.driver.control import Control
from corerl.driver.progress import Progress
from corerl.driver.residency import Residency
from corerl.engines.base import Received
from corerl.engines.fleet import EngineFleet
from corerl.errors import CorerlError, InsufficientResources, WeightUpdateError, WorkerDied
from corerl.plan.residency import REST, UPDATE
from corerl.plugin.transports import abandon
from corerl.rollout.source import Policies, Source
from corerl.trainer.group import TrainGroup
from corerl.types import UpdateResult
from corerl.weights.checksums import difference
from corerl.weights.manifest import Manifest
from corerl.weights.transport import Address


@frozen(kw_only=True)
class _Rendezvous:
    """Where the ranks and the engines of now meet, and what is sent there."""

    address: Address
    manifest: Manifest
    adapters: Manifest | None  # of an update to engines that hold all other weights


@define(kw_only=True, eq=False)
class WeightUpdates:
    """Sends the actor's weights to the engines of one run, and replaces engines that miss an update."""

    config: WeightsConfig
    group: TrainGroup  # the actor's
    fleet: EngineFleet
    address_of: Callable[[], Address]  # of updates from the ranks to the engines as they are, without a rendezvous
    separate_adapters: bool = False  # whether adapters travel alone to engines that hold all other weights
    policies: Policies  # up to the version that was sent last
    residency: Residency
    control: Control  # asks extensions where engines are to start
    progress: Progress

    _rendezvous: _Rendezvous | None = None  # None: the next update makes one
    _updates: int = 0  # that reached all engines
    _unverified: bool = False  # the engines cannot report `weight_sums`
    _served: set[str] = field(factory=set)  # engines whose current process has taken an update

    # ---- one update -------------------------------------------------------------------------------------------------

    def push(self, source: Source, *, new: bool = True) -> None:
        """Update all engines to the actor's weights, which are `new` if they have changed since the last update, and
        replace engines that miss the update. Raises WeightUpdateError, or the cause of an engine's death, if replacing
        does not help."""
        before = self.policies.version
        while failed := self._attempt(source, self.policies.next(new=new and self.policies.version == before)):
            self._replace(failed)
        self._updates += 1

    def _attempt(self, source: Source, policies: Policies) -> dict[str, CorerlError]:
        """Run one update to the last of the policies; returns the engines to replace, which now serve nothing, and
        why."""
        with contextlib.ExitStack() as stack:
            if source.overlaps:
                with self.progress.phase("hold"):
                    stack.enter_context(source.updating(policies))
            if self.fleet.dead:
                return self.fleet.died
            self.residency.enter(UPDATE)
            with self.progress.phase("update_weights"):
                failed = self._update(policies)
            # Before any call to all engines, even to resume or sleep: an engine that hangs does not answer, and one
            # with a failed device fails again.
            self.fleet.leave_out(failed)
            return failed

    def _update(self, policies: Policies) -> dict[str, CorerlError]:
        # The version is used up even if no engine takes it: engines refuse a version that they have.
        self.policies, version = policies, policies.version
        group, fleet, every = self.group, self.fleet, self.config.verify_every
        verify = every > 0 and self._updates % every == 0
        meeting = self._rendezvous = self._rendezvous or self._meet()
        address, alone = meeting.address, meeting.adapters if fleet.all_serve else None
        sending = group.update_weights(address, version, verify=verify, adapters=alone is not None)
        receiving = fleet.receive(alone or meeting.manifest, version, address)
        causes: set[str] = set()  # engines that failed first
        reported: set[str] = set()
        while not sending.ready(POLL_SECONDS):
            failed = {name: each.error for name, each in fleet.received(receiving, 0.0).items() if each.error}
            for name in failed.keys() - reported:
                group.engine_failed(address, name, failed[name])
            causes, reported = causes or set(failed), reported | failed.keys()
        sent = sending.result()
        if any(sent.engines.values()):  # senders do not know whether these have all they need
            self.new_rendezvous()
        # As long as a sender waits for an engine: over a disk, engines only begin to read now.
        received = fleet.received(receiving, address.timeout)
        missed = {name: received.get(name) for name in fleet.names if name not in received or received[name].error}
        taken = [name for name in fleet.names if name not in missed]
        fleet.updated(taken)
        self._served.update(taken)
        if missed:
            silent = f"no answer within {address.timeout:g} s after the update's end"
            return self._to_replace(missed, causes, sent, silent)
        if sent.sums:
            self._require_loaded(sent.sums, version, meeting.manifest.dtype)
        return {}

    def _meet(self) -> _Rendezvous:
        """A rendezvous of the ranks and engines as they are."""
        return _Rendezvous(
            address=self.group.rendezvous(self.address_of()),
            manifest=self.group.manifest().result(),
            adapters=self.group.manifest(adapters=True).result() if self.separate_adapters else None,
        )

    def new_rendezvous(self) -> None:
        """Let the next update have another rendezvous: ranks or engines have ended or are others now, or an update
        has failed. Engines that still wait at this one stop."""
        if self._rendezvous is not None:
            abandon(self._rendezvous.address)
        self._rendezvous = None
        self._served &= set(self.fleet.names)

    def _to_replace(
        self, missed: Mapping[str, Received | None], causes: Collection[str], sent: UpdateResult, silent: str
    ) -> dict[str, CorerlError]:
        """Which of the engines that missed an update to replace, and why: those that died or gave no answer; if all
        are alive and answered, those that failed first. `silent` is why one gave no answer.

        Raises WeightUpdateError if one of these has never taken an update: the next one would fail too.
        """
        gone = [name for name, each in missed.items() if each is None or each.died]
        errors = {name: _reason(missed[name], sent.engines.get(name, ""), silent) for name in gone or causes or missed}
        if not gone and (never := sorted(errors.keys() - self._served)):
            reasons = "; ".join(f"{name}: {errors[name]}" for name in never)
            raise WeightUpdateError(f"weights version {self.policies.version} did not reach every engine: {reasons}")
        return {
            name: WorkerDied(error) if (one := missed[name]) and one.died else WeightUpdateError(f"{name}: {error}")
            for name, error in errors.items()
        }

    def _require_loaded(self, sums: Mapping[str, int], version: int, dtype: str) -> None:
        """Raise WeightUpdateError if an engine holds anything other than what was sent."""
        for name, loaded in self.fleet.weight_sums(dtype).items():
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

    def _replace(self, failed: Mapping[str, CorerlError]) -> None:
        """Start new engines in the place of these, which takes as long as any start of one; `failed` says why."""
        self.residency.enter(REST)
        for engine, error in failed.items():
            self.progress.notice(f"{engine} is replaced: {error.message}")
        with self.progress.phase("replace"):
            try:
                self.control.failed("; ".join(error.message for error in failed.values()), ranks=False)
            except InsufficientResources as refused:
                raise refused.with_cause(next(iter(failed.values()))) from refused
            self.fleet.replace({name: error for name, error in failed.items() if name in self.fleet.names})
        self.residency.engines_changed()
        self._served -= failed.keys()
        self.new_rendezvous()


def _reason(answer: Received | None, sender: str, silent: str) -> str:
    """Why an engine missed an update, `silent` if it gave no answer. Either side may know the cause while the other
    only sees a closed connection."""
    if answer is None:
        return f"{silent}; {sender}" if sender else silent
    # Senders may just repeat an engine's reason, and a death is the cause of their error.
    known = answer.died or sender in answer.error
    return answer.error if known else f"{answer.error}; {sender}"
