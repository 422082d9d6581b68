"""An optimizer step of the FSDP backend on two CPU ranks, against bare `fully_shard` loops with the same mathematics.

All of them run in the same two processes, start from the same weights and process the same batches in turns. The
benchmark fails if the norms of their first gradients differ.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.report import Comparison, Report, finish, parser
from benchmarks.samples import make_batch, plan_one_step
from corerl.config.schema import OptimizerConfig, TrainConfig
from corerl.data.packing import pack
from corerl.data.plan import StepPlan
from corerl.models.attention import PACKED
from corerl.models.build import build_on_meta, materialize
from corerl.models.initial import RandomSource
from corerl.models.layouts import PackedPolicy
from corerl.ops.attention import PackedSequences
from corerl.types import LossSpec, MicroBatch, Output, SampleBatch, Step
from corerl_testing.harness import Setup, start
from corerl_testing.pool import RankPool

RANKS = 2
CLIP, ENTROPY = 0.2, 0.04
OPTIMIZER = OptimizerConfig(lr=2e-3, clip_norm=1.0)
LOSS = LossSpec(
    name="clipped",
    params={"clip_low": CLIP, "clip_high": CLIP, "entropy_coef": ENTROPY},
    outputs=(Output.LOGPROBS, Output.ENTROPY),
)
SHARED_FIELDS = {
    "model_type": "qwen3",
    "tie_word_embeddings": True,
    "initializer_range": 0.08,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@frozen(kw_only=True)
class Case:
    """A model and the samples of one step."""

    name: str
    fields: Mapping[str, Any]  # of the model's config, beyond SHARED_FIELDS
    samples: int
    shortest: int  # tokens of a sample, the prompt's included
    longest: int
    prompt: int
    tokens_per_micro_batch: int

    @property
    def model(self) -> dict[str, Any]:
        return {**SHARED_FIELDS, **self.fields}

    def batch(self, seed: int) -> SampleBatch:
        lengths = np.random.default_rng([seed, 1]).integers(self.shortest, self.longest + 1, self.samples)
        return make_batch(lengths, prompt=self.prompt, vocab=self.fields["vocab_size"], seed=seed)


def cases(size: int) -> list[Case]:
    quickstart = Case(
        name="the quickstart's model (0.1 M parameters)",
        fields={
            "vocab_size": 16,
            "hidden_size": 64,
            "intermediate_size": 192,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
        },
        samples=size,
        shortest=12,
        longest=14,
        prompt=7,
        tokens_per_micro_batch=16384,
    )
    larger = Case(
        name="a model of 4 M parameters, ragged samples, 2 micro-batches",
        fields={
            "vocab_size": 2000,
            "hidden_size": 256,
            "intermediate_size": 768,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 32,
        },
        samples=max(size // 10, 4),
        shortest=32,
        longest=192,
        prompt=16,
        tokens_per_micro_batch=max(size * 4, 384),
    )
    return [quickstart, larger]


class Loop(Protocol):
    def train(self, batch: SampleBatch, plan: StepPlan, step: Step) -> float:
        """One optimizer step; returns the gradient's norm before it is clipped."""


class Ours:
    """What a rank of a run does with one call of `train`."""

    def __init__(self, case: Case) -> None:
        train = TrainConfig(tokens_per_micro_batch=case.tokens_per_micro_batch, optimizer=OPTIMIZER)
        self._worker, _ = start(Setup(backend="fsdp", model="", fields=case.model, train=train))

    def train(self, batch: SampleBatch, plan: StepPlan, step: Step) -> float:
        return self._worker.train(batch, plan.share(dist.get_rank()), LOSS, step).grad_norm


class Bare:
    """A loop as one writes it by hand; subclasses say how a micro-batch goes through the model."""

    def __init__(self, root: nn.Module, layers: Iterable[nn.Module]) -> None:
        mesh = init_device_mesh("cpu", (RANKS,))
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(root, mesh=mesh, reshard_after_forward=False)
        self._params = list(root.parameters())
        # The fastest of torch's three implementations on DTensors on a CPU.
        self._optimizer = torch.optim.AdamW(
            self._params, lr=OPTIMIZER.lr, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps, weight_decay=0.0, fused=True
        )

    def outputs(self, micro: MicroBatch) -> tuple[Tensor, Tensor, Mapping[str, Tensor]]:
        """Log-probs and entropy of the sampled tokens, and the micro-batch's columns in the same shape."""
        raise NotImplementedError

    def train(self, batch: SampleBatch, plan: StepPlan, step: Step) -> float:
        for micro in pack(batch, plan.share(dist.get_rank()), sequence_multiple=1).micro_batches:
            logprobs, entropy, columns = self.outputs(micro)
            ratio = (logprobs - columns["old_logprobs"]).exp()
            advantages, weights = columns["advantages"], columns["weights"]
            gain = torch.minimum(ratio * advantages, ratio.clamp(1.0 - CLIP, 1.0 + CLIP) * advantages)
            loss = (weights * -(gain + ENTROPY * entropy)).sum()
            (loss * RANKS).backward()
        norm = nn.utils.clip_grad_norm_(self._params, OPTIMIZER.clip_norm)
        for group in self._optimizer.param_groups:
            group["lr"] = step.lr
        self._optimizer.step()
        self._optimizer.zero_grad()
        assert isinstance(norm, DTensor)
        return float(norm.full_tensor())


