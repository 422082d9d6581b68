"""The whole configuration of a run, one frozen class for each table of the TOML file.

Every field has help text, which `corerl config` prints; a field without a default is required.
Options of a single plugin are in `backends.NAME`, `engines.NAME`, `algorithms.NAME` or `transports.NAME`, as its own
class.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, Literal

from attrs import evolve, field, fields, frozen
from attrs.validators import optional

from corerl.config.options import (
    above,
    at_least,
    between,
    custom_resources,
    decays,
    filled,
    finite,
    finite_values,
    option,
    share,
    variables,
    zero_or_several,
)
from corerl.kinds import MemoryKind

Device = Literal["auto", "cpu", "cuda"]
LayoutName = Literal["auto", "packed", "whole"]
Aggregation = Literal["token-mean", "sequence-mean", "constant-length"]
KL_ESTIMATOR = {"loss": "k3", "reward": "k1"}  # that of algorithm.kl_in, where the config names none
Precision = Literal["float32", "bfloat16", "float16"]
ALL_LINEAR, EXPERTS = "all-linear", "experts"  # of lora.targets
MOST_SAMPLES = 2**20  # of a step, which the driver holds at once: more are a slip of the hand
MOST = 16_384  # processes of one kind: more are a slip of the hand, and planning them would take hours


@frozen(kw_only=True)
class RunConfig:
    """Output directory, mode, length and seed of a run."""

    dir: str = option("output directory of the run; one per run", default="runs/default", validator=filled)
    mode: Literal["train", "rollout-only", "train-only", "eval"] = option(
        "train; rollout-only: sample and save the batches; train-only: train from saved batches, without engines; "
        "eval: score the held-out prompts",
        default="train",
    )
    steps: int = option("rollout steps to train for", default=250, validator=at_least(0))
    seed: int = option(
        "seed of prompt order, sampling noise and random weights", default=0, validator=between(0, 2**63 - 1)
    )

    @property
    def trains(self) -> bool:
        return self.mode in ("train", "train-only")

    @property
    def has_engines(self) -> bool:
        return self.mode != "train-only"


@frozen(kw_only=True)
class ClusterConfig:
    """Machines, devices and time limits."""

    address: str = option("address of a running Ray cluster; empty starts one on this machine", default="")
    device: Device = option(
        "device of ranks and engines; auto uses cuda if the driver's machine has it, even when address is set",
        default="auto",
    )
    placement: Literal["colocated", "disaggregated"] = option(
        "colocated: engines and ranks take turns on the same devices; disaggregated: engines have their own",
        default="colocated",
    )
    offload: Literal["auto", "always", "never"] = option(
        "offload ranks while engines on the same device sample; auto: only on cuda, and only until two steps have "
        "shown that memory suffices for both",
        default="auto",
    )
    timeout: float = option(
        "time limit of a collective, in seconds",
        default=600.0,
        validator=[above(0), finite],
    )
    watchdog: float = option(
        "seconds after which a call that does not move reports which ranks or engines it waits for and where they "
        "are; 0 never reports",
        default=60.0,
        validator=[at_least(0), finite],
    )
    health_timeout: float = option(
        "seconds without a heartbeat before a rank or engine counts as hung and is killed; an engine is replaced, "
        "ranks are restarted (train.restarts) or end the run; 0 waits for ever",
        default=120.0,
        validator=[at_least(0), finite],
    )
    start_timeout: float = option(
        "seconds of work (imports, building, loading) before a rank or engine that has not started is killed, as "
        "above; of ranks that wait for each other the one that they wait for; 0 waits for ever",
        default=3600.0,
        validator=[at_least(0), finite],
    )
    resources: Mapping[str, float] = option(
        "custom Ray resources that each bundle requests besides CPUs and GPUs, such as {h200 = 1}",
        factory=dict,
        validator=custom_resources,
        needs="cluster.address",
    )
    environment: Mapping[str, str] = option(
        "environment variables set for every rank and engine before it imports torch; the run's files record their"
        " names under secrets without the values, except for variables that are read at the start of a process, "
        "such as LD_PRELOAD and OMP_*",
        factory=dict,
        validator=variables,
    )
    secrets: tuple[str, ...] = option(
        "names of environment variables, such as keys of services, whose values every rank and engine gets from the "
        "environment of the command that starts the run",
        default=(),
        validator=variables,
    )


@frozen(kw_only=True)
class ModelConfig:
    """The model that is trained: its files, or the fields of its config."""

    path: str = option("a Hugging Face model directory: config.json, safetensors, tokenizer", default="")
    config: Mapping[str, Any] = option(
        "alternative to path: fields of a Hugging Face config, model_type included; weights start random", factory=dict
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


@frozen(kw_only=True)
class BackendChoice:
    """The training backend of all roles that name none."""

    name: str = option("an installed training backend, 'distribution:name', or 'package.module:SPEC'")


@frozen(kw_only=True)
class RoleChoice:
    """The worker processes of a role."""

    ranks: int = option("worker processes of this role, one per device", default=1, validator=between(1, MOST))
    backend: str = option("backend of this role only; empty uses backend.name", default="")
    options: Mapping[str, Any] | None = option(
        "backend options of this role only, replacing [backends.NAME] entirely; unset uses [backends.NAME]",
        default=None,
    )
    train: TrainConfig | None = option(
        "[train] settings of this role only, replacing [train] entirely; unset uses [train]", default=None
    )


@frozen(kw_only=True)
class SideRoleChoice(RoleChoice):
    """A role other than the actor."""

    devices: Literal["shared", "own"] = option(
        "shared: the role runs on the actor's devices and shares their memory; own: it has devices of its own",
        default="shared",
    )
    model: ModelConfig | None = option(
        "[model] settings of this role only, replacing [model] except for its tokenizer; unset uses the actor's "
        "model, for a critic with a value head",
        default=None,
    )
    lora: LoraConfig | None = option(
        "train low-rank adapters of this role in place of its weights; a critic's value head is trained too",
        default=None,
    )


@frozen(kw_only=True)
class RolesConfig:
    """The roles of a run: the actor, and those that its algorithm needs."""

    actor: RoleChoice = option("the policy being trained", factory=RoleChoice)
    critic: SideRoleChoice | None = option("the value function, for algorithms that need one", default=None)
    teacher: SideRoleChoice | None = option(
        "a frozen language model that computes log-probs of the actor's samples, for algorithms that need one",
        default=None,
    )

    reference: SideRoleChoice | None = option(
        "a separate frozen model as the reference policy of algorithm.kl_coef: of another size, on another backend"
        " or on other devices; unset: a snapshot in the host memory of the actor's ranks",
        default=None,
        needs="algorithm.kl_coef",
    )

    @property
    def other_roles(self) -> dict[str, SideRoleChoice]:
        """The other roles that are set, by name."""
        given = {"critic": self.critic, "teacher": self.teacher, "reference": self.reference}
        return {role: choice for role, choice in given.items() if choice is not None}

    @property
    def own_models(self) -> dict[str, ModelConfig]:
        """The models of roles that do not use the actor's, by role."""
        return {role: choice.model for role, choice in self.other_roles.items() if choice.model is not None}


