"""Bring the actor's weights to all engines, and see to it that an engine which they did not reach serves nothing."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Mapping

from attrs import define, evolve, field, frozen

from corerl.calls import POLL_SECONDS
from corerl.config.schema import WeightsConfig
from corerl.driver.progress import Progress
from corerl.driver.residency import REST, UPDATE, Residency
from corerl.errors import CorerlError, WeightUpdateError, WorkerDied
from corerl.rollout.engine import Received
from corerl.rollout.fleet import EngineFleet
from corerl.rollout.sources import Source
from corerl.trainer.group import TrainGroup
from corerl.weights.manifest import Manifest
from corerl.weights.transport import Address
from corerl.weights.transports import TRANSPORTS
from corerl.weights.verify import difference

TELL_SECONDS = 1.0  # between two times that senders are told of an engine that failed
ANSWER_SECONDS = 60.0  # that an engine has to answer once the senders have ended


def meeting_at(address: Address, actor: TrainGroup) -> Address:
    """The same, at a new place, where a transport has senders and receivers meet: a socket in the actor's first rank,
    or names that nobody else has."""
    if not TRANSPORTS[address.transport].joins:
        return evolve(address, token=uuid.uuid4().hex)
    if not address.engines:
        return address
    host, port, listening = actor.processes.listen(0)
    return evolve(address, host=host, port=port, listening=listening)


@frozen(kw_only=True)
class Missed:
    """Why an update did not reach one engine."""

    error: str  # what it says, and what those say that sent to it
    died: bool  # its process has ended
    silent: bool  # it has not answered, and may hang


@define(kw_only=True, eq=False)
class WeightUpdates:
    """Of one run: which engines have what, and the version that comes next."""

    config: WeightsConfig
    group: TrainGroup  # of the actor
    fleet: EngineFleet
    source: Source
    manifest: Manifest
    address: Address
    version: int  # of the next update
    residency: Residency
    progress: Progress

    _updates: int = 0  # that all engines took
    _unverified: set[str] = field(factory=set)  # engines that cannot tell what they hold
    _served: set[str] = field(factory=set)  # engines whose process has taken an update

    def push(self) -> None:
        """All engines serve the actor's weights when this returns; those that an update did not reach are replaced.
        Raises WeightUpdateError, or what an engine died of, where that does not help."""
        every = self.config.verify_every
        verify = every > 0 and self._updates % every == 0
        while missed := self._attempt(verify=verify):
            self._evict(missed)
        self._updates += 1

    def _attempt(self, *, verify: bool) -> dict[str, Missed]:
        """One update of all engines. Those that it did not reach, which serve nothing now, with why."""
        with contextlib.ExitStack() as stack:
            if self.source.overlaps:
                with self.progress.phase("hold"):
                    stack.enter_context(self.source.updating(self.version))
            if self.fleet.dead:
                self._replace(self.fleet.replace_dead)
            self.residency.enter(UPDATE)
            with self.progress.phase("update_weights"):
                missed = self._update(verify=verify)
            # Before anything is asked of all engines, were it to resume or to sleep: one that hangs answers nothing,
            # and one whose device has failed fails again.
            if missed:
                self.fleet.leave_out(_culprits(missed))
            return missed

    def _update(self, *, verify: bool) -> dict[str, Missed]:
        # Used even where no engine takes it: two streams must never share a version.
        version, self.version = self.version, self.version + 1
        group, fleet = self.group, self.fleet
        sending = group.update_weights_async(self.address, version, verify=verify)
        receiving = fleet.receive_async(self.manifest, version, self.address)
        told = 0.0
        while not sending.ready(POLL_SECONDS):
            # Senders would wait in vain, until a timeout, for an engine that has died, or is done with it.
            failed = {name: each for name, each in fleet.received(receiving, 0.0).items() if each.error}
            if failed and time.monotonic() - told > TELL_SECONDS:  # again: a rank may not have begun
                told = time.monotonic()
                for name, each in failed.items():
                    group.give_up(name, version, each.error)
        result = sending.result()
        received = fleet.received(receiving, ANSWER_SECONDS)
        fared = {name: _missed(received.get(name), result.engines.get(name, "")) for name in fleet.names}
        missed = {name: each for name, each in fared.items() if each is not None}
        fleet.lost_weights(missed)
        self._served |= fared.keys() - missed.keys()
        if result.sums and not missed:
            self._require_loaded(result.sums, version)
        return missed

    def _require_loaded(self, sums: Mapping[str, int], version: int) -> None:
        """Raises WeightUpdateError where an engine holds something else than was sent."""
        for name, loaded in self.fleet.weight_sums(self.manifest.dtype).items():
            if loaded is None:
                if name not in self._unverified:
                    self.progress.notice(
                        f"{name} cannot tell what it has loaded (Engine.weight_sums): it is not compared with what was "
                        "sent; weights.verify_every=0 asks no more"
                    )
                self._unverified.add(name)
            elif wrong := difference(sums, loaded):
                raise WeightUpdateError(
                    f"{name} holds other weights than it was sent as version {version}: {wrong}; it loads them wrongly"
                )

    def _evict(self, missed: Mapping[str, Missed]) -> None:
        """New processes in the place of those that failed the update, which rejoin with the next full one.

        Raises WeightUpdateError of an engine that says that it failed and has never taken an update: the next would end
        the same.
        """
        errors = _culprits(missed)
        answered = not any(each.died or each.silent for each in missed.values())
        if answered and (never := sorted(missed.keys() - self._served)):
            reasons = "; ".join(f"{name}: {missed[name].error}" for name in never)
            raise WeightUpdateError(f"weights version {self.version - 1} did not reach every engine: {reasons}")

        def replace() -> Mapping[str, CorerlError]:
            self.fleet.replace(errors)
            return errors

        self._replace(replace)

    def _replace(self, replace: Callable[[], Mapping[str, CorerlError]]) -> None:
        """New engines, which `replace` starts and names with what the old ones died of."""
        self.residency.enter(REST)
        replaced = replace()
        self.residency.engines_changed()
        for engine, error in replaced.items():
            self.progress.notice(f"{engine} is replaced: {error.message}")
        self._served -= replaced.keys()
        self.address = meeting_at(self.address, self.group)  # the dead one hangs in whatever was built at the old


def _culprits(missed: Mapping[str, Missed]) -> dict[str, CorerlError]:
    """Of the engines that an update missed those that are to be replaced, each with why: the dead and those that are
    silent, which explain the other failures; where all live and answer, all."""
    gone = {name: each for name, each in missed.items() if each.died or each.silent}
    return {
        name: WorkerDied(each.error) if each.died else WeightUpdateError(f"{name}: {each.error}")
        for name, each in (gone or missed).items()
    }


def _missed(answer: Received | None, sender: str) -> Missed | None:
    """What an engine that may have answered, and its senders, make of an update together; None where it has arrived.
    Either may know why, while the other sees no more than a connection that ends."""
    if answer is None:
        said = f"no answer within {ANSWER_SECONDS:g} s after the update's end"
    elif answer.error or sender:
        said = answer.error
    else:
        return None
    died = answer is not None and answer.died
    known = died or sender in said  # it may have told them, and its death tells more than what follows from it
    error = said if known else f"{said}; the trainer: {sender}" if said else sender
    return Missed(error=error, died=died, silent=answer is None)
