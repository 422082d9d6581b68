"""The host around small backends that count their calls: order, states, residency, versions, results and errors."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Generator, Iterator, Set
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from corerl.config.schema import ModelConfig, RoleConfig, TrainConfig, WeightsConfig
from corerl.errors import (
    ContractError,
    CorerlError,
    HookFailed,
    ModelError,
    NotResident,
    SaveFailed,
    Unsupported,
    WeightUpdateError,
    WrongState,
)
from corerl.plugin.capabilities import Capability, not_implemented
from corerl.plugin.hooks import Context
from corerl.plugin.host import HostedBackend, PluginHost, State
from corerl.types import (
    AdamSettings,
    ForwardResult,
    GradientResult,
    InitResult,
    LossSpec,
    MemoryKind,
    Metric,
    Output,
    PackedBatch,
    ParallelLayout,
    SaveResult,
    SleepResult,
    Step,
    StepResult,
    UpdateResult,
    WakeResult,
)

CONTEXT = Context(role="actor", rank=1, world_size=2, local_rank=1, run_dir="runs/x")
CONFIG = RoleConfig(
    model=ModelConfig(), train=TrainConfig(), options=None, weights=WeightsConfig(), device="cpu", seed=0, timeout=1.0
)
BATCH = PackedBatch(micro_batches=(), count=1)  # nobody here looks into it
NOTHING = PackedBatch(micro_batches=(), count=0)
LOSS = LossSpec(name="clipped")
STEP = Step(optimizer_step=12, rollout_step=3, lr=0.1)
ADDED = GradientResult(metrics={}, tokens=8)
STEPPED = StepResult(applied=True, grad_norm=1.5)
EVERY = frozenset(MemoryKind)


class Fake(HostedBackend):
    """Keeps a list of what it was asked; raises `errors[hook]` where there is one."""

    def __init__(self, version: int = 0, **errors: BaseException) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.errors: dict[str, BaseException] = errors
        self.version = version

    def note(self, hook: str, *arguments: Any) -> None:
        self.calls.append((hook, *arguments))
        if hook in self.errors:
            raise self.errors[hook]

    def init(self, config: RoleConfig, context: Context) -> InitResult:
        self.note("init", context.rank)
        layout = ParallelLayout(rank=1, world_size=2, dp_rank=1, dp_size=2)
        return InitResult(layout=layout, weights_version=self.version)

    def forward_backward(
        self, batch: PackedBatch, loss: LossSpec, outputs: tuple[Output, ...], last: bool
    ) -> GradientResult:
        self.note("forward_backward", batch.count, outputs, last)
        return ADDED

    def optimizer_step(self, step: Step, scale: float) -> StepResult:
        self.note("optimizer_step", step.optimizer_step, scale)
        return STEPPED

    def forward(self, batch: PackedBatch, outputs: tuple[Output, ...]) -> ForwardResult:
        self.note("forward", outputs)
        return ForwardResult(rows=np.zeros(0, np.int64), offsets=np.zeros(1, np.int64), outputs={})

    def update_weights(self, sender: Any, version: int) -> UpdateResult:
        self.note("update_weights", version)
        return UpdateResult(bytes=10, seconds=0.1)

    def save(self, path: str, step: Step, background: bool) -> SaveResult:
        self.note("save", path)
        return SaveResult(path=path, bytes=10, complete=True)

    def sleep(self, kinds: Set[MemoryKind]) -> SleepResult:
        self.note("sleep", kinds)
        return SleepResult(freed_bytes=100 * len(kinds), residual_bytes=7)

    def wake_up(self, kinds: Set[MemoryKind]) -> WakeResult:
        self.note("wake_up", kinds)
        return WakeResult(restored_bytes=100 * len(kinds))

    def shutdown(self, reason: str) -> None:
        self.note("shutdown", reason)


class Logs:
    """An extension that notes when it is entered and left."""

    def __init__(self, name: str, log: list[str], error: Exception | None = None) -> None:
        self.name, self.log, self.error = name, log, error

    def optimizer_step(self, step: Step) -> Iterator[None]:
        self.log.append(f"{self.name}>")
        result = yield
        self.log.append(f"<{self.name}")
        return result

    def shutdown(self, reason: str) -> None:
        self.log.append(f"{self.name} ends")
        if self.error:
            raise self.error


def ready(backend: Fake | None = None, *extensions: tuple[str, object]) -> tuple[PluginHost, Fake]:
    backend = backend or Fake()
    host = PluginHost(backend, name="mine", extensions=extensions, context=CONTEXT)
    host.init(CONFIG, CONTEXT)
    backend.calls.clear()
    return host, backend


def verbs(host: PluginHost) -> dict[str, Callable[[], object]]:
    return {
        "forward_backward": lambda: host.forward_backward(BATCH, LOSS, (), False),
        "optimizer_step": lambda: host.optimizer_step(STEP, 1.0),
        "forward": lambda: host.forward(BATCH, (), ""),
        "update_weights": lambda: host.update_weights(None, 1),
        "save": lambda: host.save("somewhere", STEP, False),
        "sleep": lambda: host.sleep(EVERY),
        "wake_up": lambda: host.wake_up(EVERY),
    }


def train(host: PluginHost, step: Step = STEP) -> StepResult:
    """Both halves of a step."""
    host.forward_backward(BATCH, LOSS, (), True, at=step)
    return host.optimizer_step(step, 1.0)


# ---- building --------------------------------------------------------------------------------------------------------


def test_every_hook_reaches_the_backend_and_returns_its_result() -> None:
    host, backend = ready(Fake(version=3))
    assert host.forward_backward(BATCH, LOSS, (Output.ENTROPY,), False) is ADDED
    assert host.forward_backward(BATCH, LOSS, (), True) is ADDED
    assert host.optimizer_step(STEP, 0.25) is STEPPED
    assert host.forward(BATCH, (Output.LOGPROBS,), "ref").outputs == {}
    assert host.update_weights(None, 3).bytes == 10
    assert host.save("somewhere", STEP, False).path == "somewhere"
    assert backend.calls == [
        ("forward_backward", 1, (Output.ENTROPY,), False),
        ("forward_backward", 1, (), True),
        ("optimizer_step", 12, 0.25),
        ("forward", (Output.LOGPROBS,)),
        ("update_weights", 3),
        ("save", "somewhere"),
    ]


def test_only_an_instance_of_the_base_class_is_accepted() -> None:
    with pytest.raises(ContractError) as caught:
        PluginHost(Logs("a", []), name="mine", context=CONTEXT)
    assert caught.value.message == ("backend:mine is a Logs, which does not extend corerl.backend.Backend; subclass it")
    with pytest.raises(
        ContractError, match="backend:mine is the class Fake, expected an instance; instantiate it first"
    ):
        PluginHost(Fake, name="mine", context=CONTEXT)


def test_neither_host_nor_backend_can_be_pickled() -> None:
    host, backend = ready()
    for held in (host, backend):
        with pytest.raises(ContractError, match="a Fake cannot be pickled; build it inside the worker"):
            pickle.dumps(held)


# ---- states ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError("boom"), ModelError("no such tensor"), KeyboardInterrupt()])
@pytest.mark.parametrize(("half", "called"), [("forward_backward", 1), ("optimizer_step", 2)])
def test_whatever_leaves_a_half_of_a_step_leaves_only_shutdown(half: str, called: int, error: BaseException) -> None:
    host, backend = ready(Fake(**{half: error}))
    with pytest.raises(HookFailed if isinstance(error, ValueError) else type(error)):
        train(host)
    assert host.state is State.FAILED
    for call in (lambda: host.save("somewhere", STEP, False), lambda: host.optimizer_step(STEP, 1.0)):
        with pytest.raises(WrongState, match="init or a training step failed earlier; only shutdown is allowed"):
            call()
    host.shutdown("failed")
    assert [call[0] for call in backend.calls] == [*["forward_backward", "optimizer_step"][:called], "shutdown"]


@pytest.mark.parametrize("hook", ["forward", "update_weights", "save", "sleep", "wake_up"])
def test_a_failure_elsewhere_leaves_the_host_ready(hook: str) -> None:
    host, backend = ready()
    backend.errors[hook] = ValueError("boom")
    if hook == "wake_up":
        host.sleep({MemoryKind.GRAD})
    with pytest.raises(HookFailed, match=f"{hook} failed"):
        verbs(host)[hook]()
    assert host.state is State.READY


# ---- the halves of a step --------------------------------------------------------------------------------------------


def added(*last: bool) -> tuple[PluginHost, Fake]:
    """After one call of `forward_backward` for each, and with no call noted."""
    host, backend = ready()
    for each in last:
        host.forward_backward(BATCH, LOSS, (), each)
    backend.calls.clear()
    return host, backend


NO_GRADIENTS = (
    "optimizer_step on actor rank 1 was refused: there are no gradients since the last step; call forward_backward "
    "first"
)


def test_pending_gradients_refuse_save_and_sleep() -> None:
    host, backend = added(False)
    with pytest.raises(WrongState) as caught:
        host.save("somewhere", STEP, False)
    assert caught.value.message == (
        "save on actor rank 1 was refused: gradients wait for optimizer_step, and are in no checkpoint; call it first"
    )
    for kinds in (EVERY, {MemoryKind.GRAD}):
        with pytest.raises(WrongState) as caught:
            host.sleep(kinds)
        assert caught.value.message == (
            "sleep on actor rank 1 was refused: the gradients wait for optimizer_step, and would be lost; let the "
            "other kinds sleep, or call optimizer_step first"
        )
    assert (backend.calls, host.resident, host.state) == ([], EVERY, State.READY)
    host.optimizer_step(STEP, 1.0)
    host.save("somewhere", STEP, False)
    host.sleep(EVERY)
    assert backend.calls == [("optimizer_step", 12, 1.0), ("save", "somewhere"), ("sleep", EVERY)]


def test_an_empty_batch_does_not_reach_the_backend() -> None:
    host, backend = ready()
    for outputs in ((), (Output.LOGPROBS, Output.ENTROPY)):
        found = host.forward_backward(NOTHING, LOSS, outputs, True)
        assert (found.metrics, found.tokens, found.outputs is None) == ({}, 0, not outputs)
        if found.outputs is not None:
            assert (len(found.outputs.rows), list(found.outputs.offsets)) == (0, [0])
            assert {output: len(values) for output, values in found.outputs.outputs.items()} == dict.fromkeys(
                outputs, 0
            )
    with pytest.raises(WrongState) as caught:
        host.optimizer_step(STEP, 1.0)  # nothing is to be stepped with
    assert (caught.value.message, backend.calls) == (NO_GRADIENTS, [])
    host.save("somewhere", STEP, False)
    host.forward_backward(BATCH, LOSS, (), False)
    host.forward_backward(NOTHING, LOSS, (), True)  # and yet it is the last
    with pytest.raises(WrongState):
        host.forward_backward(BATCH, LOSS, (), False)
    assert host.optimizer_step(STEP, 1.0) is STEPPED


@pytest.mark.parametrize("output_rank", [True, False])
def test_a_rank_without_outputs_keeps_only_extensions_metrics(output_rank: bool) -> None:
    own, measured = {"loss": Metric(3.0, 4.0)}, {"longest": Metric(7.0)}
    given = ForwardResult(
        rows=np.array([2]), offsets=np.array([0, 2]), outputs={Output.LOGPROBS: np.array([0.0, -1.0], np.float32)}
    )

    class Shares(Fake):
        def init(self, config: RoleConfig, context: Context) -> InitResult:
            return InitResult(layout=ParallelLayout(rank=1, world_size=2, dp_rank=0, dp_size=1, outputs=output_rank))

        def forward_backward(
            self, batch: PackedBatch, loss: LossSpec, outputs: tuple[Output, ...], last: bool
        ) -> GradientResult:
            return GradientResult(metrics=own, tokens=8, outputs=given)

        def forward(self, batch: PackedBatch, outputs: tuple[Output, ...]) -> ForwardResult:
            return given

    class Measures:
        def forward_backward(self) -> Generator[None, GradientResult, GradientResult]:
            result = yield
            return evolve(result, metrics={**result.metrics, **measured})

    host, _ = ready(Shares(), ("measures", Measures()))
    found = host.forward_backward(BATCH, LOSS, (Output.LOGPROBS,), False)
    assert found.metrics == ({**own, **measured} if output_rank else measured)
    assert found.tokens == (8 if output_rank else 0)
    for passed in (found.outputs, host.forward(BATCH, (Output.LOGPROBS,), "")):
        assert passed is not None
        assert passed.rows.tolist() == ([2] if output_rank else [])
        assert passed.outputs[Output.LOGPROBS].tolist() == ([0.0, -1.0] if output_rank else [])


# ---- residency -------------------------------------------------------------------------------------------------------


def test_sleep_and_wake_up_are_idempotent_for_each_kind() -> None:
    host, backend = ready()
    host.sleep({MemoryKind.OPTIMIZER})
    assert host.sleep({MemoryKind.OPTIMIZER, MemoryKind.GRAD}).freed_bytes == 100
    assert host.sleep({MemoryKind.GRAD}) == SleepResult(freed_bytes=0, residual_bytes=7)
    assert host.resident == {MemoryKind.PARAM, MemoryKind.MASTER}
    assert host.wake_up({MemoryKind.GRAD, MemoryKind.PARAM}).restored_bytes == 100
    assert host.wake_up({MemoryKind.GRAD}) == WakeResult(restored_bytes=0)
    assert backend.calls == [
        ("sleep", {MemoryKind.OPTIMIZER}),
        ("sleep", {MemoryKind.GRAD}),
        ("sleep", set()),
        ("wake_up", {MemoryKind.GRAD}),
    ]


@pytest.mark.parametrize(
    ("hook", "needs"),
    [
        ("forward_backward", EVERY),
        ("optimizer_step", EVERY),
        ("forward", {MemoryKind.PARAM}),
        ("update_weights", {MemoryKind.PARAM}),
        ("save", {MemoryKind.PARAM, MemoryKind.MASTER, MemoryKind.OPTIMIZER}),
    ],
)
def test_a_hook_is_refused_where_its_memory_sleeps(hook: str, needs: Set[MemoryKind]) -> None:
    for kind in MemoryKind:
        host, backend = ready()
        host.sleep({kind})
        backend.calls.clear()
        call = verbs(host)[hook]
        if kind in needs:
            with pytest.raises(NotResident) as caught:
                call()
            assert caught.value.message == (
                f"{hook} on actor rank 1 needs memory that is asleep: {kind}; call wake_up for it first"
            )
            assert backend.calls == []
            assert host.state is State.READY
        else:
            call()
            assert len(backend.calls) == 1


def test_kinds_whose_sleep_failed_must_be_woken_first() -> None:
    host, backend = ready(Fake(sleep=RuntimeError("out of host memory")))
    with pytest.raises(HookFailed):
        host.sleep({MemoryKind.PARAM})
    with pytest.raises(NotResident):
        train(host)
    host.wake_up({MemoryKind.PARAM})
    assert backend.calls[-1] == ("wake_up", {MemoryKind.PARAM})
    assert train(host) is STEPPED


# ---- weight versions -------------------------------------------------------------------------------------------------


def test_versions_strictly_increase_from_the_one_that_was_loaded() -> None:
    host, backend = ready(Fake(version=5))
    with pytest.raises(WeightUpdateError) as caught:
        host.update_weights(None, 4)
    assert caught.value.message == (
        "weights version 4 was refused on actor rank 1, expected 5 or more; versions must strictly increase"
    )
    host.update_weights(None, 5)
    host.update_weights(None, 8)
    for repeated in (8, 7):
        with pytest.raises(WeightUpdateError, match="expected 9 or more"):
            host.update_weights(None, repeated)
    assert backend.calls == [("update_weights", 5), ("update_weights", 8)]
    assert host.state is State.READY


# ---- results and errors ----------------------------------------------------------------------------------------------


def test_a_dropped_result_is_reported_with_the_call_chain() -> None:
    class Drops:
        def optimizer_step(self) -> Iterator[None]:
            yield

    host, _ = ready(None, ("log", Logs("a", [])), ("drop", Drops()))
    with pytest.raises(ContractError) as caught:
        train(host)
    assert caught.value.message == (
        "actor rank 1: optimizer_step at optimizer step 12: optimizer_step() returned NoneType, expected StepResult; "
        "call chain: extension:log > extension:drop > backend:mine "
        "(a wrapper with a bare yield drops the result: write return (yield))"
    )
    assert host.state is State.FAILED


@pytest.mark.parametrize(
    ("metrics", "told"),
    [
        ({"loss": Metric(1.0), "a": 1.0}, "metric 'a' of type float, expected Metric(total, weight)"),
        (None, "metrics of type NoneType, expected a mapping from names to Metric"),
    ],
)
@pytest.mark.parametrize("half", ["forward_backward", "optimizer_step"])
def test_plain_numbers_as_metrics_are_refused_by_name(half: str, metrics: Any, told: str) -> None:
    class Wrong(Fake):
        def forward_backward(
            self, batch: PackedBatch, loss: LossSpec, outputs: tuple[Output, ...], last: bool
        ) -> GradientResult:
            return evolve(ADDED, metrics=metrics) if half == "forward_backward" else ADDED

        def optimizer_step(self, step: Step, scale: float) -> StepResult:
            return evolve(STEPPED, metrics=metrics)

    host, _ = ready(Wrong())
    with pytest.raises(ContractError) as caught:
        train(host)
    assert caught.value.message == (
        f"actor rank 1: {half} at optimizer step 12: {half}() returned {told}; call chain: backend:mine"
    )


def test_other_verbs_are_guarded_as_hooks_are() -> None:
    host, _ = ready()
    host.sleep({MemoryKind.PARAM})
    entered = False
    with pytest.raises(NotResident, match="snapshot on actor rank 1 needs memory that is asleep: param"):
        with host.entering("snapshot"):
            entered = True
    assert not entered
    with pytest.raises(HookFailed, match="backend:mine, actor rank 1: drop_snapshot failed: KeyError: 'ref'"):
        with host.entering("drop_snapshot"):
            raise KeyError("ref")


# ---- the end ---------------------------------------------------------------------------------------------------------


def test_shutdown_ends_extensions_before_the_backend_each_once() -> None:
    log: list[str] = []
    host, backend = ready(None, ("a", Logs("a", log)), ("b", Logs("b", log)))
    backend.calls = log  # type: ignore[assignment]  # one list, to see the order
    host.shutdown("finished")
    host.shutdown("finished")
    assert log == ["a ends", "b ends", ("shutdown", "finished")]
    assert host.state is State.CLOSED
    with pytest.raises(WrongState, match="not allowed in state closed: it was shut down; start a new worker"):
        train(host)


def test_errors_of_shutdown_are_collected_into_one() -> None:
    extension = Logs("a", [], ValueError("full"))
    host, backend = ready(Fake(shutdown=SaveFailed("disk full")), ("a", extension))
    with pytest.raises(CorerlError) as caught:
        host.shutdown("finished")
    raises = Logs.shutdown.__code__.co_firstlineno + 3  # the extension is of the backend's package
    assert caught.value.message == (
        f"extension:a, actor rank 1: shutdown failed: ValueError: full (tests/plugin/test_host.py:{raises}); disk full"
    )
    assert backend.calls == [("shutdown", "finished")]
    host, _ = ready(Fake(shutdown=SaveFailed("disk full")))
    with pytest.raises(SaveFailed, match="^disk full$"):
        host.shutdown("finished")


def test_errors_of_shutdown_do_not_hide_an_earlier_failure(capsys: pytest.CaptureFixture[str]) -> None:
    host, _ = ready(Fake(optimizer_step=ValueError("boom"), shutdown=SaveFailed("disk full")))
    with pytest.raises(HookFailed):
        train(host)
    host.shutdown("failed")
    assert capsys.readouterr().err == "disk full\n"


# ---- capabilities ----------------------------------------------------------------------------------------------------


def lacking(*capabilities: Capability) -> tuple[PluginHost, Fake]:
    fake = Fake()
    declared = {capability: not_implemented(f"no {capability.value} yet") for capability in capabilities}
    return PluginHost(fake, name="fake", context=CONTEXT, capabilities=declared), fake


@pytest.mark.parametrize(
    ("capability", "changes", "asked_by"),
    [
        (Capability.MULTI_RANK, {}, "roles.actor.ranks = 2"),
        (Capability.CPU, {}, "cluster.device = 'cpu'"),
        (Capability.CRITIC, {"value_head": True}, "roles.critic"),
        (Capability.FROZEN, {"frozen": True}, "roles.actor"),
        (Capability.BFLOAT16, {"train": TrainConfig(precision="bfloat16")}, "train.precision = 'bfloat16'"),
        (Capability.FLOAT16, {"train": TrainConfig(precision="float16")}, "train.precision = 'float16'"),
        (Capability.RECOMPUTE, {"train": TrainConfig(recompute="full")}, "train.recompute = 'full'"),
    ],
)
def test_init_refuses_capabilities_that_the_spec_lacks(
    capability: Capability, changes: dict[str, Any], asked_by: str
) -> None:
    host, fake = lacking(capability)
    with pytest.raises(Unsupported) as caught:
        host.init(config=evolve(CONFIG, **changes), context=CONTEXT)
    assert caught.value.message == (
        f"{asked_by} requires {capability.value!r}, which the backend 'fake' does not support yet: "
        f"no {capability.value} yet; change that setting, or choose another backend"
    )
    assert (fake.calls, host.state) == ([], State.NEW)


def test_settings_of_a_step_are_refused_unless_declared() -> None:
    host, fake = lacking()  # declares nothing, so all but what backends of before would ignore
    host.init(config=CONFIG, context=CONTEXT)
    host.forward_backward(BATCH, LOSS, (), True)
    with pytest.raises(Unsupported) as caught:
        host.optimizer_step(evolve(STEP, adam=AdamSettings(eps=1e-6)), 1.0)
    assert caught.value.message == (
        "optimizer_step with Step.adam requires 'adam', which the backend 'fake' does not support yet: its spec does "
        "not declare it; change that setting, or choose another backend"
    )
    assert host.optimizer_step(STEP, 1.0) is STEPPED
    assert [hook for hook, *_ in fake.calls] == ["init", "forward_backward", "optimizer_step"]


def test_a_frozen_role_only_computes_forward() -> None:
    host, fake = lacking()
    host.init(config=evolve(CONFIG, frozen=True), context=CONTEXT)
    for verb in ("forward_backward", "optimizer_step", "save", "update_weights"):
        with pytest.raises(
            WrongState, match=f"^{verb} on actor rank 1 was refused: the role is frozen, and only passes"
        ):
            verbs(host)[verb]()
    host.forward(batch=BATCH, outputs=(), snapshot="")
    assert ([hook for hook, *_ in fake.calls], host.state) == (["init", "forward"], State.READY)


def test_verbs_without_their_capability_are_refused() -> None:
    host, fake = lacking(Capability.SLEEP, Capability.SNAPSHOTS, Capability.SAVE_BACKGROUND)
    host.init(config=CONFIG, context=CONTEXT)

    def snapshot() -> None:
        with host.entering("snapshot"):
            raise AssertionError("it was entered")

    in_the_background = lambda: host.save(path="p", step=STEP, background=True)  # noqa: E731
    for call in (verbs(host)["sleep"], verbs(host)["wake_up"], in_the_background, snapshot):
        with pytest.raises(Unsupported, match="which the backend 'fake' does not support yet: no "):
            call()
    host.save(path="p", step=STEP, background=False)
    assert train(host) is STEPPED
    assert [hook for hook, *_ in fake.calls] == ["init", "save", "forward_backward", "optimizer_step"]
