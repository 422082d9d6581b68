"""Predict what a run's devices will hold, stage by stage, before anything starts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from attrs import evolve, field, frozen

from corerl.algorithms import ACTOR
from corerl.errors import ModelError
from corerl.models import meta_model, shapes_of_tower, size_of
from corerl.plan import ENGINES, FORWARD, UPDATE, PlanReady, role_options, train_stage
from corerl.plugin import Capability
from corerl.types import MemoryKind
from corerl.weights import proportionate_bucket
from corerl_forecast.footprint import RoleMemory, role_memory

GIB = 2**30
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
        stage = self.stages.get(train_stage(role))
        return bool(there) and stage is not None and stage.total > there * (1 - MARGIN)

    def lines(self, *, fullest: bool = False) -> list[str]:
        """A line for each stage, the fullest first, or for that alone; then why a role is not part of it."""
        stages = sorted(self.stages.values(), key=lambda each: each.total, reverse=True)
        return [
            *(f"predicted memory of a device: {stage}" for stage in stages[: 1 if fullest else None]),
            *self.unknown,
        ]


@frozen
class Forecaster:
    """Predicts the memory of a planned run, for samples of at most `rollout.context_length` tokens (0: that fit a
    micro-batch): models' positions are often many times as many as samples ever have tokens."""

    plan: PlanReady

    def forecast(self) -> Forecast:
        found = {role: self.role(role) for role in self.plan.processes.roles}
        known = {role: memory for role, memory in found.items() if isinstance(memory, RoleMemory)}
        stages = [self._training(role, known) for role in known if role in self.plan.algorithm.objectives]
        passing = dict.fromkeys(each.role for each in self.plan.algorithm.passes)
        stages += [self._passing(role, known) for role in passing if role in known]
        if ACTOR in known and self.plan.config.run.has_engines and ACTOR in self.plan.processes.colocated_roles:
            stages.append(self._updating(known))
        return Forecast(
            stages={stage.stage: stage for stage in stages},
            unknown=tuple(
                f"the memory of the {role} is not predicted: {memory}"
                for role, memory in found.items()
                if isinstance(memory, str)
            ),
        )

    def role(self, role: str, **changed: Any) -> RoleMemory | str:
        """The memory of a role's ranks, with these settings of its [train] `changed`; or why it is unknown."""
        plan, config, algorithm = self.plan.processes.roles[role], self.plan.config, self.plan.algorithm
        objective = algorithm.objectives.get(role)
        passed = [output for each in algorithm.passes if each.role == role for output in each.columns.values()]
        train = evolve(plan.train, **changed)
        hf, model, backend = self.plan.models[role].hf, self.plan.models[role].built, plan.backend
        if plan.cluster.lora is not None:
            model = meta_model(hf, value_head=plan.assignments[0].config.value_head, lora=plan.cluster.lora)
        longest = config.rollout.context_length or train.tokens_per_micro_batch
        samples = config.rollout.prompts * config.rollout.samples // train.mini_batches
        # Saved batches, episodes and functions may bring other numbers of samples.
        episodes = self.plan.plugins.sampler.spec.episodes
        counted = config.run.mode == "train" and not episodes and not config.rollout.postprocess
        try:
            found = role_memory(
                backend.spec,
                role_options(config, role, backend),
                evolve(plan.cluster, train=train),
                hf,
                model,
                outputs=passed if objective is None else objective.loss.outputs,
                longest=longest,
                single=counted and samples // plan.data_parallel * longest <= train.tokens_per_micro_batch,
                tower=self._tower(role),
            )
        except ModelError as error:
            return error.message
        return f"the backend {backend.name!r} does not tell" if found is None else found

    def too_large(self, found: Forecast, *, there: int) -> Iterator[str]:
        """Problems, one line each, of roles that cannot be trained, or if frozen passed, on devices of `there` bytes,
        with what would help."""
        for role in self.plan.processes.roles:
            trained = role in self.plan.algorithm.objectives
            stage = found.stages.get(train_stage(role) if trained else _passing(role))
            if stage is None or stage.total <= there * (1 + MARGIN):
                continue
            ways = {setting: total for setting, total in self._ways(role, stage) if total <= there}
            cures = [f"{setting} ({total / GIB:.1f} GiB)" for setting, total in ways.items()]
            if self.plan.plugins.supports(role, Capability.MULTI_RANK):
                cures.append("more ranks")
            cures.append("options of the backend that split or offload the model")
            what = "training" if trained else "a forward pass"
            yield (
                f"roles.{role}.ranks: {what} needs {stage.total / GIB:.1f} GiB of a device, which has "
                f"{there / GIB:.1f}: {stage}; set {', or '.join(cures)}"
            )

    def _ways(self, role: str, stage: StageMemory) -> Iterator[tuple[str, int]]:
        """Settings with which less memory may be needed in `stage`, and how much then."""
        table, train = self.plan.asked.train_table_of(role), self.plan.config.train_of(role)
        fewer = {"tokens_per_micro_batch": train.tokens_per_micro_batch // 2}
        longest = max(self.plan.config.rollout.context_length, 1)
        ways: list[dict[str, Any]] = [fewer] if fewer["tokens_per_micro_batch"] >= longest else []
        trained = role in self.plan.algorithm.objectives
        if trained and train.recompute != "full" and self.plan.plugins.supports(role, Capability.RECOMPUTE):
            ways = [{"recompute": "full"}, *ways, *({"recompute": "full", **way} for way in ways)]
        now = self.role(role)
        for changed in ways:
            then = self.role(role, **changed)
            if isinstance(now, RoleMemory) and isinstance(then, RoleMemory):
                settings = " and ".join(f"{table}.{name}={value!r}" for name, value in changed.items())
                before, after = (each.training if trained else each.passing for each in (now, then))
                yield settings, stage.total - before + after

    def _training(self, role: str, known: Mapping[str, RoleMemory]) -> StageMemory:
        memory = known[role]
        kinds = memory.rank.kinds
        parts = {f"{role}'s {NAMES[kind]}": count for kind, count in kinds.items() if count}
        parts[self._activations(role)] = memory.training - sum(kinds.values())
        return StageMemory(stage=train_stage(role), parts={**parts, **self._beside(role, known)})

    def _passing(self, role: str, known: Mapping[str, RoleMemory]) -> StageMemory:
        memory, colocated = known[role], self.plan.processes.colocated_roles
        held = {PARAM: memory.rank.kinds[PARAM]} if role in colocated else _between_steps(memory)
        parts = {f"{role}'s {NAMES[kind]}": count for kind, count in held.items() if count}
        parts[self._activations(role)] = memory.passing - memory.rank.kinds[PARAM]
        if role in colocated:  # what takes turns passes at the same time
            others = {each.role for each in self.plan.algorithm.passes if each.role != role}
            for each in sorted(others & known.keys() & {*colocated}):
                parts[f"the {each} as it passes"] = known[each].passing
        return StageMemory(stage=_passing(role), parts={**parts, **self._beside(role, known)})

    def _activations(self, role: str) -> str:
        tokens = self.plan.processes.roles[role].train.tokens_per_micro_batch
        return f"activations of {max(tokens, self.plan.config.rollout.context_length):,} tokens"

    def _updating(self, known: Mapping[str, RoleMemory]) -> StageMemory:
        memory, processes = known[ACTOR], self.plan.processes
        bucket = self.plan.config.weights.bucket_bytes or proportionate_bucket(self._sent)
        actor, merged = self.plan.models[ACTOR], 0
        if actor.lora is not None and not processes.separate_adapters:
            merged = 4 * size_of(meta_model(actor.hf, lora=actor.lora)).adapters  # in float32, of all ranks
        ranks = len(processes.placement.places[ACTOR])
        # A rank receives what all have, padded, and sends its own part from memory of its own.
        received = round((bucket + merged) * (1 + 1 / ranks)) if ranks > 1 else 0
        parts = {
            f"{ACTOR}'s {NAMES[PARAM]}": memory.rank.kinds[PARAM],
            "buckets": 2 * bucket,
            "adapters to merge": merged,
            "memory to gather in": received,
            "the engine's weights": self._engine,
        }
        found = {name: count for name, count in parts.items() if count}
        return StageMemory(stage=UPDATE, parts={**found, **self._beside(ACTOR, known)})

    def _beside(self, role: str, known: Mapping[str, RoleMemory]) -> dict[str, int]:
        """What others hold on the device meanwhile: nothing but their processes, if they take turns.
        An engine's caches are not known here."""
        config, own = self.plan.config, self.plan.config.own_devices
        together = [each for each in self.plan.processes.roles if each == role or {each, role}.isdisjoint(own)]
        engine = config.run.has_engines and config.cluster.placement == "colocated"
        others = [each for each in together if each != role and each in known]
        parts: dict[str, int] = {}
        if role not in self.plan.processes.colocated_roles:
            parts = {f"the {each}": sum(_between_steps(known[each]).values()) for each in others}
            if engine and role not in own:
                parts["the engine's weights"] = self._engine
        return {**parts, "processes": PROCESS * (len(together) + engine)}

    @property
    def _sent(self) -> int:
        """Bytes of the weights that engines get."""
        config = self.plan.config
        dtype = config.train_of(ACTOR).precision if config.weights.dtype == "model" else config.weights.dtype
        of_tower = shapes_of_tower(self.plan.models[ACTOR].hf) if self._tower(ACTOR) else {}
        count = size_of(self.plan.models[ACTOR].built).total + sum(map(math.prod, of_tower.values()))
        return count * (4 if dtype == "float32" else 2)

    def _tower(self, role: str) -> Literal["", "frozen", "trained"]:
        """What becomes of the part of a role's model that reads pictures; "" if rows have none."""
        settings = self.plan.config.model_of(role)
        if not settings.pictures:
            return ""
        return "trained" if settings.tower == "trained" and role in self.plan.algorithm.objectives else "frozen"

    @property
    def _engine(self) -> int:
        """Bytes of them on a device."""
        return self._sent // self.plan.processes.placement.widths.get(ENGINES, 1)


def _passing(role: str) -> str:
    """The name of the stage in which `role` passes samples without training."""
    return f"{FORWARD} {role}"


def _between_steps(memory: RoleMemory) -> dict[MemoryKind, int]:
    """What a rank holds that does not sleep."""
    kinds = memory.rank.kinds
    return {kind: kinds[kind] for kind in kinds if not (kind is MemoryKind.GRAD and memory.rank.gradients_grow)}
