"""An algorithm on made-up samples, from rewards to gradients, as a run takes it there, without models and processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, cached_property

import numpy as np
import torch
from attrs import evolve, frozen
from torch import Tensor

from corerl.algorithms import ACTOR, Advantages, AlgorithmSpec, LossInputs, LossResult
from corerl.algorithms.advantages import without_truncated
from corerl.backend import MetricSum, resolve_loss, to_device
from corerl.config import Config, config_of
from corerl.data import plan_steps
from corerl.data.packing import pack
from corerl.driver.advantages import compute_advantages
from corerl.plan.algorithm import AlgorithmPlan, plan_algorithm
from corerl.plan.resolve import plugins_of, resolve_tables, settle_algorithm
from corerl.plugin import Kind, load
from corerl.plugin.registry import Loaded
from corerl.types import (
    Array,
    FloatArray,
    IntArray,
    Metric,
    MicroBatch,
    Output,
    ParallelLayout,
    SampleBatch,
    merge_metrics,
    offsets_of,
)

CPU = torch.device("cpu")
GROUPS = (4, 1, 3, 2, 5)  # samples of each prompt, as many as a postprocess leaves
MAX_TOKENS = 8  # of a response
OWN = "trial/"  # columns that go through packing, but not to the loss


@frozen(kw_only=True)
class Packing:
    """How the samples of an optimizer step are divided."""

    tokens: int  # of a micro-batch
    dp_size: int = 1
    sequence_multiple: int = 1
    micro_batch_multiple: int = 1
    rectangular: bool = False

    @property
    def layout(self) -> ParallelLayout:
        return ParallelLayout(
            rank=0,
            world_size=self.dp_size,
            dp_rank=0,
            dp_size=self.dp_size,
            sequence_multiple=self.sequence_multiple,
            micro_batch_multiple=self.micro_batch_multiple,
            rectangular=self.rectangular,
        )


WHOLE = Packing(tokens=10**6)  # one micro-batch
PACKINGS = {
    "one sample in each micro-batch": Packing(tokens=1),
    "several micro-batches": Packing(tokens=24),
    "padded sequences": Packing(tokens=24, sequence_multiple=4),
    "3 dp ranks with fillers": Packing(tokens=24, dp_size=3, sequence_multiple=2, micro_batch_multiple=4),
    "micro-batches of similar lengths": Packing(tokens=24, dp_size=2, rectangular=True),
}


@frozen(kw_only=True, eq=False)
class Part:
    """What a role's loss gives for one micro-batch of T tokens."""

    result: LossResult
    gradients: Mapping[Output, Array]  # each [T]
    differentiable: bool  # whether `backward` could be called


@frozen(kw_only=True, eq=False)
class Found:
    """What a role's loss gives for an optimizer step of N tokens."""

    loss: float
    gradients: Mapping[Output, Array]  # each [N]
    metrics: Mapping[str, Metric]
    differentiable: bool  # each micro-batch, fillers too


