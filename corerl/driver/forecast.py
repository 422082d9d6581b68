"""Predict what a run's devices will hold, stage by stage, before anything starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from attrs import evolve, field, frozen
from transformers import PreTrainedConfig, PreTrainedModel

from corerl.config.schema import ClusterInfo, Config
from corerl.driver.processes import ProcessPlan
from corerl.driver.residency import FORWARD, GIB, UPDATE, training
from corerl.driver.run import passes_of
from corerl.messages import one_line
from corerl.models.activations import size_of
from corerl.plugin.options import role_options
from corerl.trainer.assign import ACTOR, loss_of, offloaded
from corerl.trainer.footprint import RoleMemory, role_memory
from corerl.types import MemoryKind
from corerl.weights.manifest import proportionate_bucket

PROCESS = 6 * GIB // 10  # what a process takes of a device besides: the context, loaded kernels, communicators
# Predictions are within a tenth of what is measured (benchmarks/results): what exceeds a device by more cannot fit.
MARGIN = 0.1
NAMES = {
    MemoryKind.PARAM: "weights",
    MemoryKind.MASTER: "masters",
    MemoryKind.GRAD: "gradients",
    MemoryKind.OPTIMIZER: "moments",
}
PARAM = MemoryKind.PARAM


@frozen(kw_only=True)
class StageMemory:
    """What a device holds in one stage of a step."""

    stage: str
    parts: Mapping[str, int]  # what -> bytes

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def __str__(self) -> str:
        parts = ", ".join(f"{what} {count / GIB:.1f}" for what, count in self.parts.items() if count >= GIB / 20)
        return f"{self.stage} {self.total / GIB:.1f} GiB ({parts})"


@frozen(kw_only=True)
class Forecast:
    """The memory of a run's fullest device."""

    stages: Mapping[str, StageMemory] = field(factory=dict)
    unknown: tuple[str, ...] = ()  # why a role is not part of it

    def tight(self, role: str, *, there: int) -> bool:
        """Whether `role` may not be trainable on devices of `there` bytes (0: of unknown size)."""
        stage = self.stages.get(training(role))
        return bool(there) and stage is not None and stage.total > there * (1 - MARGIN)

    @property
    def lines(self) -> list[str]:
        """A line for each stage, the fullest first."""
        stages = sorted(self.stages.values(), key=lambda each: each.total, reverse=True)
        return [f"predicted memory of a device: {stage}" for stage in stages]


