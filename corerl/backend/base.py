"""The base class of every backend: all hooks of the contract, built on a few primitives that only the backend has.

A subclass writes `build`, `forward_backward`, `optimizer_step`, `forward`, `local_state`, `tensors` and `after_load`
(see primitives.py; fields that the host sets are in plugin/host.py). From these come sharded loading, resume and save
(state.py), the weight stream (stream.py), snapshots, sleep and wake_up (memory.py); each may be overridden.
"""

from __future__ import annotations

import contextlib

from attrs import evolve

from corerl.backend.memory import DeviceMemory
from corerl.backend.state import TrainingState
from corerl.backend.stream import WeightStream
from corerl.config.schema import RoleConfig
from corerl.errors import ContractError
from corerl.kinds import experts_of
from corerl.models.build import stored_buffers
from corerl.models.config import hf_config
from corerl.models.files import meta_model
from corerl.plugin.capabilities import Capability
from corerl.plugin.hooks import Context
from corerl.types import InitResult, ParallelLayout


class Backend(TrainingState, WeightStream, DeviceMemory):
    """One rank of a training backend. Every method is called on every rank, in the same order."""

    def init(self, config: RoleConfig, context: Context) -> InitResult:
        # The driver settles what [train] leaves open; so does whoever makes a role's config without it.
        self.config, self.context = evolve(config, train=config.train.settled(config.device)), context
        self._open_memory()
        self._open_state()
        self._require_model_supported()
        self.phase = "model build"
        self.layout = self.build(self.config, context)
        if not isinstance(self.layout, ParallelLayout):
            raise ContractError(
                f"backend:{self.label or type(self).__name__} returned {type(self.layout).__name__} from build(), "
                "expected ParallelLayout; return this rank's layout"
            )
        if config.sleeps:  # in the background; the first sleep waits for whatever is not ready by then
            self._sleeper.reserve(self.sleeping_bytes(config.sleeps), self.group)
        self.phase = "load"
        optimizer_step = self._resume() if self.config.resume else self._load_initial()
        self._plan_stream()
        if self.config.resume:
            self._require_no_other_tensors({name for name, _ in self._gather_plan.shapes})
        self.phase = ""
        return InitResult(layout=self.layout, optimizer_step=optimizer_step, weights_version=self.weights_version)

    def shutdown(self, reason: str) -> None:
        with contextlib.ExitStack() as closing:  # each that `init` has come to, whatever the others raise
            for name in ("_sleeper", "_memory_writer", "_writer"):
                if (held := getattr(self, name, None)) is not None:
                    closing.callback(held.close)

    def _require_model_supported(self) -> None:
        hf = hf_config(self.config.model)
        if (count := experts_of(hf.to_dict())) > 1:
            self.require(Capability.MOE, f"a model with {count} experts")
        if Capability.BUFFERS in self.declared:  # else the model need not be looked at
            for name in stored_buffers(meta_model(hf)):
                self.require(Capability.BUFFERS, f"a model with weights in buffers ({name})")