class Trial:
    """An algorithm as checks get it: `overrides` are those of `corerl train`, such as algorithms.ppo.dual_clip=3.

    Raises PluginError and ConfigError as a run does, where its parts are first asked for.
    """

    def __init__(self, name: str, overrides: Sequence[str] = ()) -> None:
        self.name = name
        self.overrides = tuple(overrides)

    @cached_property
    def loaded(self) -> Loaded:
        return load(Kind.ALGORITHMS, self.name)

    @property
    def spec(self) -> AlgorithmSpec:
        spec: AlgorithmSpec = self.loaded.spec
        return spec

    @cached_property
    def config(self) -> Config:
        """Of a run with this algorithm, its roles, and nothing else of interest; settled, its tables resolved."""
        given = {
            "run": {"mode": "train" if self.spec.samples else "train-only"},
            "backend": {"name": "plain"},
            "rollout": {"engine": "fake", "max_tokens": MAX_TOKENS},
            "algorithm": {"name": self.name},
            "roles": {role: {} for role in self.spec.roles if role != ACTOR},
        }
        return resolve_tables(settle_algorithm(config_of(given, self.overrides)))

    @cached_property
    def plan(self) -> AlgorithmPlan:
        return plan_algorithm(self.config, plugins_of(self.config))

    # ---- samples -----------------------------------------------------------------------------------------------------

    def samples(self, groups: Sequence[int] = GROUPS, *, unanswered: bool = False) -> SampleBatch:
        """Ragged samples with every column that an algorithm finds: core's, and those of its passes.

        Sample 1 has no loss token, and others have tokens of the environment among theirs. `groups` are the sizes of
        the groups; if `unanswered`, no sample has a loss token.
        """
        draw = np.random.default_rng(0)
        samples = sum(groups)
        prompts, responses = draw.integers(1, 4, samples), draw.integers(1, MAX_TOKENS + 1, samples)
        lengths = prompts + responses
        offsets = offsets_of(lengths)
        place = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)  # in its sample
        mask = place >= np.repeat(prompts, lengths)
        mask &= place != np.repeat(prompts + 2, lengths)  # the environment's
        if samples > 1:
            mask[offsets[1] : offsets[2]] = False
        mask &= not unanswered
        batch = SampleBatch(
            tokens=draw.integers(0, 100, offsets[-1]),
            offsets=offsets,
            columns={
                "loss_mask": mask,
                "rollout_logprobs": _masked(-draw.exponential(1.0, len(mask)), mask),
                "versions": np.where(mask, 1, 0),
            },
            row_columns={
                "group": np.repeat(np.arange(len(groups)), groups),
                "sample": np.concatenate([np.arange(size) for size in groups]),
                "prompt_length": prompts,
                "response_length": responses,
                "truncated": responses == MAX_TOKENS,
                "turns": np.where(responses > 2, 2, 1),
                "episode": np.arange(samples),
                "final": np.ones(samples, np.bool_),
            },
        )
        if self.config.algorithm.overlong == "mask":
            batch = without_truncated(batch)
        batch = batch.with_columns(old_logprobs=batch.columns["rollout_logprobs"])
        for each in self.plan.passes:
            for column, output in each.columns.items():
                batch = batch.with_columns(**{column: _as_of_a_model(output, draw, batch)})
        return batch

    def rewards(self, samples: SampleBatch) -> FloatArray:
        """[B] of all sizes and both signs; of three samples of a prompt or more, the two best have the same."""
        rewards = np.random.default_rng(1).normal(0.5, 1.0, len(samples)).astype(np.float32)
        groups = samples.row_columns["group"]
        for group in np.unique(groups):
            members = np.flatnonzero(groups == group)
            if len(members) > 2:
                second, best = members[np.argsort(rewards[members])[-2:]]
                rewards[second] = rewards[best]
        return rewards

    def token_rewards(self, samples: SampleBatch) -> FloatArray:
        """[N] as a KL penalty gives them to single tokens."""
        mask = samples.columns["loss_mask"]
        return _masked(np.random.default_rng(2).normal(0.0, 0.1, len(mask)), mask)

    # ---- advantages --------------------------------------------------------------------------------------------------

    def estimate(self, samples: SampleBatch, rewards: FloatArray, token_rewards: FloatArray) -> Advantages:
        """The algorithm's own, or those of `algorithm.advantages`, for arrays that they may do with as they like."""
        found = self.plan.estimate(copied(samples), rewards.copy(), token_rewards.copy())
        assert isinstance(found, Advantages), f"advantages returned a {type(found).__name__}; return Advantages(...)"
        return found

    @cached_property
    def batch(self) -> SampleBatch:
        """Samples with all that losses read, as `[algorithm]` says."""
        samples = self.samples()
        batch = compute_advantages(
            samples,
            self.rewards(samples),
            self.plan.estimate,
            self.config.algorithm,
            max_tokens=MAX_TOKENS,
        )
        return batch.samples

    # ---- losses ------------------------------------------------------------------------------------------------------

    @cache  # noqa: B019  -- a trial lives as long as its checks
    def outputs(self, role: str) -> Mapping[Output, Array]:
        """[N] float64 of each output that the role's loss wants on `batch`, 0 outside loss tokens.

        Log-probs are those of a policy that has moved from `old_logprobs` by very different amounts in different
        samples, so that some are within any clip and others beyond.
        """
        samples, draw = self.batch, np.random.default_rng(3)
        mask, row_of = samples.columns["loss_mask"], samples.row_of
        found: dict[Output, Array] = {}
        for output in self.plan.objectives[role].loss.outputs:
            noise = draw.normal(0.0, 1.0, len(mask))
            match output:
                case Output.LOGPROBS:
                    sizes = np.array([1e-4, 0.02, 0.3, 1.5])[np.arange(len(samples)) % 4]
                    values = samples.columns["old_logprobs"].astype(np.float64)
                    values = values + sizes[row_of] * noise
                case Output.VALUES:
                    values = samples.columns.get("values", np.zeros(len(mask))) + 0.3 * noise
                case _:
                    values = np.abs(noise)
            found[output] = np.where(mask, values, 0.0)
        return found

    @cache  # noqa: B019
    def whole(self, role: str) -> MicroBatch:
        """The optimizer step on `batch` as one micro-batch."""
        ((_, micro),) = self.micro_batches(role, self.batch, self.outputs(role), WHOLE)
        return micro

    @cache  # noqa: B019
    def divided(self, role: str, packing: Packing) -> Found:
        """The optimizer step on `batch`."""
        return self.step(role, self.batch, self.outputs(role), packing)

    def micro_batches(
        self, role: str, samples: SampleBatch, outputs: Mapping[Output, Array], packing: Packing
    ) -> Iterator[tuple[int, MicroBatch]]:
        """Each dp rank's micro-batches of one optimizer step on all samples. Outputs and the tokens' places [T] in the
        batch are columns of theirs."""
        carried = {f"{OWN}{output}": values for output, values in outputs.items()}
        carried[f"{OWN}place"] = np.arange(len(samples.tokens))
        samples = samples.with_columns(**carried)
        (plan,) = plan_steps(
            samples,
            packing.layout,
            tokens_per_micro_batch=packing.tokens,
            aggregation=self.plan.objectives[role].aggregation,
            max_tokens=MAX_TOKENS,
            seed=0,
        )
        for dp_rank in range(packing.dp_size):
            batch = pack(samples, plan.shard_of(dp_rank), sequence_multiple=packing.sequence_multiple)
            yield from ((dp_rank, micro) for micro in batch.micro_batches)

    def evaluate(
        self, role: str, micro: MicroBatch, seen: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = dict
    ) -> Part:
        """The role's loss of one micro-batch, in float64. `seen` makes what the loss gets of its columns."""
        inputs = loss_inputs(micro)
        leaves = {Output(name): leaf for name in Output if (leaf := getattr(inputs, name, None)) is not None}
        result = resolve_loss(self.plan.objectives[role].loss)(evolve(inputs, columns=seen(inputs.columns)))
        assert isinstance(result, LossResult) and result.loss.ndim == 0, (
            f"the loss of the {role} gave {result}; return LossResult(sum over tokens, metrics)"
        )
        gradients: Sequence[Tensor | None] = [None] * len(leaves)
        if result.loss.requires_grad:
            gradients = torch.autograd.grad(result.loss, list(leaves.values()), allow_unused=True)
        return Part(
            result=result,
            gradients={
                output: np.zeros(len(micro.tokens)) if gradient is None else gradient.numpy()
                for output, gradient in zip(leaves, gradients, strict=True)
            },
            differentiable=result.loss.requires_grad,
        )

    def step(
        self,
        role: str,
        samples: SampleBatch,
        outputs: Mapping[Output, Array],
        packing: Packing,
        rewritten: Callable[[MicroBatch], MicroBatch] = lambda micro: micro,
    ) -> Found:
        """The role's loss of an optimizer step, its gradients, and its metrics as they are merged over dp ranks."""
        loss, differentiable = 0.0, True
        gradients = {output: np.zeros(len(samples.tokens)) for output in outputs}
        sums = [MetricSum() for _ in range(packing.dp_size)]
        for dp_rank, micro in self.micro_batches(role, samples, outputs, packing):
            part = self.evaluate(role, rewritten(micro))
            loss += part.result.loss.item()
            differentiable &= part.differentiable
            sums[dp_rank].add(part.result.metrics)
            for output, gradient in part.gradients.items():
                np.add.at(gradients[output], micro.columns[f"{OWN}place"], gradient)
        return Found(
            loss=loss,
            gradients=gradients,
            metrics=merge_metrics(each.finish() for each in sums),
            differentiable=differentiable,
        )