class Packed(Bare):
    """The same packed sequences through the same model code as CoreRL's."""

    def __init__(self, case: Case) -> None:
        config = AutoConfig.for_model(**case.model)
        policy = PackedPolicy(build_on_meta(config, dtype=torch.float32, attention=PACKED))
        names = dict(policy.model.named_parameters())
        weights = initial_weights(config, {name: tuple(param.shape) for name, param in names.items()})
        materialize(policy.model, {name: nn.Parameter(value) for name, value in weights.items()})
        super().__init__(policy, policy.model.get_decoder().layers)
        self._policy = policy

    def outputs(self, micro: MicroBatch) -> tuple[Tensor, Tensor, Mapping[str, Tensor]]:
        packing = PackedSequences.of(micro.cu_seqlens, "cpu")
        found = self._policy(torch.tensor(micro.tokens), packing, torch.tensor(micro.positions), 1.0, LOSS.outputs)
        columns = {name: torch.tensor(micro.columns[name]) for name in ("old_logprobs", "advantages", "weights")}
        return found[Output.LOGPROBS], found[Output.ENTROPY], columns


class Padded(Bare):
    """Plain transformers: a rectangle of right-padded sequences, causal SDPA, log_softmax of all logits."""

    def __init__(self, case: Case) -> None:
        config = AutoConfig.for_model(**case.model)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
        shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
        model.load_state_dict(initial_weights(config, shapes), strict=False)  # the tied head is in no file
        super().__init__(model, model.model.layers)
        self._model = model

    def outputs(self, micro: MicroBatch) -> tuple[Tensor, Tensor, Mapping[str, Tensor]]:
        rows = np.repeat(np.arange(len(micro.lengths)), micro.lengths)
        shape = len(micro.lengths), int(micro.lengths.max())

        def rectangle(values: Any) -> Tensor:
            out = np.zeros(shape, dtype=values.dtype)
            out[rows, micro.positions] = values
            return torch.from_numpy(out)

        tokens = rectangle(micro.tokens)
        # Padding lies to the right, so under a causal mask no token sees it.
        logits = self._model(input_ids=tokens[:, :-1], use_cache=False).logits
        log_p = torch.log_softmax(logits, dim=-1)
        columns = {name: rectangle(micro.columns[name])[:, 1:] for name in ("old_logprobs", "advantages", "weights")}
        return log_p.gather(-1, tokens[:, 1:, None])[..., 0], -(log_p.exp() * log_p).sum(-1), columns


def initial_weights(config: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """The weights that CoreRL begins with."""
    source = RandomSource(config, shapes, seed=0)
    return {name: source.read(name, (0,) * len(shape), shape) for name, shape in shapes.items()}


def measure_on_rank(case: Case, rounds: int, steps: int) -> dict[str, list[float]]:
    """Called on every rank. Seconds of one step of each loop, one a round."""
    loops: dict[str, Loop] = {"ours": Ours(case), "packed": Packed(case), "padded": Padded(case)}
    took: dict[str, list[float]] = {name: [] for name in loops}
    names = list(loops)
    for number in range(rounds + 1):  # the first round warms up
        batches = [case.batch(number * steps + index) for index in range(steps)]
        plans = [
            plan_one_step(batch, dp_size=RANKS, tokens_per_micro_batch=case.tokens_per_micro_batch) for batch in batches
        ]
        norms: dict[str, list[float]] = {}
        for name in names[number % len(names) :] + names[: number % len(names)]:
            dist.barrier()
            began = time.perf_counter()
            norms[name] = [
                loops[name].train(batch, plan, Step(optimizer_step=0, rollout_step=0, lr=OPTIMIZER.lr))
                for batch, plan in zip(batches, plans, strict=True)
            ]
            dist.barrier()
            if number:
                took[name].append((time.perf_counter() - began) / steps)
        for name in ("packed", "padded"):
            # From step to step rounding grows without end: later weights differ, though nobody is wrong.
            if not number:
                np.testing.assert_allclose(norms[name][:2], norms["ours"][:2], rtol=1e-3, err_msg=name)
    return took


def measure(*, rounds: int, size: int, steps: int) -> Report:
    pool = RankPool(RANKS)
    comparisons = []
    try:
        for case in cases(size):
            took = pool.run(measure_on_rank, case, rounds, steps)[0]
            comparisons += [
                Comparison(
                    what=f"a step of {case.name}",
                    against="bare fully_shard loop, same packing",
                    ours=took["ours"],
                    other=took["packed"],
                    target=1.1,
                ),
                Comparison(
                    what="the same",
                    against="bare fully_shard loop, plain transformers on padded rows",
                    ours=took["ours"],
                    other=took["padded"],
                ),
            ]
    finally:
        pool.close()
    return Report(
        name="fsdp_step",
        size=f"{size} samples a step (a tenth of it for the larger model), {steps} steps a round, {RANKS} ranks",
        comparisons=comparisons,
        note=(
            "One optimizer step on the ranks: packing, forward, clipped loss with entropy bonus, backward, clipping to "
            "norm 1, AdamW. CoreRL's side is `Worker.train`, with its metrics; neither side uses Ray. The bare loops "
            "compute no metric except the gradient norm, and use torch's fused AdamW on DTensors."
        ),
    )


if __name__ == "__main__":
    command = parser(__doc__, rounds=7, size=256, unit="samples of a step")
    command.add_argument("--steps", type=int, default=3, help="in one round (default: 3)")
    args = command.parse_args()
    finish(measure(rounds=args.rounds, size=args.size, steps=args.steps), args.output)
