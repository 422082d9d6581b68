"""Send the actor's weights to all engines, and make sure that an engine that missed an update serves nothing."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence

from attrs import define, field, frozen

from corerl.calls import POLL_SECONDS
from corerl.config.schema import WeightsConfig
from corerl.driver.progress import Progress
from corerl.driver.residency import Residency
from corerl.engines.base import Received
from corerl.engines.fleet import EngineFleet
from corerl.errors import CorerlError, NoPlaces, WeightUpdateError, WorkerDied
from corerl.plan.residency import REST, UPDATE
from corerl.plugin.transports import give_up
from corerl.rollout.source import Source
from corerl.trainer.group import TrainGroup
from corerl.weights.manifest import Manifest
from corerl.weights.transport import Address
from corerl.weights.verify import difference

TELL_SECONDS = 1.0  # between two reports of a failed engine to the senders
ANSWER_SECONDS = 60.0  # for an engine to answer after the senders are done


@frozen(kw_only=True)
class Missed:
    """Why an update did not reach one engine."""

    error: str  # what the engine and its senders report
    died: bool  # the engine's process has ended
    silent: bool  # the engine has not answered, and may hang


@define(kw_only=True, eq=False)
class WeightUpdates:
    """Pushes the actor's weights to the engines of one run, and replaces engines that miss an update."""

    config: WeightsConfig
    group: TrainGroup  # the actor's
    fleet: EngineFleet
    source: Source
    manifest: Manifest
    address: Address
    version: int  # of the next update
    residency: Residency
    progress: Progress

    # Finds places for engines that are to be replaced, which have ended as the message says. Raises NoPlaces.
    places: Callable[[str], None] = lambda message: None
    adapters: Manifest | None = None  # of an update to engines that hold all other weights; None if none travel alone
    _address_of: Callable[[Sequence[str]], Address] | None = None  # since sizes have changed
    _updates: int = 0  # that reached all engines
    _unverified: set[str] = field(factory=set)  # engines that cannot report `weight_sums`
    _served: set[str] = field(factory=set)  # engines whose current process has taken an update

    def push(self) -> None:
        """Update all engines to the actor's weights, replacing those that miss the update. Raises WeightUpdateError, or
        the cause of an engine's death, if replacing does not help."""
        every = self.config.verify_every
        verify = every > 0 and self._updates % every == 0
        while missed := self._attempt(verify=verify):
            self._evict(missed)
        self._updates += 1

    def given_up(self) -> None:
        """Note that the ranks have ended, maybe in an update: engines must not wait for them."""
        give_up(self.address)

    def renewed(self, source: Source) -> None:
        """Note that the ranks were replaced by new ones, and the source by another."""
        self.source = source
        self._meet()  # the old ranks are still part of the old group

    def resized(self, address_of: Callable[[Sequence[str]], Address]) -> None:
        """Note that there are other ranks, or other engines; `address_of` is of updates to these receivers."""
        self.meets_at(address_of)  # first: if ranks die now, those that are started in their place meet there
        self._meet()

    def meets_at(self, address_of: Callable[[Sequence[str]], Address]) -> None:
        """The same, of ranks that are yet to start."""
        self._address_of = address_of
        self._served &= set(self.fleet.names)
        self._unverified &= set(self.fleet.names)

    def _meet(self) -> None:
        if self._address_of is None:
            self.address = self.group.meeting(self.address)
            return
        self.manifest = self.group.manifest().result()
        if self.adapters is not None:
            self.adapters = self.group.manifest(adapters=True).result()
        self.address = self.group.meeting(self._address_of(self.fleet.receivers))

    def _attempt(self, *, verify: bool) -> dict[str, Missed]:
        """Run one update; returns the engines that missed it, which now serve nothing, and why."""
        with contextlib.ExitStack() as stack:
            if self.source.overlaps:
                with self.progress.phase("hold"):
                    stack.enter_context(self.source.updating(self.version))
            if self.fleet.dead:
                self._replace(self.fleet.died)
            self.residency.enter(UPDATE)
            with self.progress.phase("update_weights"):
                missed = self._update(verify=verify)
            # Before any call to all engines, even to resume or sleep: an engine that hangs does not answer, and one
            # with a failed device fails again.
            if missed:
                self.fleet.leave_out(_culprits(missed))
            return missed

    def _update(self, *, verify: bool) -> dict[str, Missed]:
        # Used up even if no engine takes it: two streams must never share a version.
        version, self.version = self.version, self.version + 1
        group, fleet = self.group, self.fleet
        alone = self.adapters if fleet.whole else None
        sending = group.update_weights(self.address, version, verify=verify, adapters=alone is not None)
        receiving = fleet.receive(alone or self.manifest, version, self.address)
        told = 0.0
        while not sending.ready(POLL_SECONDS):
            # Otherwise senders would wait until a timeout for an engine that died or gave up.
            failed = {name: each for name, each in fleet.received(receiving, 0.0).items() if each.error}
            if failed and time.monotonic() - told > TELL_SECONDS:  # repeatedly: a rank may not have started yet
                told = time.monotonic()
                for name, each in failed.items():
                    group.give_up(name, version, each.error)
        result = sending.result()
        received = fleet.received(receiving, ANSWER_SECONDS)
        fared = {name: _missed(received.get(name), result.engines.get(name, "")) for name in fleet.names}
        missed = {name: each for name, each in fared.items() if each is not None}
        fleet.lost_weights(missed)
        self._served |= fared.keys() - missed.keys()
        if alone is None:
            fleet.hold_all(fared.keys() - missed.keys())
        if result.sums and not missed:
            self._require_loaded(result.sums, version)
        return missed

    def _require_loaded(self, sums: Mapping[str, int], version: int) -> None:
        """Raise WeightUpdateError if an engine holds anything other than what was sent."""
        for name, loaded in self.fleet.weight_sums(self.manifest.dtype).items():
            if loaded is None:
                if name not in self._unverified:
                    self.progress.notice(
                        f"{name} cannot report what it has loaded (Engine.weight_sums), so it is not compared with "
                        "what was sent; set weights.verify_every=0 to stop checking"
                    )
                self._unverified.add(name)
            elif wrong := difference(sums, loaded):
                raise WeightUpdateError(
                    f"{name} holds different weights than it was sent as version {version}: {wrong}; it loads them "
                    "incorrectly"
                )

    def _evict(self, missed: Mapping[str, Missed]) -> None:
        """Replace the engines that failed the update; the new processes rejoin with the next full one.

        Raises WeightUpdateError if an engine reported a failure and has never taken an update: the next one would
        fail too.
        """
        errors = _culprits(missed)
        answered = not any(each.died or each.silent for each in missed.values())
        if answered and (never := sorted(missed.keys() - self._served)):
            reasons = "; ".join(f"{name}: {missed[name].error}" for name in never)
            raise WeightUpdateError(f"weights version {self.version - 1} did not reach every engine: {reasons}")

        self._replace(errors)

    def _replace(self, failed: Mapping[str, CorerlError]) -> None:
        """Start new engines in the place of these, which takes as long as any start of one; `failed` says why."""
        self.residency.enter(REST)
        for engine, error in failed.items():
            self.progress.notice(f"{engine} is replaced: {error.message}")
        with self.progress.phase("replace"):
            try:
                self.places("; ".join(error.message for error in failed.values()))
            except NoPlaces as refused:
                raise refused.told_with(next(iter(failed.values()))) from refused
            self.fleet.replace({name: error for name, error in failed.items() if name in self.fleet.names})
        self.residency.engines_changed()
        self._served -= failed.keys()
        self._meet()  # the old engine is still part of the old group


def _culprits(missed: Mapping[str, Missed]) -> dict[str, CorerlError]:
    """Which of the engines that missed an update to replace, and why: the dead and the silent ones, which explain the
    other failures; all of them if all are alive and answered."""
    gone = {name: each for name, each in missed.items() if each.died or each.silent}
    return {
        name: WorkerDied(each.error) if each.died else WeightUpdateError(f"{name}: {each.error}")
        for name, each in (gone or missed).items()
    }


def _missed(answer: Received | None, sender: str) -> Missed | None:
    """Combine an engine's answer, if any, and its senders' error; None if the update arrived. Either side may know the
    cause while the other only sees a closed connection."""
    if answer is None:
        said = f"no answer within {ANSWER_SECONDS:g} s after the update's end"
    elif answer.error or sender:
        said = answer.error
    else:
        return None
    died = answer is not None and answer.died
    known = died or sender in said  # the senders may just repeat it, and a death is the cause of their error
    error = said if known else f"{said}; the trainer: {sender}" if said else sender
    return Missed(error=error, died=died, silent=answer is None)
