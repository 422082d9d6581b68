"""Drive a role's ranks as one object: each verb starts its work and returns a `Future`."""

from __future__ import annotations

import contextlib
import secrets
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
from attrs import evolve, frozen

from corerl.algorithms.base import Objective
from corerl.calls import Calls, Future
from corerl.cluster.group import RayGroup
from corerl.cluster.heartbeat import Pending, Watching
from corerl.cluster.placement import ResourcePool, Slot, reserved
from corerl.cluster.runtime import CPUS, put, ray_session
from corerl.config.load import as_config
from corerl.config.schema import Config
from corerl.data.packing import StepPlan, plan_forward, plan_part, plan_steps
from corerl.errors import ContractError, CorerlError, DataError
from corerl.kinds import ALL_KINDS
from corerl.messages import note
from corerl.plan.roles import RolePlan
from corerl.plugin.capabilities import Capability, check_capabilities
from corerl.plugin.host import refused_if_frozen
from corerl.plugin.spec import ACTOR
from corerl.plugin.transports import transport_named
from corerl.trainer.results import (
    Gradients,
    assemble_columns,
    common_manifest,
    merge_gradients,
    merge_inits,
    merge_train_results,
    merge_updates,
)
from corerl.types import (
    PICTURE,
    TARGETS,
    Array,
    InitResult,
    IntArray,
    LossSpec,
    MemoryKind,
    Output,
    ParallelLayout,
    SampleBatch,
    SleepResult,
    Step,
    TrainResult,
    UpdateResult,
)
from corerl.weights.manifest import Manifest
from corerl.weights.transport import Address

T = TypeVar("T")


class StoredBatch:
    """Samples that several verbs, of one group or of several, read from one copy in the object store of each node. Put
    there when a verb needs it, and gone with this object."""

    def __init__(self, samples: SampleBatch) -> None:
        self.samples = samples
        self._pieces: dict[tuple[frozenset[str], bytes], Any] = {}  # references, by columns and rows

    def piece(self, rows: IntArray | None, columns: Iterable[str]) -> Any:
        """A reference to the samples `rows` [n], None: all, with the `columns` that they have. Raises
        CorerlError if neither the object store nor the disk has room."""
        wanted = frozenset((*columns, PICTURE)).intersection(self.samples.columns)
        key = (wanted, b"all" if rows is None else rows.tobytes())
        if key not in self._pieces:
            chosen = {name: column for name, column in self.samples.columns.items() if name in wanted}
            samples = evolve(self.samples, columns=chosen)
            self._pieces[key] = put(samples if rows is None else samples.take_rows(rows))
        return self._pieces[key]


def _stored(samples: SampleBatch | StoredBatch) -> StoredBatch:
    return samples if isinstance(samples, StoredBatch) else StoredBatch(samples)


