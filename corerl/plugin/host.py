"""One worker's plugins: the backend, wrapped by its extensions, behind a typed call for each hook that refuses whatever
the backend's state does not allow before the backend is entered."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from enum import StrEnum
from typing import Any, NoReturn

from corerl.config.schema import RoleConfig
from corerl.errors import (
    ContractError,
    CorerlError,
    HookFailed,
    NotResident,
    Unsupported,
    UserError,
    WeightUpdateError,
    WrongState,
)
from corerl.messages import one_line
from corerl.plugin.capabilities import FULL, Capability, Support, asked_by_role, refusal
from corerl.plugin.context import Context
from corerl.plugin.contract import (
    build_manager,
    call_chain,
    call_each,
    check_backend,
    refuse_observers,
    require_instance,
)
from corerl.plugin.hookspecs import NEEDS, RESULTS
from corerl.types import (
    ForwardResult,
    InitResult,
    LossSpec,
    MemoryKind,
    Output,
    PackedBatch,
    SaveResult,
    SleepResult,
    Step,
    TrainResult,
    UpdateResult,
    WakeResult,
)


class State(StrEnum):
    NEW = "new"
    READY = "ready"
    FAILED = "failed"  # init or train raised: weights and moments may be half-written, so only shutdown is left
    CLOSED = "closed"


ADVICE = {
    State.NEW: "call init first",
    State.READY: "it is initialised already",
    State.FAILED: "init or train failed earlier, only shutdown is allowed",
    State.CLOSED: "it was shut down; start a new worker",
}


# The verbs that are a capability as a whole.
VERBS = {"sleep": Capability.SLEEP, "wake_up": Capability.SLEEP, "snapshot": Capability.SNAPSHOTS}


class BackendBase:
    """What the host accepts as a backend; `corerl.backend.Backend` extends it."""

    declared: Mapping[Capability, Support] = {}  # by its spec; the host writes it
    label: str = ""  # its name, for messages

    def require(self, capability: Capability, asked_by: str) -> None:
        """Refuses what the spec declares as lacking, also where the driver missed it or hooks are called without one.
        Raises Unsupported with the declared reason."""
        support = self.declared.get(capability, FULL)
        if not support.full:
            raise Unsupported(
                refusal(capability, support, asked_by=asked_by, backend=self.label or type(self).__name__)
            )

    def explained(self, hook: str, error: BaseException) -> str:
        """One line for an error that a hook raised, where more can be said than the error does; else "". Called on the
        rank that raised it alone: it must not begin a collective."""
        return ""

    def __reduce__(self) -> NoReturn:
        # cloudpickle, which Ray uses, would copy process groups and streams without a word.
        raise ContractError(f"a {type(self).__name__} cannot be pickled; build it inside the worker, from its name")


class PluginHost:
    """Lives and dies with one worker process. Not thread-safe: one verb at a time.

    `extensions` are (name, instance) in the config's order, the first outermost; `capabilities` what the backend's spec
    declares. Raises ContractError where a plugin does not keep the contract.

    Residency is kept by memory kind. A sleep that raises leaves its kinds asleep, and so does a wake_up: what they hold
    is not known until a wake_up succeeds.
    """

    def __init__(
        self,
        backend: object,
        *,
        name: str,
        extensions: Sequence[tuple[str, object]] = (),
        context: Context,
        capabilities: Mapping[Capability, Support] | None = None,
    ) -> None:
        label = f"backend:{name}"
        require_instance(label, backend)
        if not isinstance(backend, BackendBase):
            raise ContractError(
                f"{label} is a {type(backend).__name__}, which does not extend corerl.backend.Backend; subclass it"
            )
        # pluggy calls what was registered last first, so the first in the config's list goes in last.
        wrappers = [(f"extension:{each}", plugin) for each, plugin in reversed(extensions)]
        self._manager = build_manager([(label, backend), *wrappers], where=f"{context.role} rank {context.rank}")
        check_backend(self._manager, label)
        refuse_observers(self._manager)
        self.backend = backend
        self.backend.declared, self.backend.label = capabilities or {}, name
        self.name = name
        self.context = context
        self.state = State.NEW
        self.resident: frozenset[MemoryKind] = frozenset()
        self._next_version = 0  # the smallest that update_weights may bring

    def __reduce__(self) -> NoReturn:
        raise ContractError("a PluginHost cannot be pickled; build it inside the worker, from the plugin's name")

    # ---- the hooks ---------------------------------------------------------------------------------------------------

    def init(self, config: RoleConfig, context: Context) -> InitResult:
        asked = asked_by_role(
            context.role, config.train, device=config.device, ranks=context.world_size, value_head=config.value_head
        )
        for capability, asked_by in asked.items():
            self.backend.require(capability, asked_by)
        result: InitResult = self._call("init", config=config, context=context)
        self.state = State.READY
        self.resident = frozenset(MemoryKind)
        self._next_version = result.weights_version  # engines may still have to be given the first weights
        return result

    def train(self, batch: PackedBatch, loss: LossSpec, step: Step) -> TrainResult:
        result: TrainResult = self._call("train", at=step, batch=batch, loss=loss, step=step)
        return result

    def forward(self, batch: PackedBatch, outputs: tuple[Output, ...], weights: str) -> ForwardResult:
        result: ForwardResult = self._call("forward", batch=batch, outputs=outputs, weights=weights)
        return result

    def update_weights(self, sender: Any, version: int) -> UpdateResult:
        """Raises WeightUpdateError, before any byte moves, where `version` is not above all earlier ones. A version
        counts as used once it is tried: two streams must never share one."""
        with self.entering("update_weights", needs=NEEDS["update_weights"]):
            if version < self._next_version:
                raise WeightUpdateError(
                    f"weights version {version} was refused on {self._where}, expected {self._next_version} or more; "
                    "versions strictly increase"
                )
            self._next_version = version + 1
            result: UpdateResult = self._checked("update_weights", sender=sender, version=version)
            return result

    def save(self, path: str, step: Step, background: bool) -> SaveResult:
        if background:
            self.backend.require(Capability.SAVE_BACKGROUND, "save(background=True)")
        result: SaveResult = self._call("save", at=step, path=path, step=step, background=background)
        return result

    def sleep(self, kinds: Set[MemoryKind]) -> SleepResult:
        """Put `kinds` to sleep, less those that sleep. The hook is called even for none, to measure the residual."""
        with self.entering("sleep"):
            going = self.resident & kinds
            self.resident -= going
            result: SleepResult = self._checked("sleep", kinds=going)
            return result

    def wake_up(self, kinds: Set[MemoryKind]) -> WakeResult:
        """Wake `kinds` up, less those that are awake; the hook is called only where one is left."""
        with self.entering("wake_up"):
            coming = frozenset(kinds) - self.resident
            if not coming:
                return WakeResult(restored_bytes=0)
            result: WakeResult = self._checked("wake_up", kinds=coming)
            self.resident |= coming
            return result

    def shutdown(self, reason: str) -> None:
        """Shut each plugin down, extensions first. What they raise is raised here at the end, as one error, unless the
        host had failed before: then it is only printed, and hides nothing. A second call does nothing."""
        if self.state is State.CLOSED:
            return
        failed, self.state = self.state is State.FAILED, State.CLOSED
        self.resident = frozenset()
        errors = [
            error if isinstance(error, CorerlError) else self._hook_failed("shutdown", error, plugin=plugin)
            for plugin, error in call_each(self._manager, "shutdown", reason=reason)
        ]
        if failed:
            for error in errors:
                print(error.message, file=sys.stderr)
        elif len(errors) == 1:
            raise errors[0]
        elif errors:
            together = HookFailed("; ".join(error.message for error in errors))
            together.hook, together.rank = "shutdown", self.context.rank
            together.details = "\n".join(getattr(error, "details", "") or error.message for error in errors)
            raise together

    # ---- around every call -------------------------------------------------------------------------------------------

    @contextmanager
    def entering(self, verb: str, *, needs: Set[MemoryKind] = frozenset(), at: Step | None = None) -> Iterator[None]:
        """Guard a call of the backend: `with host.entering("snapshot", needs={PARAM}): host.backend...`

        Raises WrongState, Unsupported or NotResident before the block is entered. An error of CoreRL keeps its type,
        and says where it was raised unless it is the user's to mend; anything else that the block raises leaves as
        HookFailed.
        """
        if self.state is not (State.NEW if verb == "init" else State.READY):
            raise self._wrong_state(verb)
        if verb in VERBS:
            self.backend.require(VERBS[verb], verb)
        if asleep := frozenset(needs) - self.resident:
            kinds = ", ".join(kind for kind in MemoryKind if kind in asleep)
            raise NotResident(f"{verb} on {self._where} needs memory that sleeps: {kinds}; wake_up these kinds first")
        try:
            yield
        except BaseException as error:
            if verb in ("init", "train"):
                self.state = State.FAILED
            if isinstance(error, CorerlError) and not isinstance(error, UserError) and self._where not in error.message:
                error.args = (f"{self._where}: {verb}{_when(at)}: {error.message}",)
            # A backend that calls exit() must not take the worker down without a word.
            if isinstance(error, CorerlError) or not isinstance(error, Exception | SystemExit):
                raise
            raise self._hook_failed(verb, error, at=at) from error

    def _call(self, hook: str, *, at: Step | None = None, **arguments: Any) -> Any:
        with self.entering(hook, needs=NEEDS.get(hook, frozenset()), at=at):
            return self._checked(hook, **arguments)

    def _checked(self, hook: str, **arguments: Any) -> Any:
        result = getattr(self._manager.hook, hook)(**arguments)
        expected = RESULTS[hook]
        if isinstance(result, expected):
            return result
        chain = call_chain(self._manager, hook)
        hint = " (a wrapper with a bare yield drops the result: write return (yield))" if ">" in chain else ""
        raise ContractError(
            f"{hook}() returned {type(result).__name__}, expected {expected.__name__}; call chain: {chain}{hint}"
        )

    @property
    def _where(self) -> str:
        return f"{self.context.role} rank {self.context.rank}"

    def _wrong_state(self, verb: str) -> WrongState:
        return WrongState(f"{verb} on {self._where} is not allowed in state {self.state}: {ADVICE[self.state]}")

    def _hook_failed(self, hook: str, error: BaseException, *, at: Step | None = None, plugin: str = "") -> HookFailed:
        where = plugin or f"backend:{self.name}"
        why = self.backend.explained(hook, error) or one_line(error)
        failed = HookFailed(f"{where}, {self._where}: {hook} failed{_when(at)}: {why}")
        failed.hook, failed.rank = hook, self.context.rank
        failed.details = "".join(traceback.format_exception(error))
        return failed


def _when(step: Step | None) -> str:
    return f" at optimizer step {step.optimizer_step}" if step else ""
