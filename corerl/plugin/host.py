"""One worker's plugins: the backend wrapped by its extensions, with a typed method for each hook. A call that the
host's state does not allow is refused before the backend is entered."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from enum import StrEnum
from types import FrameType
from typing import Any, NoReturn

from attrs import asdict, frozen

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
from corerl.messages import one_line, place
from corerl.plugin.capabilities import Capability, Support, asked_by_role, refusal, support_in
from corerl.plugin.contract import WORKER_HOOKS, Extensions, Method, backend_methods, call_chain, require_instance
from corerl.plugin.hooks import VERBS, Context
from corerl.types import (
    ForwardResult,
    GradientResult,
    InitResult,
    LossSpec,
    MemoryKind,
    Metric,
    Output,
    PackedBatch,
    SaveResult,
    SleepResult,
    Step,
    StepResult,
    UpdateResult,
    WakeResult,
)


class State(StrEnum):
    NEW = "new"
    READY = "ready"
    FAILED = "failed"  # a modifying verb raised: weights and moments may be half-written, so only shutdown is allowed
    CLOSED = "closed"


ADVICE = {
    State.NEW: "call init first",
    State.READY: "it is already initialized",
    State.FAILED: "init or a training step failed earlier; only shutdown is allowed",
    State.CLOSED: "it was shut down; start a new worker",
}


def refused_if_frozen(verb: str, where: str) -> str:
    """The error of a verb that a frozen role has not; `where` is the role, or its rank."""
    return f"{verb} on {where} was refused: the role is frozen, and only passes samples; call forward"


class HostedBackend:
    """The base class that the host requires of a backend; `corerl.backend.Backend` extends it."""

    declared: Mapping[Capability, Support] = {}  # the spec's capabilities; set by the host
    label: str = ""  # the backend's name, for messages; set by the host
    adam_step: int = 0  # applied optimizer steps, for Adam's bias correction; counted by the host

    def require(self, capability: Capability, asked_by: str) -> None:
        """Raise Unsupported, with the declared reason, if the spec does not declare `capability` as full. Guards also
        against a driver that did not check, and hooks called without a driver."""
        support = support_in(self.declared, capability)
        if not support.full:
            raise Unsupported(
                refusal(capability, support, asked_by=asked_by, backend=self.label or type(self).__name__)
            )

    @contextmanager
    def using(self, snapshot: str) -> Iterator[None]:
        """Run the block with `snapshot` in place of the model's weights; "" changes nothing."""
        yield

    def explained(self, hook: str, error: BaseException) -> str:
        """A one-line explanation of an error that a hook raised; "" if there is nothing to add. Called only on the rank
        that raised it, so it must not start a collective."""
        return ""

    def __reduce__(self) -> NoReturn:
        # cloudpickle, which Ray uses, would silently copy process groups and streams.
        raise ContractError(f"a {type(self).__name__} cannot be pickled; build it inside the worker from its name")


@frozen
class WithoutOutputs(Method):
    """A hook of the backend on a rank that does not set `outputs`, inside of all extensions: another rank returns
    metrics, tokens and outputs of the same samples."""

    def __call__(self, arguments: Mapping[str, Any]) -> Any:
        match result := super().__call__(arguments):
            case GradientResult():
                return _nothing(arguments["outputs"])
            case ForwardResult():
                return ForwardResult.empty(arguments["outputs"])
            case _:
                return result


def _nothing(outputs: tuple[Output, ...]) -> GradientResult:
    return GradientResult(metrics={}, tokens=0, outputs=ForwardResult.empty(outputs) if outputs else None)


