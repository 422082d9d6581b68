"""FSDP, but for one rank that raises, dies or waits in one hook; a file `fault` in the run directory says when."""

from __future__ import annotations

import resource
import signal
import time
from pathlib import Path

from corerl.checkpoint.writer import BackgroundWriter, in_memory
from corerl.config.schema import RoleConfig
from corerl.plugin.hooks import Context
from corerl.types import ParallelLayout, SaveResult, Step, StepResult, UpdateResult
from corerl.weights.transport import WeightSender
from corerl_fsdp.backend import FsdpBackend
from tests.machine import die_of

LARGE = 64 * 1024  # bytes: more than Ray's log of a process, less than a rank's part of a checkpoint


class FaultyBackend(FsdpBackend):
    def build(self, config: RoleConfig, context: Context) -> ParallelLayout:
        if config.options.hook == "init" and config.options.rank == context.rank:
            self.fail()
        return super().build(config, context)

    def optimizer_step(self, step: Step, scale: float) -> StepResult:
        if self.fails_in("optimizer_step", step):
            self.fail()
        return super().optimizer_step(step, scale)

    def update_weights(self, sender: WeightSender, version: int, adapters: bool) -> UpdateResult:
        if self.fails_in("update_weights", Step(optimizer_step=0, rollout_step=version, lr=0.0)):
            self.fail()
        return super().update_weights(sender, version, adapters)

    def save(self, path: str, step: Step, background: bool) -> SaveResult:
        if self.fails_in("save", step) and (self.config.options.how == "full" or not background):
            self.fail()
        elif self.fails_in("save", step):  # in the background, while training goes on
            writer = "_memory_writer" if in_memory(path) else "_writer"
            setattr(self, writer, BackgroundWriter(run=lambda job: (self.fail(), job())))
        return super().save(path, step, background)

    def fails_in(self, hook: str, step: Step) -> bool:
        options = self.config.options
        if options.once and (Path(self.context.run_dir) / "fault").exists():
            return False
        return (options.hook, options.rank, options.step) == (hook, self.context.rank, step.rollout_step)

    def fail(self) -> None:
        (Path(self.context.run_dir) / "fault").touch()
        match self.config.options.how:
            case "raise":
                raise ValueError("a fault\nthat was asked for")
            case "kill":
                die_of(signal.SIGKILL)
            case "freeze":
                die_of(signal.SIGSTOP)
            case "wait":
                while not (Path(self.context.run_dir) / "go").exists():
                    time.sleep(0.01)
            case "full":  # as on a full disk, write() fails; Python ignores the signal that would end the process
                resource.setrlimit(resource.RLIMIT_FSIZE, (LARGE, resource.RLIM_INFINITY))