class TrainGroup:
    """The ranks of one role, as `TrainGroup.start(config)` gives them: by `launch`, then `construct`, then `init`.

    Each verb calls the method of that name of `trainer.worker.Worker` on every rank, which calls the backend's hook
    through its `PluginHost`. Ranks run the verbs in the order they were started; start them in one thread.

    A failing rank ends the group with its error, which the results of that verb and of all that were started after it
    raise. Once the group has ended, verbs raise WorkerDied when they are called; the first one, or `shutdown`, raises
    the error itself if no result has. An error that does not end the group, such as SaveFailed, is raised by `shutdown`
    if no result has.
    """

    def __init__(self, processes: RayGroup, role_plan: RolePlan) -> None:
        """`processes` are of the plan."""
        self.processes = processes
        self.role_plan = role_plan
        self.role = role_plan.role
        self._config: Config | None = None  # of `start`, and the bundles that it has reserved
        self._pool: ResourcePool | None = None
        self._calls = Calls(processes)
        self.layouts: list[ParallelLayout] = []  # of the ranks, once the result of `init` is read
        self.loaded_step = 0  # the optimizer step that comes after the state that the ranks loaded
        self.loaded_version = 0  # of the weights that they loaded; they send engines no version before it
        self.changes = 0  # verbs that have changed the weights, or may have
        self._join_at: tuple[str, int, int] | None = None  # (host, port, socket in rank 0) where the ranks meet

    @classmethod
    @contextlib.contextmanager
    def start(
        cls,
        config: Config | Mapping[str, Any] | Path | str,
        *,
        role: str = ACTOR,
        resume: str = "",
        moments: bool = True,
        notify: Callable[[str], None] = note,
    ) -> Iterator[Self]:
        """Start the ranks of a config's role alone, for a loop of one's own, and let them build and load: from the
        directory `resume` of a `save`, or the model. Without `moments` the weights of `resume` alone are loaded, and a
        new optimizer begins at step 0. Read are `[model]`, `[backend]`, `[backends]`, `[roles]`,
        `[train]`, `[cluster]`, and of `[algorithm]` the role's loss. The block's end ends them, and Ray if the block
        has started it: a Ray that the process has already, be it of an outer block, is used and stays. `notify` gets
        lines about what was settled, and about calls that take long; by default they are printed to stderr.

        Raises UserError with a line for each problem that can be known before a process starts.
        """
        from corerl.plan.group import plan_group  # slow to import: takes seconds

        config = as_config(config)
        group_plan = plan_group(config, role, resume=resume)
        for line in group_plan.notices:
            notify(line)
        placement = group_plan.processes.placement
        cpus = max(placement.cpus, CPUS)
        with (
            ray_session(address=group_plan.cluster.address, cpus=cpus) as owns_ray,
            reserved(placement, release=not owns_ray) as pool,
        ):
            starting = group_plan.role if moments else _loading(group_plan.role, resume_moments=False)
            group = cls.launch(starting, pool[role], watching=Watching.of(group_plan.cluster, notify))
            group._config, group._pool = config, pool
            try:
                group.init().result()
                yield group
                group.shutdown()
            finally:
                group.processes.kill()

    @classmethod
    def launch(cls, role_plan: RolePlan, slots: Sequence[Slot], *, watching: Watching | None = None) -> Self:
        """Start a process for each rank; returns at once."""
        return cls(_processes(role_plan, slots, watching), role_plan)

    def restart(
        self,
        resume: str | None = None,
        role_plan: RolePlan | None = None,
        slots: Sequence[Slot] | None = None,
        *,
        moments: bool = True,
    ) -> Future[InitResult]:
        """End the ranks, whatever they do, and start others in their place, which load what `save` wrote into the
        directory `resume`, or the model if it is empty (None: as these did); by another plan and in other slots if
        these are given. Without `moments` the weights alone are loaded, and a new optimizer begins at step 0.
        `layouts` are known once the result is read."""
        self.processes.kill()
        self.role_plan = role_plan or self.role_plan
        if resume is not None:
            self.role_plan = _loading(self.role_plan, resume=resume, resume_moments=moments)
        elif not moments:
            self.role_plan = _loading(self.role_plan, resume_moments=False)
        before = self.processes
        self.processes = _processes(self.role_plan, before.slots if slots is None else slots, before.watching)
        self._calls, self.layouts, self._join_at = Calls(self.processes), [], None
        return self.init()

    def resize(
        self, resume: str, *, ranks: int = 0, backend: str = "", options: Mapping[str, Any] | None = None
    ) -> InitResult:
        """Go on from what `save` wrote into the directory `resume` with another number of ranks, another backend, or
        other `options` of it; what is left out stays as it is, but for the options of another backend. For groups of
        `start`. The ranks end, and others start in their place; snapshots end with them.

        Raises UserError with a line for each problem that can be known before a process starts, SaveFailed if a save in
        the background has failed, and CorerlError if the cluster has no room: then all is as before.
        """
        from corerl.checkpoint.writer import in_memory  # slow to import, as are the next two: takes seconds
        from corerl.plan.group import plan_group
        from corerl.plan.settle import with_sizes

        if self._config is None or self._pool is None:
            raise CorerlError(f"{self.role}: resize needs a group of TrainGroup.start; use restart")
        config = with_sizes(self._config, self.role, ranks=ranks, backend=backend, options=options)
        group_plan = plan_group(config, self.role, resume=resume)
        if not self.processes.ended:  # a save in the background ends with the ranks
            self.saved(wait=True, memory=in_memory(resume)).result()
        try:
            slots = self._pool.arrange(group_plan.processes.placement)
            result = self.restart(None, group_plan.role, slots[self.role]).result()
        except BaseException:
            self._pool.take({})  # gives back what was reserved for ranks that did not start
            raise
        self._pool.take(slots)
        self._config = config
        return result

    # ---- training ---------------------------------------------------------------------------------------------------

    def construct(self) -> Future[None]:
        """Let each rank import its plugins and check them. Takes no device memory; `init` does it if it is not done.
        Returns when rank 0's process has started."""
        self._join_at = self.processes.listen(0)  # first: later it would queue behind slow imports
        constructing = self.processes.construct([(assignment,) for assignment in self.role_plan.assignments])
        return self._add(constructing, lambda results: None)

    def init(self) -> Future[InitResult]:
        """Connect the ranks, build, load and resume; reading the result sets `layouts`, by which verbs plan. Raises
        ContractError if ranks disagree on their state or layout."""
        if self._join_at is None:
            self.construct()
        assert self._join_at is not None
        self.changes += 1
        host, port, listening = self._join_at
        token = secrets.token_hex(16)
        meeting = [(host, port, listening if rank == 0 else None, token) for rank in range(len(self.processes))]
        return self._add(self.processes.start_each("init", meeting), self._agreed)

    def _agreed(self, results: Sequence[InitResult]) -> InitResult:
        self.layouts = [result.layout for result in results]
        result = merge_inits(results, self.role_plan)
        self.loaded_step, self.loaded_version = result.optimizer_step, result.weights_version
        return result

    def train(
        self, samples: SampleBatch | StoredBatch, plan: StepPlan, loss: LossSpec, step: Step
    ) -> Future[TrainResult]:
        """Take one optimizer step; metrics are merged over ranks, tokens summed over dp ranks. `plan` assigns the
        samples to dp ranks and micro-batches; several steps read one copy of a `corerl.StoredBatch`. Raises the error
        of the first rank to fail, after ending all ranks; ContractError if ranks disagree on whether the step was
        applied or on the gradient norm. Raises Unsupported at once, and the group goes on, if `step.adam` is set and
        the backend does not have the capability `adam`, or samples have a column `targets` and it does not have that
        one; DataError for a target that is no id of the vocabulary."""
        self._require_step("train", step)
        stored = _stored(samples)
        pending = self._start_reading("train", stored, stored.samples.columns, plan, loss, step, at=_at(step))
        self.changes += 1
        return self._add(pending, partial(merge_train_results, role=self.role))

    def forward_backward(
        self,
        samples: SampleBatch | StoredBatch,
        plan: StepPlan,
        loss: LossSpec,
        *,
        outputs: Output | Sequence[Output] = (),
        last: bool = False,
    ) -> Future[Gradients]:
        """The first half of a step, any number of times: add the gradients of the samples in `plan`. `outputs` of the
        same passes come back as columns of all samples, 0 at those outside the plan. `last` promises that
        `optimizer_step` comes next, which lets some backends reduce gradients while the last passes run. Until then
        nothing is saved, gradients stay awake, and `train` is refused: such a call ends the group with WrongState."""
        self._require_not_frozen("forward_backward")
        wanted = (outputs,) if isinstance(outputs, Output) else tuple(outputs)
        stored = _stored(samples)
        columns = stored.samples.columns
        pending = self._start_reading("forward_backward", stored, columns, plan, loss, wanted, last)
        asked = partial(merge_gradients, outputs=wanted, batch=stored.samples, members=plan.members, role=self.role)
        return self._add(pending, asked)

    def optimizer_step(self, step: Step, *, scale: float = 1.0) -> Future[TrainResult]:
        """The second half of a step: multiply the gradients by `scale`, which is 1 / denominator where the plans'
        weights do not hold it, clip them, and take the step. The result is as of `train`, of all samples of the step;
        metrics that are sums with the loss's token weights are multiplied too."""
        self._require_step("optimizer_step", step)
        self.changes += 1
        pending = self._start("optimizer_step", step, scale, at=_at(step))
        return self._add(pending, partial(merge_train_results, role=self.role))

    def plan_steps(self, samples: SampleBatch, *, seed: int) -> list[StepPlan]:
        """The optimizer steps of a rollout batch, as its `[train]` and its algorithm say: `mini_batches` in each of
        `epochs`, or one per group if there are fewer groups. Their order follows from `seed`; give each batch
        another."""
        train, objective = self.role_plan.train, self._require_not_frozen("plan_steps")
        return plan_steps(
            samples,
            self.layouts[0],
            tokens_per_micro_batch=train.tokens_per_micro_batch,
            mini_batches=train.mini_batches,
            epochs=train.epochs,
            aggregation=objective.aggregation,
            max_tokens=self.role_plan.max_tokens,
            seed=seed,
        )

    def plan_part(self, samples: SampleBatch, *, unit: float = 1.0) -> tuple[StepPlan, float]:
        """A plan for `forward_backward` of some groups of a step whose others are elsewhere, and what they add to the
        step's denominator, as the role's `[train]` and algorithm say. All calls of the step take the same `unit`, near
        the denominator; its `optimizer_step` has the scale unit / denominator."""
        train, objective = self.role_plan.train, self._require_not_frozen("plan_part")
        return plan_part(
            samples,
            self.layouts[0],
            tokens_per_micro_batch=train.tokens_per_micro_batch,
            aggregation=objective.aggregation,
            max_tokens=self.role_plan.max_tokens,
            unit=unit,
        )

    def forward(
        self,
        samples: SampleBatch | StoredBatch,
        outputs: Output | Sequence[Output],
        *,
        snapshot: str = "",
        replay: bool = False,
    ) -> Future[dict[Output, Array]]:
        """Pass the samples through the model without gradients, under `snapshot` ("": the weights as they are); returns
        columns [N, ...] aligned with their tokens. With `replay`, tokens are routed through the experts in the column
        `routed_experts`."""
        stored, train = _stored(samples), self.role_plan.train
        samples = stored.samples
        plan = plan_forward(samples, self.layouts[0], tokens_per_micro_batch=train.tokens_per_micro_batch)
        wanted = (outputs,) if isinstance(outputs, Output) else tuple(outputs)
        columns = ["loss_mask", *([Output.ROUTED_EXPERTS.value] if replay else [])]
        if Output.LOGPROBS in wanted:
            columns.append(TARGETS)
        pending = self._start_reading("forward", stored, columns, plan, wanted, snapshot, replay)
        return self._add(pending, partial(assemble_columns, outputs=wanted, batch=samples, role=self.role))

    # ---- weights ----------------------------------------------------------------------------------------------------

    def manifest(self, *, adapters: bool = False) -> Future[Manifest]:
        """The manifest of all updates, for `Engine.receive`; with `adapters` of those that send these alone. Raises
        ContractError if ranks disagree, and Unsupported if the role sends no adapters."""
        return self._add(self._start("manifest", adapters), partial(common_manifest, role=self.role))

    def rendezvous(self, address: Address) -> Address:
        """The address of an update with a fresh rendezvous: an unguessable token, and a socket in the first rank if the
        transport joins senders and receivers in a group."""
        address = evolve(address, token=secrets.token_hex(16))
        if not transport_named(address.transport).one_group or not address.engines:
            return address
        host, port, listen_fd = self.processes.listen(0)
        return evolve(address, host=host, port=port, listen_fd=listen_fd)

    def update_weights(
        self, address: Address, version: int, *, verify: bool = False, adapters: bool = False, snapshot: str = ""
    ) -> Future[UpdateResult]:
        """Send the weights, or `snapshot`, to the receivers at `address` as `version`, which must be above every
        earlier one. In the result, bytes are of all ranks and seconds of the slowest; an engine that did not get every
        bucket has an entry in `engines`, and after that the next update needs another `rendezvous`; with `verify`,
        `sums` has the bit sums of each sent tensor (`corerl.weights.bit_sums`). With `adapters`, these alone are sent,
        to engines that hold all other weights (`weights.lora = "adapter"`)."""
        self._require_not_frozen("update_weights")
        return self._add(self._start("update_weights", address, version, verify, adapters, snapshot), merge_updates)

    def engine_failed(self, address: Address, engine: str, reason: str) -> None:
        """During an update at `address`, let its senders wait no more for this engine, which has died or refused it."""
        self.processes.aside("engine_failed", address.token, engine, reason)

    def snapshot(self, name: str) -> Snapshot:
        """A handle on weights kept under this name; nothing is stored until its `create` or `load`."""
        return Snapshot(self, name)

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def save(self, path: str, step: Step, *, background: bool = False) -> Future[int]:
        """Write this role's part into the directory `path`; returns bytes. In the background it is copied to the host
        first, and `saved` returns whether it is complete; one of these and a run's in-memory checkpoint may be in
        flight."""
        self._require_not_frozen("save")
        saving = self._start("save", path, step, background, at=_at(step))
        return self._add(saving, lambda results: sum(result.bytes for result in results))

    def saved(self, *, wait: bool = False, memory: bool = False) -> Future[bool]:
        """Whether the last background save is written on all ranks, with `memory` a run's last in-memory checkpoint;
        with `wait`, once it is. Raises SaveFailed if one failed."""
        return self._add(self._start("saved", wait, memory), all)

    def _require_not_frozen(self, verb: str) -> Objective:
        """Raise if the role only passes samples, before any rank is called: an error there would end the group."""
        if self.role_plan.objective is None:
            raise CorerlError(refused_if_frozen(verb, f"the {self.role}"))
        return self.role_plan.objective

    def _require_step(self, verb: str, step: Step) -> None:
        """Raise if the role is frozen, or its backend lacks what the step asks for."""
        self._require_not_frozen(verb)
        if step.adam is not None:
            backend = self.role_plan.backend
            check_capabilities(backend.spec, {Capability.ADAM: f"{verb} with Step.adam"}, name=backend.name)

    def _require_targets(self, verb: str, samples: SampleBatch) -> None:
        """Raise Unsupported for `targets` that the backend would ignore, DataError for one that is no token id."""
        if TARGETS not in samples.columns:
            return
        backend, targets = self.role_plan.backend, samples.columns[TARGETS]
        check_capabilities(backend.spec, {Capability.TARGETS: f"{verb} with the column {TARGETS!r}"}, name=backend.name)
        if not targets.size or (targets.min() >= 0 and targets.max() < self.role_plan.vocabulary):
            return
        at = tuple(np.argwhere((targets < 0) | (targets >= self.role_plan.vocabulary))[0])
        row = int(samples.row_of[at[0]])
        place = ", ".join(map(str, (at[0] - samples.offsets[row], *at[1:])))
        raise DataError(
            f"{verb}: column {TARGETS!r} has {targets[at]} at [{place}] of row {row}, expected ids from 0 to "
            f"{self.role_plan.vocabulary - 1}; as padding any of them will do, with weight 0"
        )

    # ---- memory -----------------------------------------------------------------------------------------------------

    def sleep(self, kinds: Collection[MemoryKind] = ALL_KINDS) -> Future[list[SleepResult]]:
        """Free the device memory of these kinds, copying all but `grad` to the host; returns the bytes that each rank
        freed and still holds. Sleeping kinds are skipped; verbs that need one raise NotResident."""
        return self._add(self._start("sleep", frozenset(kinds)), list)

    def wake_up(self, kinds: Collection[MemoryKind] = ALL_KINDS) -> Future[int]:
        """Restore sleeping kinds bit for bit; returns bytes over all ranks. If a rank's device has too little memory
        for a kind, that kind stays asleep as a whole."""
        waking = self._start("wake_up", frozenset(kinds))
        return self._add(waking, lambda results: sum(result.restored_bytes for result in results))

    def clear_memory(self) -> Future[None]:
        """Release device memory that allocators have cached."""
        return self.call("clear_memory")

    def shutdown(self, reason: str = "finished") -> None:
        """Let every rank finish its writes, then end the processes. Raises the first error that no result has raised.
        Otherwise it does nothing if the group has ended, so that in a `finally` it does not hide why."""
        try:
            self._calls.wait()
            if not self.processes.ended:
                self.processes.call("shutdown", reason)
        finally:
            if not self.processes.ended:
                self.processes.kill()
        self._calls.raise_unread()

    # ---- inside -----------------------------------------------------------------------------------------------------

    def call(self, method: str, *args: Any) -> Future[None]:
        """Start a method of the workers that returns nothing."""
        return self._add(self._start(method, *args), lambda results: None)

    def _start_reading(
        self, method: str, stored: StoredBatch, columns: Collection[str], plan: StepPlan, *args: Any, at: str = ""
    ) -> Pending:
        """Start a verb on samples: each rank gets a reference to what the ranks of its node read, and its own shard of
        the plan. A single node reads one copy of all samples, the same for all steps."""
        if TARGETS in columns:
            self._require_targets(method, stored.samples)
        if self.processes.ended:
            self._calls.raise_unread()
        places = [(node, layout.dp_rank) for node, layout in zip(self.processes.nodes, self.layouts, strict=True)]
        read: dict[str, set[int]] = defaultdict(set)
        for node, dp_rank in places:
            read[node].add(dp_rank)
        rows = {node: plan.rows(dp_ranks) if len(read) > 1 else None for node, dp_ranks in read.items()}
        pieces = {node: stored.piece(rows[node], columns) for node in read}
        shards = {(node, dp_rank): plan.shard_of(dp_rank, rows[node]) for node, dp_rank in places}
        arguments = [(pieces[place[0]], shards[place], *args) for place in places]
        return self.processes.start_each(method, arguments, at=at)

    def _add(self, pending: Pending, merge: Callable[[list[Any]], T]) -> Future[T]:
        """The future of what `merge` makes of the ranks' results; ranks that disagree are ended."""

        def merged(results: list[Any]) -> T:
            try:
                return merge(results)
            except ContractError:
                self.processes.kill()
                raise

        return self._calls.add(pending, merged)

    def _start(self, method: str, *args: Any, at: str = "") -> Pending:
        if self.processes.ended:
            self._calls.raise_unread()
        return self.processes.start(method, *args, at=at)