@frozen(kw_only=True)
class Forecaster:
    """Predicts the memory of a run with `plan`, for samples of at most `longest` tokens (0: of any length)."""

    config: Config  # with its plugins' tables resolved
    plan: ProcessPlan
    models: Mapping[str, PreTrainedConfig]
    built: Mapping[str, PreTrainedModel]
    longest: int

    def forecast(self) -> Forecast:
        found = {role: self.role(role) for role in self.plan.roles}
        known = {role: memory for role, memory in found.items() if isinstance(memory, RoleMemory)}
        stages = [self._training(role, known) for role in known]
        passing = dict.fromkeys(each.role for each in passes_of(self.config))
        stages += [self._passing(role, known) for role in passing if role in known]
        if ACTOR in known and self.config.run.samples and ACTOR in self._sharing:
            stages.append(self._updating(known[ACTOR]))
        return Forecast(
            stages={stage.stage: stage for stage in stages},
            unknown=tuple(
                f"the memory of the {role} is not predicted: {memory}"
                for role, memory in found.items()
                if isinstance(memory, str)
            ),
        )

    def role(self, role: str, **changed: Any) -> RoleMemory | str:
        """The memory of a role's ranks, with these settings of its [train] `changed`; or why it cannot be told."""
        plan = self.plan.roles[role]
        train = evolve(self.plan.train_of(role), **changed)
        hf, backend = self.models[role], plan.backend
        longest = self.longest or train.tokens_per_micro_batch
        samples = self.config.rollout.prompts * self.config.rollout.samples // train.mini_batches
        try:
            found = role_memory(
                backend.spec,
                role_options(self.config, role, backend),
                ClusterInfo(device="cuda", ranks=len(plan.assignments), model=hf.to_dict(), train=train),
                hf,
                self.built[role],
                outputs=loss_of(role, self.config).outputs,
                longest=longest,
                single=samples // plan.data_parallel * longest <= train.tokens_per_micro_batch,
            )
        except Exception as error:  # a model's code may ask for values, of which there are none
            return f"its model cannot be run without a device ({one_line(error)})"
        return f"the backend {backend.name!r} does not tell" if found is None else found

    def too_large(self, found: Forecast, *, there: int) -> Iterator[str]:
        """Problems, one line each, of roles that cannot be trained on devices of `there` bytes, with what would
        help."""
        for role in self.plan.roles:
            stage = found.stages.get(training(role))
            if stage is None or stage.total <= there * (1 + MARGIN):
                continue
            ways = [f"{setting} ({total / GIB:.1f} GiB)" for setting, total in self._ways(role, stage)]
            yield (
                f"roles.{role}.ranks: a device has {there / GIB:.1f} GiB, but needs more: {stage}; set "
                f"{', or '.join([*ways, 'more ranks'])}, or options of the backend that split or offload the model"
            )

    def _ways(self, role: str, stage: StageMemory) -> Iterator[tuple[str, int]]:
        """Settings with which less memory is needed in `stage`, and how much then."""
        table, train = self.config.train_table_of(role), self.config.train_of(role)
        settings: dict[str, dict[str, Any]] = {}
        if train.recompute != "full":
            settings[f"{table}.recompute='full'"] = {"recompute": "full"}
        if (half := train.tokens_per_micro_batch // 2) >= max(self.longest, 1):
            settings[f"{table}.tokens_per_micro_batch={half}"] = {"tokens_per_micro_batch": half}
        now = self.role(role)
        for setting, changed in settings.items():
            then = self.role(role, **changed)
            if isinstance(now, RoleMemory) and isinstance(then, RoleMemory) and then.training < now.training:
                yield setting, stage.total - now.training + then.training

    @property
    def _sharing(self) -> tuple[str, ...]:
        return offloaded(self.config, "cuda")

    def _training(self, role: str, known: Mapping[str, RoleMemory]) -> StageMemory:
        memory = known[role]
        kinds = memory.rank.kinds
        parts = {f"{role}'s {NAMES[kind]}": kinds[kind] for kind in MemoryKind if kinds.get(kind)}
        parts["activations"] = memory.training - sum(kinds.values())
        return StageMemory(stage=training(role), parts={**parts, **self._beside(role, known)})

    def _passing(self, role: str, known: Mapping[str, RoleMemory]) -> StageMemory:
        memory = known[role]
        kinds = [PARAM] if role in self._sharing else [kind for kind in MemoryKind if kind is not MemoryKind.GRAD]
        parts = {f"{role}'s {NAMES[kind]}": memory.rank.kinds.get(kind, 0) for kind in kinds}
        parts["activations"] = memory.passing - memory.rank.kinds[PARAM]
        return StageMemory(stage=f"{FORWARD} {role}", parts={**parts, **self._beside(role, known)})

    def _updating(self, memory: RoleMemory) -> StageMemory:
        config, engine = self.config, self.plan.engine
        dtype = config.train_of(ACTOR).precision if config.weights.dtype == "model" else config.weights.dtype
        sent = size_of(self.built[ACTOR]).total * (4 if dtype == "float32" else 2)
        bundles = engine.spec.bundles(config.engines[engine.name], self.plan.engines)
        return StageMemory(
            stage=UPDATE,
            parts={
                f"{ACTOR}'s {NAMES[PARAM]}": memory.rank.kinds[PARAM],
                "buckets": 2 * (config.weights.bucket_bytes or proportionate_bucket(sent)),
                "the engine's weights": sent // bundles,
                **self._beside(ACTOR, {}),
            },
        )

    def _beside(self, role: str, known: Mapping[str, RoleMemory]) -> dict[str, int]:
        """What others hold on the device meanwhile: nothing but their processes, if they take turns."""
        together = [each for each in self.plan.roles if each == role or {each, role}.isdisjoint(self.config.apart)]
        parts = {
            f"the {each}": sum(known[each].rank.kinds.values())
            for each in together
            if each != role and each in known and role not in self._sharing
        }
        engine = self.config.run.samples and self.config.cluster.placement == "colocated"
        return {**parts, "processes": PROCESS * (len(together) + engine)}