def loss_inputs(micro: MicroBatch) -> LossInputs:
    """What a backend gives to the loss, in float64: outputs are leaves of the graph, and columns copies."""
    batch = to_device(micro, CPU)
    columns = {name: each.double() if each.is_floating_point() else each for name, each in batch.columns.items()}
    carried = [output for output in Output if f"{OWN}{output}" in columns]
    outputs = {output: columns.pop(f"{OWN}{output}").requires_grad_() for output in carried}
    del columns[f"{OWN}place"]
    return evolve(batch, columns=columns).loss_inputs(outputs)


def copied(samples: SampleBatch) -> SampleBatch:
    """The same in arrays of its own."""
    return evolve(
        samples,
        tokens=samples.tokens.copy(),
        offsets=samples.offsets.copy(),
        columns={name: column.copy() for name, column in samples.columns.items()},
        row_columns={name: row.copy() for name, row in samples.row_columns.items()},
    )


def other_numbers(values: Array, where: Array, *, seed: int) -> Array:
    """`values` with NaN, infinities and other numbers in the places `where` (bool), and with other integers."""
    draw = np.random.default_rng(seed)
    shape = (int(where.sum()), *values.shape[1:])
    if np.issubdtype(values.dtype, np.floating):
        wrong: Array = draw.choice([np.nan, np.inf, -np.inf, 1e4, -1e4], shape)
    else:
        wrong = draw.integers(2, 7, shape)
    changed = values.copy()
    changed[where] = wrong
    return changed


def _masked(values: Array, mask: Array) -> FloatArray:
    return np.where(mask, values, 0.0).astype(np.float32)


def _as_of_a_model(output: Output, draw: np.random.Generator, samples: SampleBatch) -> Array:
    """A column of this output: log-probs near the engine's."""
    mask = samples.columns["loss_mask"]
    match output:
        case Output.LOGPROBS:
            near: Array = samples.columns["rollout_logprobs"] + draw.normal(0.0, 0.1, len(mask))
            return _masked(near, mask)
        case Output.ROUTED_EXPERTS:
            experts: IntArray = draw.integers(0, 4, (len(mask), 2, 2))
            return experts
        case Output.ENTROPY:
            return _masked(draw.exponential(1.0, len(mask)), mask)
        case _:
            return _masked(draw.normal(0.5, 0.5, len(mask)), mask)
