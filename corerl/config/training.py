"""The tables of what is trained, and how: the model, its adapters, the optimizer and the passes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from attrs import evolve, frozen
from attrs.validators import optional

from corerl.config.options import above, at_least, between, decays, filled, finite, option

LayoutName = Literal["auto", "packed", "whole"]
Precision = Literal["float32", "bfloat16", "float16"]
ALL_LINEAR, EXPERTS = "all-linear", "experts"  # of lora.targets


@frozen(kw_only=True)
class ModelConfig:
    """The model that is trained: its files, or the fields of its config."""

    path: str = option("a Hugging Face model directory: config.json, safetensors, tokenizer", default="")
    config: Mapping[str, Any] = option(
        "alternative to path: fields of a Hugging Face config, model_type included; weights start random",
        factory=dict,
        needs="!.path",
    )
    tokenizer: str = option(
        "a tokenizer directory, or 'characters:ABC' for one token per character; empty uses the one in path", default=""
    )
    vocabulary: int = option(
        "number of token ids that can be sampled; later ones are no part of log-probs and entropy. 0: all but "
        "those that the tokenizer lacks, which pad the embedding. Models of other roles use the actor's",
        default=0,
        validator=at_least(0),
    )
    pictures: str = option(
        "the plugin that reads the pictures of a run's rows, 'vision' for example; empty: rows have none, and of a "
        "model that reads pictures the text half is trained",
        default="",
    )
    tower: Literal["frozen", "trained"] = option(
        "whether the parts that read pictures are trained with the text decoder; without model.pictures they stay as "
        "they are in model.path",
        default="frozen",
        needs="model.pictures",
    )


@frozen(kw_only=True)
class OptimizerConfig:
    """AdamW (Loshchilov & Hutter 2019, "Decoupled Weight Decay Regularization")."""

    lr: float = option("peak learning rate", default=1e-6, validator=[at_least(0), finite])
    betas: tuple[float, float] = option("decay rates of the two moments", default=(0.9, 0.95), validator=decays)
    eps: float = option("added to the root of the second moment", default=1e-8, validator=[above(0), finite])
    weight_decay: float = option(
        "decoupled weight decay of matrices; norms and biases are never decayed",
        default=0.0,
        validator=[at_least(0), finite],
    )
    clip_norm: float = option(
        "global gradient norm to clip to; 0 disables clipping", default=1.0, validator=at_least(0)
    )


@frozen(kw_only=True)
class ScheduleConfig:
    """The learning rate over optimizer steps."""

    warmup_steps: int = option("optimizer steps of linear warm-up from 0", default=0, validator=at_least(0))
    decay: Literal["constant", "linear", "cosine"] = option("learning-rate schedule after warm-up", default="constant")
    final_ratio: float = option(
        "learning rate at the last optimizer step, as a fraction of the peak", default=0.1, validator=between(0, 1)
    )
    steps: int = option(
        "rollout steps of the schedule; afterwards the learning rate is constant. 0 uses run.steps: raising it on "
        "resume then stretches the schedule and raises the learning rate",
        default=0,
        validator=at_least(0),
    )


@frozen(kw_only=True)
class TrainConfig:
    """How a role is trained, by any backend. A frozen role reads those of its forward pass."""

    mini_batches: int = option("optimizer steps per pass over a rollout batch", default=1, validator=at_least(1))
    epochs: int = option("passes over each rollout batch", default=1, validator=at_least(1))
    tokens_per_micro_batch: int = option(
        "tokens per forward pass of one dp rank, padding included", default=16384, validator=at_least(1)
    )
    layout: LayoutName = option(
        "how sequences pass through the model; packed: one after the other without padding, through CoreRL's attention "
        "and head; whole: in padded rows, through transformers' own code, slower but for any causal model; auto: "
        "packed if the model allows it",
        default="auto",
    )
    share_prefixes: bool = option(
        "compute tokens once that samples of a group begin with in common, such as their prompt, or the turns before "
        "branches of an episode: the same numbers in fewer tokens per pass. Needs a backend that can, and a model that "
        "can be packed and carries no state along a row; samples with pictures are computed apart",
        default=False,
    )
    precision: Precision | Literal["auto"] = option(
        "precision of the forward and backward passes; weights and moments stay in float32. float16 uses a dynamic "
        "loss scale, which skips an occasional step. auto: bfloat16 on cuda, if the backend has it, else float32",
        default="auto",
    )
    recompute: Literal["auto", "none", "full"] = option(
        "activations to recompute in the backward pass instead of keeping them; full: those inside each decoder layer; "
        "auto: full if corerl-forecast is installed and predicts that training does not fit on this machine's GPUs "
        "without, else none",
        default="auto",
    )
    aux_loss_coef: float = option(
        "weight of the loss that balances the load of experts (Fedus et al. 2021), over all tokens of a step; usually "
        "the router_aux_loss_coef of the model's config, which is not read; 0: without",
        default=0.0,
        validator=[at_least(0), finite],
    )
    optimizer: OptimizerConfig = option("AdamW", factory=OptimizerConfig)
    schedule: ScheduleConfig = option("learning-rate schedule over optimizer steps", factory=ScheduleConfig)
    restarts: int = option(
        "how often, without a new step, all ranks restart from the newest checkpoint after one has died or hung; 0 "
        "ends the run. The actor's counts",
        default=1,
        validator=at_least(0),
    )

    def settled(self, device: str, *, bfloat16: bool = True) -> TrainConfig:
        """The same with a precision in place of 'auto', for a backend with or without bfloat16, and with nothing
        recomputed in place of 'auto'."""
        precision: Precision = "bfloat16" if device == "cuda" and bfloat16 else "float32"
        return evolve(
            self,
            precision=precision if self.precision == "auto" else self.precision,
            recompute="none" if self.recompute == "auto" else self.recompute,
        )

    def of_passes(self) -> TrainConfig:
        """The same with the defaults of what only training reads, so that it says nothing but how samples pass."""
        return TrainConfig(
            tokens_per_micro_batch=self.tokens_per_micro_batch,
            layout=self.layout,
            share_prefixes=self.share_prefixes,
            precision=self.precision,
        )


@frozen(kw_only=True)
class LoraConfig:
    """Low-rank adapters on top of a role's weights, which stay frozen (Hu et al. 2022, "LoRA: Low-Rank Adaptation of
    Large Language Models"): a linear layer gives W x + scale B (A x)."""

    rank: int | None = option(
        "rows of A and columns of B; unset: 16, or as in path", default=None, validator=at_least(1)
    )
    alpha: float | None = option(
        "scale times the rank, or with rslora times its root; unset: 32, or as in path",
        default=None,
        validator=[above(0), optional(finite)],
    )
    targets: tuple[str, ...] | None = option(
        "modules that get adapters, by the last parts of their names in the Hugging Face model, such as q_proj or "
        "self_attn.q_proj; 'all-linear' stands for all linear layers of the decoder but routers and the head, and "
        "'experts' for the matrices of routed experts; unset: all-linear, or as in path",
        default=None,
        validator=optional(filled),
    )
    rslora: bool | None = option(
        "scale by alpha / sqrt(rank) in place of alpha / rank (Kalajdzievski 2023); unset: false, or as in path",
        default=None,
    )
    init: Literal["kaiming", "gaussian"] = option(
        "initial values of A; kaiming: uniform within 1 / sqrt(inputs), gaussian: with a deviation of 1 / rank. B "
        "starts at zero, so that the first policy is the model",
        default="kaiming",
        needs="!.path",
    )
    path: str = option("a PEFT directory with adapters to continue from; empty: new adapters", default="")

    def settled(self, saved: Mapping[str, Any]) -> LoraConfig:
        """The same with a value for all that is unset: of `saved`, the settings of `path`, or the common one."""
        common = {"rank": 16, "alpha": 32.0, "targets": (ALL_LINEAR,), "rslora": False, **saved}
        return evolve(self, **{name: value for name, value in common.items() if getattr(self, name) is None})

    @property
    def of_experts(self) -> bool:
        """Whether experts get adapters; of settled ones."""
        return any(target.rpartition(".")[2] == EXPERTS for target in self.targets or ())

    @property
    def scale(self) -> float:
        """What the product of B and A is multiplied by; of settled adapters."""
        assert self.rank is not None and self.alpha is not None
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)