class PluginHost:
    """The backend and extensions of one worker process. Not thread-safe: one verb at a time.

    `extensions` are (name, instance) pairs in the config's order, outermost first; `capabilities` is what the backend's
    spec declares. Raises ContractError if a plugin does not keep the contract.

    Residency is tracked per memory kind. A sleep or wake_up that raises leaves its kinds asleep: their contents are
    unknown until a wake_up succeeds.
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
        if not isinstance(backend, HostedBackend):
            raise ContractError(
                f"{label} is a {type(backend).__name__}, which does not extend corerl.backend.Backend; subclass it"
            )
        self._own = backend_methods(label, backend)
        self._extensions = Extensions(extensions, hooks=WORKER_HOOKS)
        self.backend = backend
        self.backend.declared, self.backend.label = capabilities or {}, name
        self.name = name
        self.context = context
        self.state = State.NEW
        self.resident: frozenset[MemoryKind] = frozenset()
        self._next_version = 0  # the smallest version that update_weights accepts
        self._frozen = False
        self._has_gradients = False  # gradients are there, of a step that is not taken yet
        self._complete = False  # and no more are to come

    # ---- the hooks ---------------------------------------------------------------------------------------------------

    def init(self, config: RoleConfig, context: Context) -> InitResult:
        asked = asked_by_role(
            context.role,
            config.train,
            device=config.device,
            ranks=context.world_size,
            value_head=config.value_head,
            frozen=config.frozen,
            lora=config.lora,
            lora_table=f"[lora] of the {context.role}",
            pictures=config.model.pictures,
        )
        for capability, asked_by in asked.items():
            self.backend.require(capability, asked_by)
        with self.entering("init"):
            result: InitResult = self._checked("init", config=config, context=context)
        if not result.layout.outputs:
            for hook in ("forward_backward", "forward"):
                self._own[hook] = WithoutOutputs(**asdict(self._own[hook], recurse=False))
        self.state, self._frozen = State.READY, config.frozen
        self.resident = frozenset(MemoryKind)
        self._next_version = result.weights_version  # engines may not have these weights yet
        return result

    def forward_backward(
        self, batch: PackedBatch, loss: LossSpec, outputs: tuple[Output, ...], last: bool, *, at: Step | None = None
    ) -> GradientResult:
        """Raises WrongState after the step's last call. A batch without micro-batches, which is one on all ranks alike,
        adds nothing, and does not reach the backend. `at` is for messages."""
        with self.entering("forward_backward", at=at):
            self._has_gradients = self._has_gradients or batch.count > 0
            self._complete = last and self._has_gradients
            if not batch.count:
                return _nothing(outputs)
            return self._checked("forward_backward", batch=batch, loss=loss, outputs=outputs, last=last)

    def optimizer_step(self, step: Step, scale: float) -> StepResult:
        """Raises WrongState without a gradient since the last step."""
        if step.adam is not None:
            self.backend.require(Capability.ADAM, "optimizer_step with Step.adam")
        with self.entering("optimizer_step", at=step):
            result: StepResult = self._checked("optimizer_step", step=step, scale=scale)
            self.backend.adam_step += result.applied
            self._has_gradients = self._complete = False
            return result

    def forward(self, batch: PackedBatch, outputs: tuple[Output, ...], snapshot: str) -> ForwardResult:
        """Under `snapshot`; "" means the current weights."""
        with self.entering("forward"), self.backend.using(snapshot):
            return self._checked("forward", batch=batch, outputs=outputs)

    def update_weights(self, sender: Any, version: int, adapters: bool = False, snapshot: str = "") -> UpdateResult:
        """Send `snapshot`; "" means the current weights. Raises WeightUpdateError, before any byte moves,
        if `version` is not above all earlier ones. An attempted version counts as used: two streams must never share
        one."""
        with self.entering("update_weights"):
            if version < self._next_version:
                raise WeightUpdateError(
                    f"weights version {version} was refused on {self._where}, expected {self._next_version} or more; "
                    "versions must strictly increase"
                )
            self._next_version = version + 1
            with self.backend.using(snapshot):
                return self._checked("update_weights", sender=sender, version=version, adapters=adapters)

    def save(self, path: str, step: Step, background: bool) -> SaveResult:
        if background:
            self.backend.require(Capability.SAVE_BACKGROUND, "save(background=True)")
        with self.entering("save", at=step):
            return self._checked("save", path=path, step=step, background=background)

    def sleep(self, kinds: Set[MemoryKind]) -> SleepResult:
        """Put `kinds` to sleep, minus those asleep. The hook runs even if none is left, to measure the residual. Raises
        WrongState for gradients that wait for their step: asleep they would be lost."""
        with self.entering("sleep"):
            if self._has_gradients and MemoryKind.GRAD in kinds:
                raise WrongState(
                    f"sleep on {self._where} was refused: the gradients wait for optimizer_step, and would be lost; "
                    "let the other kinds sleep, or call optimizer_step first"
                )
            going = self.resident & kinds
            self.resident -= going
            return self._checked("sleep", kinds=going)

    def wake_up(self, kinds: Set[MemoryKind]) -> WakeResult:
        """Wake up `kinds`, minus those awake; the hook is called only if one is left."""
        with self.entering("wake_up"):
            coming = frozenset(kinds) - self.resident
            if not coming:
                return WakeResult(restored_bytes=0)
            result: WakeResult = self._checked("wake_up", kinds=coming)
            self.resident |= coming
            return result

    def shutdown(self, reason: str) -> None:
        """Shut down each plugin, extensions first, then raise their errors as one. If the host had already failed, the
        errors are only printed, so that they do not hide the first one. A second call does nothing."""
        if self.state is State.CLOSED:
            return
        failed, self.state = self.state is State.FAILED, State.CLOSED
        self.resident = frozenset()
        own = [self._own["shutdown"]] if "shutdown" in self._own else []
        errors = [
            error if isinstance(error, CorerlError) else self._hook_failed("shutdown", error, plugin=plugin)
            for plugin, error in self._extensions.call_each("shutdown", *own, reason=reason)
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

    def require_allowed(self, verb: str) -> None:
        """Raise WrongState, Unsupported or NotResident if the backend may not be called now."""
        if self.state is not (State.NEW if verb == "init" else State.READY):
            raise WrongState(f"{verb} on {self._where} is not allowed in state {self.state}: {ADVICE[self.state]}")
        rules = VERBS[verb]
        if self._frozen and rules.trained:
            raise WrongState(refused_if_frozen(verb, self._where))
        if rules.capability is not None:
            self.backend.require(rules.capability, verb)
        if asleep := rules.needs - self.resident:
            kinds = ", ".join(kind for kind in MemoryKind if kind in asleep)
            raise NotResident(
                f"{verb} on {self._where} needs memory that is asleep: {kinds}; call wake_up for it first"
            )
        if refusal := self._out_of_order(verb):
            raise WrongState(f"{verb} on {self._where} was refused: {refusal}")

    @contextmanager
    def entering(self, verb: str, *, at: Step | None = None) -> Iterator[None]:
        """Guard a call of the backend: `with host.entering("snapshot"): host.backend...`.

        Raises like `require_allowed` before the block is entered. A CorerlError from the block keeps its type, and its
        message gains rank and verb unless it is a UserError; any other error becomes HookFailed.
        """
        self.require_allowed(verb)
        try:
            yield
        except BaseException as error:
            if VERBS[verb].modifying:
                self.state = State.FAILED
            if isinstance(error, CorerlError) and not isinstance(error, UserError) and self._where not in error.message:
                error.args = (f"{self._where}: {verb}{_when(at)}: {error.message}",)
            # A backend that calls exit() must not silently take the worker down.
            if isinstance(error, CorerlError) or not isinstance(error, Exception | SystemExit):
                raise
            raise self._hook_failed(verb, error, at=at) from error

    def _out_of_order(self, verb: str) -> str:
        """Why the verb may not come between the calls of a step, or not without one; "" if it may."""
        if verb == "forward_backward" and self._complete:
            return "the step's last call was made; call optimizer_step first"
        if verb == "train" and self._has_gradients:
            return "gradients wait for optimizer_step; call it first, or forward_backward for these samples too"
        if verb == "optimizer_step" and not self._has_gradients:
            return "there are no gradients since the last step; call forward_backward first"
        if verb == "save" and self._has_gradients:
            return "gradients wait for optimizer_step, and are in no checkpoint; call it first"
        return ""

    def _checked(self, hook: str, **arguments: Any) -> Any:
        result = self._extensions.wrapped(self._own[hook], arguments)
        expected = VERBS[hook].result
        assert expected is not None
        flaw = _flaw(result)
        if isinstance(result, expected) and not flaw:
            return result
        chain = call_chain(self._extensions, self._own[hook])
        if flaw:
            raise ContractError(f"{hook}() returned {flaw}; call chain: {chain}")
        hint = " (a wrapper with a bare yield drops the result: write return (yield))" if ">" in chain else ""
        raise ContractError(
            f"{hook}() returned {type(result).__name__}, expected {expected.__name__}; call chain: {chain}{hint}"
        )

    def _backends_own(self, frame: FrameType) -> bool:
        """Whether the frame is of the package that the backend's class is in."""
        module, name = type(self.backend).__module__, str(frame.f_globals.get("__name__"))
        package = module.rpartition(".")[0] or module
        return name == package or name.startswith(f"{package}.")

    @property
    def _where(self) -> str:
        return f"{self.context.role} rank {self.context.rank}"

    def _hook_failed(self, hook: str, error: BaseException, *, at: Step | None = None, plugin: str = "") -> HookFailed:
        where = plugin or f"backend:{self.name}"
        why = self.backend.explained(hook, error) or one_line(error) + place(error, self._backends_own)
        failed = HookFailed(f"{where}, {self._where}: {hook} failed{_when(at)}: {why}")
        failed.hook, failed.rank = hook, self.context.rank
        failed.details = "".join(traceback.format_exception(error))
        return failed


def _when(step: Step | None) -> str:
    return f" at optimizer step {step.optimizer_step}" if step else ""


def _flaw(result: Any) -> str:
    """What is wrong inside a result of the right type; "" if nothing is."""
    metrics: Any = getattr(result, "metrics", {})
    if not isinstance(metrics, Mapping):
        return f"metrics of type {type(metrics).__name__}, expected a mapping from names to Metric"
    for name, metric in metrics.items():
        if not isinstance(metric, Metric):
            return f"metric {name!r} of type {type(metric).__name__}, expected Metric(total, weight)"
    return ""