def _loading(plan: RolePlan, **changes: Any) -> RolePlan:
    """The plan with changes of what its ranks load."""
    assignments = [evolve(each, config=evolve(each.config, **changes)) for each in plan.assignments]
    return evolve(plan, assignments=tuple(assignments))


def _processes(plan: RolePlan, slots: Sequence[Slot], watching: Watching | None) -> RayGroup:
    names = [f"{plan.role} rank {rank}" for rank in range(len(plan.assignments))]
    return RayGroup(names, "corerl.trainer.worker:Worker", slots, plan.environment, watching=watching)


@frozen
class Snapshot:
    """Weights kept by name in the ranks' host memory, for `TrainGroup.forward(snapshot=...)` and to send to engines."""

    group: TrainGroup
    name: str

    def create(self) -> Future[None]:
        """Store the current weights, replacing an earlier snapshot of that name."""
        return self.group.call("create_snapshot", self.name)

    def load(self, path: str = "") -> Future[None]:
        """Load from a model directory; an empty path means the weights that the run started from."""
        return self.group.call("load_snapshot", self.name, path)

    def drop(self) -> Future[None]:
        return self.group.call("drop_snapshot", self.name)


def _at(step: Step) -> str:
    """For messages: where a rank is that dies or hangs."""
    return f"optimizer step {step.optimizer_step}"