@frozen(kw_only=True)
class AlgorithmConfig:
    """The settings that all algorithms share, from rewards to the policy's loss. One that is unset is as the algorithm
    says; `settled` fills it in."""

    name: str = option(
        "an installed algorithm (`corerl plugins` lists them), 'distribution:name', or 'package.module:SPEC'",
        default="grpo",
        validator=filled,
    )
    advantages: str = option(
        "'module:function' in place of the algorithm's own advantages",
        default="",
        needs="!rollout.source=streamed",
    )
    postprocess: str = option(
        "'module:function' that maps the samples of a step, with log-probs, values and advantages, to those that are "
        "trained on",
        default="",
        needs="!rollout.source=streamed",
    )
    loss: str = option("in place of the algorithm's own policy loss: clipped, or 'module:function'", default="")
    entropy_coef: float = option("weight of the entropy bonus", default=0.0, validator=[at_least(0), finite])
    kl_coef: float = option(
        "weight of the KL penalty to the reference policy; 0 keeps no reference policy",
        default=0.0,
        validator=[at_least(0), finite],
    )
    reference: str = option(
        "directory of the reference policy's weights, in the actor's architecture; empty: those that the actor starts "
        "from",
        default="",
        needs=("algorithm.kl_coef", "!roles.reference", "!lora"),
    )
    reference_every: int = option(
        "rollout steps between updates of the reference policy to the actor's current weights; 0: never",
        default=0,
        validator=at_least(0),
        needs=("algorithm.kl_coef", "!roles.reference"),
    )
    kl_estimator: Literal["k1", "k2", "k3", "k3-differentiated"] | None = option(
        "estimator of the KL's value (Schulman 2020). In the loss, the gradient is that of the KL with each of them "
        "except k3-differentiated (Shao et al. 2024); in the reward, only with k1. Unset: k3 in the loss, k1 in the "
        "reward",
        default=None,
        needs={"k3-differentiated": "algorithm.kl_in=loss"},
    )
    kl_in: Literal["loss", "reward"] = option(
        "apply the KL penalty in the loss, or subtract it from each token's reward",
        default="loss",
        needs={"reward": "algorithm.kl_coef"},
    )
    aggregation: Aggregation | None = option(
        "how token losses are weighted in a step: all tokens equally, all sequences equally, or by 1 / "
        "rollout.max_tokens; unset: token-mean, unless the algorithm says otherwise",
        default=None,
    )
    old_logprobs: Literal["rollout", "recompute"] | None = option(
        "log-probs in the ratio's denominator: the engine's, or the trainer's recomputed before the first step; unset: "
        "rollout, unless the algorithm says otherwise",
        default=None,
    )
    correction: Literal["none", "token", "sequence", "geometric"] = option(
        "importance weights that correct for the mismatch of engine and trainer log-probs: the ratio of probabilities "
        "of each token, their product over a sample, or their geometric mean over it (Yao et al. 2025; Liu et al. "
        "2025)",
        default="none",
        needs="algorithm.old_logprobs=recompute",
    )
    correction_floor: float = option(
        "the smallest importance weight, at most correction_cap",
        default=0.0,
        validator=[at_least(0), finite],
        needs="algorithm.correction",
    )
    correction_cap: float = option(
        "the largest importance weight",
        default=2.0,
        validator=above(0),
        needs="algorithm.correction",
    )
    correction_beyond: Literal["truncate", "mask"] = option(
        "ratios below correction_floor or above correction_cap; truncate: the weight is that bound; mask: it is 0,"
        " so that the token (Ling Team 2025, IcePop) or the sample (Liu et al. 2025) is not trained on",
        default="truncate",
        needs="algorithm.correction",
    )
    on_mismatch: Literal["stop", "warn", "off"] = option(
        "what to do if trainer and engines, with the same weights, give sampled tokens log-probs that differ by "
        "more than mismatch_bound; stop: end the run; warn: report it and continue; off: do not check. Checked "
        "before the first step, after the first update with new weights, and after every weights.verify_every-th "
        "one",
        default="stop",
    )
    mismatch_bound: float = option(
        "mean difference of log-probs above which trainer and engines disagree. 0 chooses by the coarser of "
        "train.precision and what weights are sent in: 0.01 in float32, 0.1 in bfloat16 and float16, 0.3 with "
        "weights.quantize='fp8'; measured are 1e-7 to 0.0013, 0.002 to 0.056 and 0.03 to 0.2, the highest with "
        "experts. An engine that quantizes by itself needs its own",
        default=0.0,
        validator=[at_least(0), finite],
    )
    routing_replay: Literal["none", "recompute", "engine"] = option(
        "for MoE models: the experts that each token is trained through; none: those its routers choose in the "
        "training pass; recompute: those chosen when old_logprobs were recomputed (R2); engine: those the engine "
        'chose while sampling (R3). Ma et al. 2025, "Stabilizing MoE Reinforcement Learning by Aligning Training and '
        'Inference Routers"; Zheng et al. 2025, "Stabilizing Reinforcement Learning with LLMs"',
        default="none",
        needs={"recompute": "algorithm.old_logprobs=recompute"},
    )
    dynamic_sampling: int | None = option(
        "maximum number of times that groups whose rewards are all equal are dropped and other prompts sampled "
        "instead (Yu et al. 2025, section 3.2); 0 keeps such groups; unset: 0, unless the algorithm says otherwise",
        default=None,
        validator=at_least(0),
        needs=("!run.mode=train-only", "!rollout.source=streamed", "!algorithm.kl_in=reward"),
    )
    dynamic_sampling_on: str = option(
        "the part of the reward by which dynamic_sampling takes a group's rewards for equal: the label of one of "
        "reward.functions, or a name under which the function returns a value, such as 'right'; empty: the reward "
        "itself, the sum of all parts",
        default="",
        needs="algorithm.dynamic_sampling",
    )
    overlong: Literal["keep", "mask", "penalty"] | None = option(
        "what to do with samples at or near rollout.max_tokens; keep: train on them unchanged; mask: leave out "
        "truncated ones; penalty: reduce the reward by up to 1 over the last overlong_buffer tokens (Yu et al. 2025, "
        "section 3.4); unset: keep, unless the algorithm says otherwise",
        default=None,
    )
    overlong_buffer: int | None = option(
        "tokens before rollout.max_tokens over which the penalty grows from 0 to 1; unset: a fifth of them with "
        "overlong='penalty', else 0",
        default=None,
        validator=at_least(0),
    )

    def settled(self, defaults: Mapping[str, Any], *, max_tokens: int) -> AlgorithmConfig:
        """The same with a value for every setting that is unset: of `defaults`, the algorithm's own, or the common one.
        `max_tokens` is `rollout.max_tokens`."""
        common = {
            "aggregation": "token-mean",
            "dynamic_sampling": 0,
            "overlong": "keep",
            "old_logprobs": "rollout",
            "kl_estimator": KL_ESTIMATOR[self.kl_in],
            **defaults,
        }
        settled = evolve(self, **{name: value for name, value in common.items() if getattr(self, name) is None})
        if settled.overlong_buffer is not None:
            return settled
        return evolve(settled, overlong_buffer=max(1, max_tokens // 5) if settled.overlong == "penalty" else 0)


@frozen(kw_only=True)
class DataSource:
    """One of several sources of prompts."""

    source: str = option("source of prompts, as in data.source")
    name: str = option("name in `Prompt.source` and in metrics; empty uses the file's name", default="")
    weight: float = option(
        "share of the prompts, relative to the other sources", default=1.0, validator=[above(0), finite]
    )
    prompt_key: str = option("field that holds the prompt; empty uses data.prompt_key", default="")
    answer_key: str = option("field that holds the answer; empty uses data.answer_key", default="")
    split: str = option("its split, if it is a directory of several; empty uses data.split", default="")
    subset: str = option("its subset, if it has several; empty uses data.subset", default="")
    system: str | None = option(
        "the system message of its chats that have none; '' gives them none, unset uses data.system",
        default=None,
    )

    @property
    def called(self) -> str:
        return self.name or PurePath(self.source).stem


@frozen(kw_only=True)
class DataConfig:
    """The prompts of a run."""

    source: str = option(
        "a generated task (sort-digits), a .jsonl file, a .parquet, .csv, .arrow or .json file, a pattern such as "
        "'data/*.jsonl', a directory of such files, or a directory saved by the `datasets` library",
        default="sort-digits",
    )
    split: str = option("the split of a directory that is read; empty: train", default="")
    subset: str = option("the subset of a directory whose README.md names several; empty: its default", default="")
    sources: tuple[DataSource, ...] = option("alternative to source: several sources, mixed by weight", default=())
    prompt_key: str = option("field that holds the prompt: a string, or a list of messages", default="prompt")
    answer_key: str = option("field that holds the answer; may be missing", default="answer")
    chat: bool = option("wrap string prompts as a user message in the tokenizer's chat template", default=False)
    system: str = option("the system message of chats that have none", default="")
    tools_key: str = option(
        "field that holds a chat's tools for the chat template, as in OpenAI's `tools`; may be missing; empty: none",
        default="tools",
    )
    chat_template_options: Mapping[str, Any] = option(
        "arguments of the tokenizer's own chat template, such as {enable_thinking = false}", factory=dict
    )
    refused: Literal["fail", "skip"] = option(
        "rows that cannot be shown to the model, such as those with pictures, without a prompt, or with a chat that "
        "the chat template refuses; fail: an error names the first one; skip: they are left out and counted",
        default="fail",
    )
    ignore: tuple[str, ...] = option(
        "fields that the model need not be shown, such as pictures that only the reward reads; rows that have them are "
        "not refused",
        default=(),
    )
    held_out: int = option(
        "prompts of each source held out for evaluation and never trained on", default=256, validator=at_least(0)
    )
    restart: bool = option(
        "on resume with other rows than the checkpoint's (not only more): start at their first prompt, while "
        "weights, optimizer and step continue; unset, that is an error",
        default=False,
    )


@frozen(kw_only=True)
class RewardFunction:
    """One of several reward functions, whose weighted sum is the reward."""

    name: str = option("a built-in reward, or 'module:function'")
    label: str = option("its name in metrics; empty uses the function's name", default="")
    weight: float = option("factor of its value in the reward", default=1.0, validator=finite)
    options: Mapping[str, Any] = option("keyword arguments of the function", factory=dict)
    weights: Mapping[str, float] = option(
        "if it returns several values by name: the weight of each in its sum; empty: 1 each",
        factory=dict,
        validator=finite_values,
    )


@frozen(kw_only=True)
class RewardConfig:
    """How samples are scored."""

    name: str = option("a built-in reward, or 'module:function'", default="position-match")
    options: Mapping[str, Any] = option("keyword arguments of the reward function", factory=dict)
    weights: Mapping[str, float] = option(
        "if the function returns several values by name: the weight of each in the reward, their sum; empty: 1 each",
        factory=dict,
        validator=finite_values,
    )
    functions: tuple[RewardFunction, ...] = option(
        "alternative to name: several functions, whose weighted sum is the reward", default=()
    )
    special_tokens: bool = option(
        "keep special tokens in the text that is scored, such as a <think> that the tokenizer declares special; the "
        "token that ended the sample is always left out",
        default=False,
    )
    processes: int = option(
        "processes that score samples in parallel; 0 scores them in the driver, without a time limit",
        default=2,
        validator=between(0, 1024),
    )
    timeout: float = option("time limit for one sample, in seconds", default=30.0, validator=[above(0), finite])
    failed_value: float = option(
        "reward of a sample whose reward function raises, returns no finite number, times out or ends its process",
        default=0.0,
        validator=between(-1e9, 1e9),
    )


@frozen(kw_only=True)
class RolloutConfig:
    """How prompts become samples."""

    engine: str = option("an installed rollout engine", default="transformers")
    sampler: str = option(
        "an installed sampler, which turns prompts into samples; prompts: each sample is one response",
        default="prompts",
    )
    replicas: int = option("number of engines; they share the prompts", default=1, validator=between(1, MOST))
    restarts: int = option(
        "restarts in a row, without a completed step, of an engine that died, failed or was killed by Ray for lack"
        " of memory",
        default=3,
        validator=at_least(0),
    )
    prompts: int = option("prompts per rollout step", default=64, validator=between(1, MOST_SAMPLES))
    samples: int = option("samples per prompt (the group size)", default=8, validator=between(1, MOST_SAMPLES))
    temperature: float = option("sampling temperature; divides the logits", default=1.0, validator=[above(0), finite])
    top_p: float = option(
        "sample only from the likeliest tokens that together have this probability", default=1.0, validator=share
    )
    top_k: int = option(
        "sample only from so many of the likeliest tokens, or from those of top_p where these are fewer; 0: from all",
        default=0,
        validator=zero_or_several,
    )
    max_tokens: int = option(
        "maximum new tokens per sample, in an episode all tokens of a conversation after its first request; a sample "
        "cut off there is marked truncated",
        default=256,
        validator=at_least(1),
    )
    context_length: int = option(
        "maximum tokens of prompt and response together; prompts that leave no room for max_tokens are skipped; 0 "
        "uses the model's max_position_embeddings",
        default=0,
        validator=at_least(0),
    )
    stop: tuple[str, ...] = option(
        "texts that end a sample, besides the end tokens that the tokenizer, config.json and generation_config.json "
        "name; a sample keeps all tokens up to the one that completes the text, and the text is scored without it",
        default=(),
    )
    source: Literal["synchronous", "streamed", "one-step-off", "asynchronous"] = option(
        "when engines sample; synchronous: while nothing trains; streamed: the same samples, but training begins with "
        "the prompts that are scored while others are sampled; one-step-off: each batch while the previous one "
        "trains; asynchronous: all the time, paused for weight updates and continued with the new weights",
        default="synchronous",
        needs="run.mode=train|eval",
    )
    max_staleness: int = option(
        "asynchronous: weight updates by which a sample's oldest token may lag behind the trainer; older samples are "
        "dropped and their prompts resampled",
        default=1,
        validator=at_least(1),
        needs="rollout.source=asynchronous",
    )
    postprocess: str = option(
        "'module:function' that maps a scored batch to another before advantages are computed",
        default="",
        needs="!rollout.source=streamed",
    )
    save: bool = option("save every batch under run.dir/rollouts; rollout-only always does", default=False)
    saved: str = option(
        "train-only: directory of saved batches to train from",
        default="",
        needs="run.mode=train-only",
    )


@frozen(kw_only=True)
class WeightsConfig:
    """How weights get from the trainer to the engines."""

    transport: str = option(
        "how weights reach engines: an installed transport, such as ipc and collective, or disk and delta of "
        "corerl[delta]; auto uses ipc if every engine is on a rank's device, else collective",
        default="auto",
    )
    every: int = option(
        "rollout steps between weight updates; engines sample from weights up to this many steps old",
        default=1,
        validator=at_least(1),
        needs="rollout.source=synchronous|streamed",
    )
    bucket_bytes: int = option(
        "bytes of weights sent at once; each rank allocates twice this. 0 uses a sixteenth of the weights, between "
        "256 MiB and 1 GiB",
        default=0,
        validator=at_least(0),
    )
    dtype: Precision | Literal["model"] = option(
        "precision in which weights are sent; model uses train.precision", default="model"
    )
    quantize: Literal["none", "fp8"] = option(
        "fp8 sends layer matrices in 8 bits with a float32 scale per 128 x 128 block, to an engine that computes in "
        "fp8",
        default="none",
    )
    lora: Literal["merged", "adapter"] = option(
        "how the actor's adapters reach engines; merged: added to the weights before these are sent: full sampling"
        " speed, full updates; adapter: sent separately to engines that apply them: merged weights are not "
        "rounded, and updates are small, except to engines that are new or have slept",
        default="merged",
        needs={"adapter": ("lora", "!weights.quantize")},
    )
    versions: int = option(
        "versions of the actor's adapters that engines hold at once, the newest, each to be sampled from by its number "
        "(GenerateRequest.version); for loops of one's own, as runs sample from the newest",
        default=1,
        validator=at_least(1),
        needs="weights.lora=adapter",
    )
    unquantized: tuple[str, ...] = option(
        "substrings of the names of weights to leave unquantized, besides embeddings, head, norms and routers; the "
        "engine must leave out the same",
        default=(),
    )
    verify_every: int = option(
        "weight updates between checks that compare what engines hold with what was sent, tensor by tensor, starting "
        "with the first; 0 never checks",
        default=10,
        validator=at_least(0),
    )


@frozen(kw_only=True, slots=False)  # EvalSource has two bases
class EvalSampling:
    """How held-out prompts are sampled, and which answers are right. What a set leaves unset is as in [eval]."""

    samples: int | None = option(
        "samples of each prompt; with several, pass@k and majority@k are reported; unset: 1",
        default=None,
        validator=optional(between(1, MOST_SAMPLES)),
    )
    temperature: float | None = option(
        "sampling temperature, 0 takes the likeliest token; unset: 0 with one sample, with several as in [rollout]",
        default=None,
        validator=[at_least(0), optional(finite)],
    )
    top_p: float | None = option("unset: rollout.top_p", default=None, validator=optional(share))
    top_k: int | None = option("unset: rollout.top_k", default=None, validator=optional(zero_or_several))
    max_tokens: int | None = option(
        "prompts that leave no room for so many tokens are skipped; unset: rollout.max_tokens",
        default=None,
        validator=at_least(1),
    )
    stop: tuple[str, ...] | None = option("unset: rollout.stop", default=None)
    correct_on: str | None = option(
        "the part of the reward that says whether an answer is right, as in algorithm.dynamic_sampling_on; unset: the "
        "reward itself",
        default=None,
    )
    correct_from: float | None = option(
        "its value from which on an answer is right; unset: 1", default=None, validator=optional(finite)
    )
    answer: str | None = option(
        "'module:function' called with (prompt, response) that returns the answer for majority@k, or None if there is "
        "none; unset: the response without surrounding white space",
        default=None,
    )

    def settled(self, common: EvalSampling, rollout: RolloutConfig) -> EvalSampling:
        """These with a value for what is unset: of `common`, or of `rollout`."""
        names = [each.name for each in fields(EvalSampling)]
        given = {name: each for table in (common, self) for name in names if (each := getattr(table, name)) is not None}
        unset = {name: getattr(rollout, name) for name in ("top_p", "top_k", "max_tokens", "stop", "temperature")}
        if given.get("samples", 1) == 1:
            unset["temperature"] = 0.0
        return EvalSampling(**{"samples": 1, **unset, **given})


@frozen(kw_only=True)
class EvalSource(DataSource, EvalSampling):
    """One of several sets of held-out prompts: all that a source has."""

    weight: float = field(default=1.0, init=False)  # nothing is mixed
    reward: RewardConfig | None = option(
        "[reward] settings of this set only, replacing [reward] entirely; unset uses [reward]", default=None
    )
    every: int | None = option("unset: eval.every", default=None, validator=at_least(0))


@frozen(kw_only=True)
class EvalConfig(EvalSampling):
    """Evaluation on held-out prompts."""

    every: int = option(
        "rollout steps between evaluations on held-out prompts; 0 disables them", default=25, validator=at_least(0)
    )
    at_start: bool = option("also evaluate before the first step", default=True)
    sets: tuple[EvalSource, ...] = option("further sets of held-out prompts, besides data.held_out", default=())

    @property
    def tables(self) -> dict[str, EvalSampling]:
        """The settings of `data.held_out` and of each set, by path in the config."""
        return {"eval": self, **{f"eval.sets[{number}]": each for number, each in enumerate(self.sets)}}


@frozen(kw_only=True)
class CheckpointConfig:
    """Saving, resuming and exporting."""

    every: int = option("rollout steps between checkpoints; 0 saves only at the end", default=50, validator=at_least(0))
    keep: int = option(
        "number of complete checkpoints to keep, the newest; 0 keeps all", default=2, validator=at_least(0)
    )
    background: bool = option("write checkpoints while training continues", default=True)
    resume: str = option(
        "never, auto (the newest complete checkpoint in run.dir), or the path of a checkpoint or of another run, of "
        "which it is the newest",
        default="never",
    )
    memory: bool = option(
        "in-memory checkpoint (/dev/shm) after each step that is a multiple of weights.every and "
        "algorithm.reference_every, used to restart failed ranks (train.restarts) and to resize; needs three times a "
        "checkpoint's size, and ends with the run",
        default=False,
        needs="!cluster.address",
    )
    export: bool = option("export a Hugging Face model directory at the end", default=True)


@frozen(kw_only=True)
class ExtensionChoice:
    """An extension and its options."""

    name: str = option("an installed extension")
    options: Mapping[str, Any] = option("the extension's own settings", factory=dict)


@frozen(kw_only=True)
class Config:
    """The complete configuration of a run; also written next to its results, as a file that can be loaded again."""

    run: RunConfig = option("output directory, mode, length and seed", factory=RunConfig)
    cluster: ClusterConfig = option("machines and devices", factory=ClusterConfig)
    model: ModelConfig = option("the model to train", factory=ModelConfig)
    backend: BackendChoice = option("the training backend")
    backends: Mapping[str, Mapping[str, Any]] = option("backend-specific options, one table per backend", factory=dict)
    engines: Mapping[str, Mapping[str, Any]] = option("engine-specific options, one table per engine", factory=dict)
    samplers: Mapping[str, Mapping[str, Any]] = option("sampler-specific options, one table per sampler", factory=dict)
    pictures: Mapping[str, Mapping[str, Any]] = option(
        "options of the readers of pictures, one table per reader", factory=dict
    )
    algorithms: Mapping[str, Mapping[str, Any]] = option(
        "algorithm-specific options, one table per algorithm", factory=dict
    )
    transports: Mapping[str, Mapping[str, Any]] = option(
        "transport-specific options, one table per transport", factory=dict
    )
    roles: RolesConfig = option("groups of workers", factory=RolesConfig)
    train: TrainConfig = option("training settings common to all backends", factory=TrainConfig)
    lora: LoraConfig | None = option(
        "train low-rank adapters of the actor in place of its weights; unset trains all weights", default=None
    )
    algorithm: AlgorithmConfig = option("what all algorithms share", factory=AlgorithmConfig)
    data: DataConfig = option("prompts", factory=DataConfig)
    reward: RewardConfig = option("scoring of samples", factory=RewardConfig)
    rollout: RolloutConfig = option("sampling", factory=RolloutConfig)
    weights: WeightsConfig = option("weight updates from trainer to engines", factory=WeightsConfig)
    eval: EvalConfig = option("evaluation on held-out prompts", factory=EvalConfig)
    checkpoint: CheckpointConfig = option("saving and resuming", factory=CheckpointConfig)
    extensions: tuple[ExtensionChoice, ...] | None = option(
        "observers and wrappers in order, the first outermost; unset: those installed that join by default",
        default=None,
    )

    @property
    def chosen_roles(self) -> dict[str, RoleChoice]:
        """The roles of this run by name, the actor first; others only if the run trains."""
        return {"actor": self.roles.actor, **(self.roles.other_roles if self.run.trains else {})}

    @property
    def chosen_extensions(self) -> tuple[ExtensionChoice, ...]:
        """Those that are listed; a plan's config lists also those that join by themselves."""
        return self.extensions or ()

    @property
    def own_devices(self) -> tuple[str, ...]:
        """The roles that have their own devices."""
        return tuple(
            name
            for name, choice in self.chosen_roles.items()
            if isinstance(choice, SideRoleChoice) and choice.devices == "own"
        )

    def train_of(self, role: str) -> TrainConfig:
        """The training settings of `role`: its own table if it has one, else the common one."""
        return self.chosen_roles[role].train or self.train

    def train_table_of(self, role: str) -> str:
        """The path of `train_of(role)` in the config, for messages."""
        return "train" if self.chosen_roles[role].train is None else f"roles.{role}.train"

    def lora_of(self, role: str) -> LoraConfig | None:
        """The adapters that `role` trains; None if it trains its weights, or nothing."""
        choice = self.chosen_roles[role]
        return choice.lora if isinstance(choice, SideRoleChoice) else self.lora

    def lora_table_of(self, role: str) -> str:
        """The path of `lora_of(role)` in the config, for messages."""
        return f"roles.{role}.lora" if isinstance(self.chosen_roles[role], SideRoleChoice) else "lora"

    def model_of(self, role: str) -> ModelConfig:
        """The model that `role` starts from."""
        own = self.roles.own_models.get(role)
        return self.model if own is None else evolve(own, pictures=self.model.pictures)

    def model_table_of(self, role: str) -> str:
        """The path of `model_of(role)` in the config, for messages."""
        return f"roles.{role}.model" if role in self.roles.own_models else "model"


@frozen(kw_only=True)
class RoleConfig:
    """The parts of a run's config that one role's backend needs. Crosses Ray as plain data."""

    model: ModelConfig
    train: TrainConfig
    options: Any  # the backend's own config class
    weights: WeightsConfig
    device: str  # cpu or cuda
    seed: int
    timeout: float  # seconds of one collective
    value_head: bool = False  # the model is a critic: a value head replaces its language-model head
    # Trained in place of the weights, which stay in train.precision, without masters, gradients and moments.
    lora: LoraConfig | None = None
    frozen: bool = False  # only `forward` is called: weights in train.precision, and nothing that an optimizer needs
    resume: str = ""  # directory of this role's part of a checkpoint; empty starts from the model
    resume_moments: bool = True  # False: of the checkpoint the weights alone, with which a new optimizer begins
    sleeps: tuple[MemoryKind, ...] = ()  # what the run puts to sleep: host memory is reserved at the start


@frozen(kw_only=True)
class ClusterInfo:
    """What a spec's pure functions can know about a run, besides the plugin's own options. For an engine, `ranks` is
    its number of replicas; the other fields are the actor's, for engines and extensions."""

    device: str  # cpu or cuda
    ranks: int  # number of ranks of the role
    # Fields of the Hugging Face config as plain data; empty if no model is known yet: then do not check the model.
    model: Mapping[str, Any] = field(factory=dict)
    train: TrainConfig | None = None  # the role's training settings; None if no run is known
    weights: WeightsConfig | None = None  # for an engine, how its weights travel; None if no run is known
    frozen: bool = False  # the role is never trained: weights are in `train.precision`
    lora: LoraConfig | None = None  # the role trains adapters alone: the weights are in `train.precision`
    streamed: bool = False  # gradients of a step come in several calls of `forward_backward`, and get a scale
    elsewhere: bool = False  # ranks run on machines of a cluster, which may have other libraries than this one
