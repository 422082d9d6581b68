"""Engines that sample from the weights of a group, a run's or those of a loop of one's own: how they are updated, and
how failed ones are replaced.

The driver starts every part of an update, and their results end it: ranks send, engines receive. An engine that fails
meanwhile is reported to the ranks, which would wait for it. The first failure is the cause; later ones follow from it.
An engine that missed an update serves nothing, and is replaced.

`Run.push_weights` decides whether an update is due, and calls `update`. That calls `_try_update`, which lets engines
pause and ranks wake, and `_send_and_receive`, until all engines have the weights; in between `_replace` starts others.
A loop of one's own calls `push`, which does the same without a schedule. In an engine's process the update goes
through `EngineService`, which has the methods of `engines.base.Engine`, to the engine's `receive`.

Which weights are meant is said by a number, of which there are three kinds:

    version         of the engines' weights: one for each attempt to update them, in `Policies`. Each sampled token has
                    that of its weights; `weights_version` is the version that the ranks sent last, which is saved
    policy          in `Policies`: versions that were sent without a step in between have the same
    changes         of the group's weights: `TrainGroup.changes` counts the verbs that make others of them, and
                    `Engines.changes_sent` is the count at the last update, so that both say what engines lack
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import tempfile
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from attrs import Factory, define, evolve, field, frozen

from corerl.calls import POLL_SECONDS
from corerl.cluster.placement import ResourcePool
from corerl.config.load import as_config
from corerl.config.schema import Config, WeightsConfig
from corerl.driver.groups import update_address
from corerl.driver.processes import start_processes
from corerl.driver.progress import Progress
from corerl.driver.residency import Residency
from corerl.engines.base import GenerateRequest, Generation, Received
from corerl.engines.fleet import EngineFleet
from corerl.errors import CorerlError, EngineFailed, InsufficientResources, WeightUpdateError, WorkerDied
from corerl.event_loop import EventLoop
from corerl.messages import note
from corerl.plan.residency import FORWARD, REST, SAMPLE, UPDATE, save_stage, train_stage
from corerl.plugin.observers import Observers
from corerl.plugin.spec import ACTOR
from corerl.plugin.transports import abandon
from corerl.rollout.source import Policies
from corerl.trainer.group import TrainGroup
from corerl.types import UpdateResult
from corerl.weights.checksums import difference
from corerl.weights.manifest import Manifest
from corerl.weights.transport import Address

T = TypeVar("T")
Hold = Callable[[Policies], contextlib.AbstractContextManager[None]]  # until engines hold the last of the policies

DEATH_SECONDS = 1.0  # between two looks at whether all engines have died
TURNS: Mapping[str, str] = {"train": train_stage(ACTOR), "forward": FORWARD, "save": save_stage(ACTOR)}


@frozen(kw_only=True)
class _Rendezvous:
    """Where the ranks and the engines of now meet, and what is sent there."""

    address: Address
    manifest: Manifest
    adapters: Manifest | None  # of an update to engines that hold all other weights
    ranks: object  # the processes of the group, which may be others by the next update


@define(kw_only=True, eq=False)
class Engines:
    """Engines that sample from the weights of a group, as `Engines.start(config)` gives them. They have none before the
    first `push`, and those of the newest one after it: every token that they sample says of which version it is."""

    config: WeightsConfig
    group: TrainGroup  # the actor's
    fleet: EngineFleet
    address_of: Callable[[], Address]  # of updates from the ranks to the engines as they are, without a rendezvous
    separate_adapters: bool = False  # whether adapters travel alone to engines that hold all other weights
    residency: Residency
    # Called before others start in the place of engines that have ended, with the reasons. Raises
    # InsufficientResources where there is no place for one.
    on_death: Callable[[str], None]
    progress: Progress
    context_length: int = 0  # the most tokens of a sample; 0: unlimited
    # Up to the version that was sent last. The first weights are sent as the version that they had.
    policies: Policies = Factory(lambda self: Policies(version=self.group.loaded_version - 1), takes_self=True)
    changes_sent: int | None = None  # `group.changes` at the last update; None: engines lack the group's weights

    _rendezvous: _Rendezvous | None = None  # None: the next update makes one
    _updates_done: int = 0  # that reached all engines
    _unverified: bool = False  # the engines cannot report `weight_sums`
    _updated_once: set[str] = field(factory=set)  # engines whose current process has taken an update
    _pushing: bool = False
    _dying: asyncio.Task[str] | None = None  # of `begin`: ends once all engines have died

    # ---- for a loop of one's own ------------------------------------------------------------------------------------

    @classmethod
    @contextlib.contextmanager
    def start(
        cls,
        config: Config | Mapping[str, Any] | Path | str,
        *,
        resume: str = "",
        directory: Path | str = "",
        notify: Callable[[str], None] = note,
    ) -> Iterator[Self]:
        """Start the actor's ranks, as `TrainGroup.start` does, and the config's engines, for a loop of one's own; the
        ranks are `group`. Read are also `[engines]`, `[weights]`, and of `[rollout]` the engine, its replicas, the
        longest samples and how often an engine may be restarted. Engines write logs into `directory`, by default one
        that goes with the block, at whose end all processes end. `resume` and `notify` are as of `TrainGroup.start`.

        Raises UserError with a line for each problem that can be known before a process starts.
        """
        from corerl.plan.group import plan_group  # slow to import: takes seconds

        with contextlib.ExitStack() as stack:
            where = Path(directory or stack.enter_context(tempfile.TemporaryDirectory(prefix="corerl-engines-")))
            plan = plan_group(as_config(config), ACTOR, resume=resume, engines_in=where.absolute())
            processes = plan.processes
            progress = Progress(Observers([], notify=notify), 0)
            for line in plan.notices:
                progress.notice(line)
            loop = EventLoop("engines")
            stack.callback(loop.close)
            started = start_processes(processes, plan.cluster, plan.rollout, loop, progress, stack)
            group, fleet = started.train_groups[ACTOR], started.fleet
            assert fleet is not None
            residency = Residency.of(processes, started.train_groups, fleet, progress, passed={ACTOR})
            yield cls(
                config=plan.weights,
                group=group,
                fleet=fleet,
                address_of=partial(update_address, processes, plan.cluster, fleet, where.absolute()),
                separate_adapters=processes.separate_adapters,
                residency=residency,
                on_death=partial(_require_places, started.pool),
                progress=progress,
                context_length=plan.context_length,
            )
            group.shutdown("finished")
            fleet.close()

    @property
    def version(self) -> int:
        """Of the weights that were sent last; -1 before the first time."""
        return self.policies.version

    @property
    def up_to_date(self) -> bool:
        """Whether the weights that were sent last are those of now."""
        return self.changes_sent == self.group.changes

    @property
    def held(self) -> tuple[int, ...]:
        """The versions that engines can sample from, the newest last: it alone, unless `weights.versions` says more.
        Engines that lose their weights lose all earlier versions: by `turn`, by a `push` on shared devices, and when
        one is replaced."""
        return self.fleet.held

    def push(self, *, snapshot: str = "", forget: int | None = None) -> int:
        """Send the group's weights, or its `snapshot`, to all engines, and start others in the place of those
        that have died or miss the update; returns the version. It takes the place of the version to `forget`, or of the
        oldest, once engines hold as many as they can. Rows that are being generated go on under these weights, but for
        those of a request with a version. Called, like `generate`, in the thread that starts the group's verbs. Raises
        WeightUpdateError, or the cause of an engine's death, once its restarts are used up."""
        self.fleet.step_done()
        self._push(snapshot, forget)
        return self.version

    def _push(self, snapshot: str = "", forget: int | None = None) -> None:
        self._pushing = True
        # Ranks that have restarted from what another group saved go on from its version.
        self.policies = evolve(self.policies, version=max(self.version, self.group.loaded_version - 1))
        try:
            self.update(lambda policies: self._interrupted(forget), snapshot=snapshot)
        finally:
            self._pushing = False
        self.residency.enter(SAMPLE)

    def generate(self, request: GenerateRequest) -> Generation:
        """Complete the rows, under the weights that were pushed last. Weights that engines have lost, as they slept or
        died, are pushed again, which are then those of now. Raises what `push` does, and an engine's own error."""
        return self.serve(self.fleet.generate(request), self._push)

    def begin(self, request: GenerateRequest) -> concurrent.futures.Future[Generation]:
        """Like `generate`, from any thread and without waiting; `asyncio.wrap_future` lets a task await it, and
        cancelling it ends the sampling. Where engines have no weights, rows wait for the next `push`, which also starts
        others in the place of dead ones. Where all have died, the result is EngineFailed; where a request's version is
        gone, VersionGone."""
        return self.fleet.loop.begin(self._sampled(request))

    async def _sampled(self, request: GenerateRequest) -> Generation:
        work = asyncio.ensure_future(self.fleet.generate(request))
        if self._dying is None or self._dying.done():  # one for all: hundreds of requests may be sampled at once
            self._dying = asyncio.create_task(self._all_died())
        try:
            await asyncio.wait([work, self._dying], return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise EngineFailed(self._dying.result())
            return work.result()
        finally:
            work.cancel()

    async def _all_died(self) -> str:
        """Returns why, once all engines have died and no push starts others."""
        while True:
            await asyncio.sleep(DEATH_SECONDS)
            died = self.fleet.deaths
            if len(died) == len(self.fleet) and not self._pushing:
                return "; ".join(error.message for error in died.values())

    @property
    def takes_turns(self) -> bool:
        """Whether engines and ranks share devices and take turns in memory, so that engines lose their weights by
        `turn`."""
        return bool(self.residency.stages)

    def turn(self, stage: Literal["train", "forward", "save"]) -> None:
        """Where ranks and engines share devices: let engines sleep and wake what ranks need for these verbs, until the
        next `push`, after which rows that are being generated go on. Elsewhere nothing happens."""
        if self.takes_turns:
            # Also rows whose callers have gone are being generated: an engine only sleeps once none are.
            with self._interrupted():
                self.residency.enter(TURNS[stage])

    @contextlib.contextmanager
    def _interrupted(self, forget: int | None = None) -> Iterator[None]:
        """A context in which no rows are generated; they go on afterwards. Engines then hold the version to `forget` no
        longer."""
        self.fleet.loop.run(self.fleet.pause())
        try:
            if forget is not None:  # only now: rows of it may have been on their way to engines
                self.fleet.forget(forget)
            yield
        finally:
            self.fleet.loop.run(self.fleet.resume())

    # ---- one update -------------------------------------------------------------------------------------------------

    def serve(self, work: Coroutine[Any, Any, T], update: Callable[[], None]) -> T:
        """Wait for work that needs engines; whenever none is left, `update` starts others and gives them weights."""
        future = self.fleet.loop.begin(work)
        try:
            while not self.fleet.wait(future):
                with self.fleet.replacing():
                    update()
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def update(self, hold: Hold | None, *, snapshot: str = "") -> None:
        """Update all engines to the actor's weights, or its `snapshot`, and replace engines that miss the update.
        `hold` keeps from generating meanwhile engines that may. Raises WeightUpdateError, or the cause of an engine's
        death, if replacing does not help."""
        before, new = self.version, bool(snapshot) or not self.up_to_date
        # An attempt that failed has made the new policy's version already: the next one is of the same policy.
        while failed := self._try_update(hold, self.policies.next(new=new and self.version == before), snapshot):
            self._replace(failed)
        self._updates_done += 1
        self.changes_sent = None if snapshot else self.group.changes

    def mark_outdated(self) -> None:
        """Ranks have restarted with other weights than engines hold: a push is due whatever the schedule says."""
        self.changes_sent = None

    def mark_current(self) -> None:
        """The ranks of now have loaded the weights that engines hold: these need not be pushed."""
        self.changes_sent = self.group.changes

    def _try_update(self, hold: Hold | None, policies: Policies, snapshot: str) -> dict[str, CorerlError]:
        """Run one update to the last of the policies; returns the engines to replace, which now serve nothing, and
        why."""
        with contextlib.ExitStack() as stack:
            if hold is not None:
                with self.progress.phase("hold"):
                    stack.enter_context(hold(policies))
            if deaths := self.fleet.deaths:
                return deaths
            self.residency.enter(UPDATE)
            with self.progress.phase("update_weights"):
                failed = self._send_and_receive(policies, snapshot)
            # Before any call to all engines, even to resume or sleep: an engine that hangs does not answer, and one
            # with a failed device fails again.
            self.fleet.leave_out(failed)
            return failed

    def _send_and_receive(self, policies: Policies, snapshot: str) -> dict[str, CorerlError]:
        # The version is used up even if no engine takes it: engines refuse a version that they have.
        self.policies, version = policies, policies.version
        group, fleet, every = self.group, self.fleet, self.config.verify_every
        verify = every > 0 and self._updates_done % every == 0
        if self._rendezvous is not None and self._rendezvous.ranks is not group.processes:
            self.new_rendezvous()
        meeting = self._rendezvous = self._rendezvous or self._meet()
        address, alone = meeting.address, meeting.adapters if fleet.all_serve else None
        sending = group.update_weights(address, version, verify=verify, adapters=alone is not None, snapshot=snapshot)
        receiving = fleet.receive(alone or meeting.manifest, version, address)
        causes: set[str] = set()  # engines that failed first
        reported: set[str] = set()
        while not sending.ready(POLL_SECONDS):
            failed = {name: each.error for name, each in fleet.received(receiving, 0.0).items() if each.error}
            for name in failed.keys() - reported:
                group.engine_failed(address, name, failed[name])
            causes, reported = causes or set(failed), reported | failed.keys()
        senders = sending.result()
        if any(senders.engines.values()):  # they do not know whether these have all they need
            self.new_rendezvous()
        # As long as a sender waits for an engine: over a disk, engines only begin to read now.
        received = fleet.received(receiving, address.timeout)
        missed = {name: received.get(name) for name in fleet.names if name not in received or received[name].error}
        taken = [name for name in fleet.names if name not in missed]
        fleet.updated(taken, {name: received[name].held or (version,) for name in taken})
        self._updated_once.update(taken)
        if missed:
            silent = f"no answer within {address.timeout:g} s after the update's end"
            return self._to_replace(missed, causes, senders, silent)
        if senders.sums:
            self._require_loaded(senders.sums, version, meeting.manifest.dtype)
        return {}

    def _meet(self) -> _Rendezvous:
        """A rendezvous of the ranks and engines as they are."""
        return _Rendezvous(
            address=self.group.rendezvous(self.address_of()),
            manifest=self.group.manifest().result(),
            adapters=self.group.manifest(adapters=True).result() if self.separate_adapters else None,
            ranks=self.group.processes,
        )

    def new_rendezvous(self) -> None:
        """Let the next update have another rendezvous: ranks or engines have ended or are others now, or an update
        has failed. Engines that still wait at this one stop."""
        if self._rendezvous is not None:
            abandon(self._rendezvous.address)
        self._rendezvous = None
        self._updated_once &= set(self.fleet.names)

    def _to_replace(
        self, missed: Mapping[str, Received | None], causes: Collection[str], senders: UpdateResult, silent: str
    ) -> dict[str, CorerlError]:
        """Which of the engines that missed an update to replace, and why: those that died or gave no answer; if all
        are alive and answered, those that failed first. `silent` is why one gave no answer.

        Raises WeightUpdateError if one of these has never taken an update: the next one would fail too.
        """
        gone = [name for name, each in missed.items() if each is None or each.died]
        failed, known = gone or causes or missed, senders.engines
        errors = {name: _reason(missed[name], known.get(name, ""), silent) for name in failed}
        if not gone and (never := sorted(errors.keys() - self._updated_once)):
            reasons = "; ".join(f"{name}: {errors[name]}" for name in never)
            raise WeightUpdateError(f"weights version {self.version} did not reach every engine: {reasons}")
        to_replace: dict[str, CorerlError] = {}
        for name, error in errors.items():
            answer = missed[name]
            died = answer is not None and answer.died
            to_replace[name] = WorkerDied(error) if died else WeightUpdateError(f"{name}: {error}")
            to_replace[name].details = "" if answer is None else answer.details
        return to_replace

    def _require_loaded(self, sums: Mapping[str, int], version: int, dtype: str) -> None:
        """Raise WeightUpdateError if an engine holds anything other than what was sent."""
        for name, loaded in self.fleet.weight_sums(dtype).items():
            if loaded is None:
                if not self._unverified:
                    self.progress.notice(
                        f"{name} cannot report what it has loaded (Engine.weight_sums), so it is not compared with "
                        "what was sent; what it computes still is, by algorithm.on_mismatch"
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
                self.on_death("; ".join(error.message for error in failed.values()))
            except InsufficientResources as refused:
                raise refused.with_cause(next(iter(failed.values()))) from refused
            self.fleet.replace({name: error for name, error in failed.items() if name in self.fleet.names})
        self.residency.engines_changed()
        self._updated_once -= failed.keys()
        self.new_rendezvous()


def _reason(answer: Received | None, sender: str, silent: str) -> str:
    """Why an engine missed an update, `silent` if it gave no answer. Either side may know the cause while the other
    only sees a closed connection."""
    if answer is None:
        return f"{silent}; {sender}" if sender else silent
    # Senders may just repeat an engine's reason, and a death is the cause of their error.
    known = answer.died or sender in answer.error
    return answer.error if known else f"{answer.error}; {sender}"


def _require_places(pool: ResourcePool, reasons: str) -> None:
    """Raise InsufficientResources if the machine of a process is gone."""
    pool.poll()
    if any(slot.lost for slots in pool.values() for slot in slots):
        raise InsufficientResources(f"a machine of the group or of its engines is gone: {reasons}")
