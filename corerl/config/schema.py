"""The whole configuration of a run, one frozen class for each table of the TOML file.

Every field has help text, which `corerl config` prints; a field without a default is required.
Options of a single backend or engine are in `backends.NAME` and `engines.NAME`, as the plugin's own class.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

from attrs import Attribute, field, frozen

Device = Literal["auto", "cpu", "cuda"]
Precision = Literal["float32", "bfloat16", "float16"]


def option(help: str, **kwargs: Any) -> Any:  # noqa: A002  -- the word that the user reads
    """An attrs field with help text."""
    return field(metadata={"help": help}, **kwargs)


def at_least(bound: float) -> Callable[[Any, Attribute[Any], Any], None]:
    def check(_: Any, attribute: Attribute[Any], value: Any) -> None:
        if value is not None and value < bound:
            raise ValueError(f"must be at least {bound}, got {value!r}")

    return check


def above(bound: float) -> Callable[[Any, Attribute[Any], Any], None]:
    def check(_: Any, attribute: Attribute[Any], value: Any) -> None:
        if value is not None and value <= bound:
            raise ValueError(f"must be above {bound}, got {value!r}")

    return check


def filled(_: Any, attribute: Attribute[Any], value: str) -> None:
    if not value:
        raise ValueError("must not be empty")


def finite(_: Any, attribute: Attribute[Any], value: Any) -> None:
    if math.isinf(value):
        raise ValueError(f"must be finite, got {value!r}")


def between(low: float, high: float) -> Callable[[Any, Attribute[Any], Any], None]:
    def check(_: Any, attribute: Attribute[Any], value: Any) -> None:
        if not low <= value <= high:
            raise ValueError(f"must lie between {low} and {high}, got {value!r}")

    return check


def share(_: Any, attribute: Attribute[Any], value: Any) -> None:
    if not 0 < value <= 1:
        raise ValueError(f"must be above 0 and at most 1, got {value!r}")


def decays(_: Any, attribute: Attribute[Any], value: Any) -> None:
    if not all(0 <= beta < 1 for beta in value):
        raise ValueError(f"must each be at least 0 and below 1, got {list(value)}")


def custom_resources(_: Any, attribute: Attribute[Any], value: Mapping[str, float]) -> None:
    for name, amount in value.items():
        if name in ("CPU", "GPU", "memory", "object_store_memory"):
            raise ValueError(f"must be custom resources of Ray, got {name!r}, which CoreRL reckons itself")
        if not 0 < amount < math.inf:
            raise ValueError(f"must be finite amounts above 0, got {amount!r} of {name!r}")


def variables(_: Any, attribute: Attribute[Any], value: Mapping[str, str]) -> None:
    for name, text in value.items():
        if not name or "=" in name or "\0" in name:
            raise ValueError(f"must be environment variables, got {name!r} = {text!r}")


@frozen(kw_only=True)
class RunConfig:
    dir: str = option(
        "where everything the run writes goes; one directory a run", default="runs/default", validator=filled
    )
    mode: Literal["train", "rollout-only", "train-only", "eval"] = option(
        "train; or only sample, and save the batches; or only train, from batches that were saved, without engines; "
        "or only score the held-out prompts",
        default="train",
    )
    steps: int = option("rollout steps to train for", default=250, validator=at_least(0))
    seed: int = option(
        "seeds prompts' order, sampling noise and random weights", default=0, validator=between(0, 2**63 - 1)
    )

    @property
    def trains(self) -> bool:
        return self.mode in ("train", "train-only")

    @property
    def samples(self) -> bool:
        """Whether the run has engines."""
        return self.mode != "train-only"


@frozen(kw_only=True)
class ClusterConfig:
    address: str = option("of a running Ray cluster; empty starts one on this machine", default="")
    device: Device = option(
        "what ranks and engines run on; auto takes cuda where the driver's machine has one, also with an address",
        default="auto",
    )
    placement: Literal["colocated", "disaggregated"] = option(
        "colocated: engines share the ranks' devices and take turns; disaggregated: engines have their own",
        default="colocated",
    )
    offload: Literal["auto", "always", "never"] = option(
        "whether ranks that share a device with engines sleep while these sample; auto: on cuda", default="auto"
    )
    max_residual_gib: float = option(
        "device memory that a rank may still hold while all of it sleeps, its CUDA context included; more ends the run "
        "and says what holds it. Where the driver does not tell processes apart (some containers) the engines on the "
        "device count too; 0 is no bound",
        default=0.0,
        validator=at_least(0),
    )
    suspend_communicators: bool = option(
        "give the device memory of NCCL's communicators back too while all of a rank sleeps, with torch 2.12 and NCCL "
        "2.29.7 or later; with older ones the run says once that it stays. Not tried on GPUs yet",
        default=False,
    )
    timeout: float = option(
        "seconds that ranks wait for each other in one collective before they fail",
        default=600.0,
        validator=[above(0), finite],
    )
    watchdog: float = option(
        "seconds after which the user is told which ranks a call still waits for, and where they are; 0 never",
        default=60.0,
        validator=[at_least(0), finite],
    )
    resources: Mapping[str, float] = option(
        "custom resources of Ray that each bundle asks of a node besides CPUs and GPUs, such as {h200 = 1}",
        factory=dict,
        validator=custom_resources,
    )
    environment: Mapping[str, str] = option(
        "environment variables that every rank and engine is given before it starts",
        factory=dict,
        validator=variables,
    )


@frozen(kw_only=True)
class ModelConfig:
    path: str = option("a Hugging Face model directory: config.json, safetensors, tokenizer", default="")
    config: Mapping[str, Any] = option(
        "instead of a path: fields of a Hugging Face config (model_type first); weights start random", factory=dict
    )
    tokenizer: str = option(
        "a tokenizer directory, or 'characters:ABC' for one token a character; empty takes the one in path", default=""
    )


@frozen(kw_only=True)
class OptimizerConfig:
    """AdamW (Loshchilov & Hutter 2019, "Decoupled Weight Decay Regularization")."""

    lr: float = option("peak learning rate", default=1e-6, validator=[at_least(0), finite])
    betas: tuple[float, float] = option("decay of the two moments", default=(0.9, 0.95), validator=decays)
    eps: float = option("added to the root of the second moment", default=1e-8, validator=[above(0), finite])
    weight_decay: float = option(
        "decoupled decay of matrices; never of norms and biases", default=0.0, validator=[at_least(0), finite]
    )
    clip_norm: float = option("global gradient norm to clip to; 0 does not clip", default=1.0, validator=at_least(0))


@frozen(kw_only=True)
class ScheduleConfig:
    warmup_steps: int = option("optimizer steps of linear warm-up from 0", default=0, validator=at_least(0))
    decay: Literal["constant", "linear", "cosine"] = option("shape after the warm-up", default="constant")
    final_ratio: float = option(
        "share of the peak that is left at the last optimizer step", default=0.1, validator=between(0, 1)
    )


@frozen(kw_only=True)
class TrainConfig:
    mini_batches: int = option("optimizer steps that one rollout batch is split into", default=1, validator=at_least(1))
    epochs: int = option("times that one rollout batch is gone through", default=1, validator=at_least(1))
    tokens_per_micro_batch: int = option(
        "packed tokens that one dp rank passes through the model at once", default=16384, validator=at_least(1)
    )
    precision: Precision = option(
        "of the forward and backward pass; weights and moments are kept in float32. float16 comes with a loss scale, "
        "and loses a step now and then to find it",
        default="float32",
    )
    recompute: Literal["none", "full"] = option(
        "activations that are not kept for the backward pass, but computed again in it: full, those inside of each "
        "decoder layer",
        default="none",
    )
    optimizer: OptimizerConfig = option("AdamW", factory=OptimizerConfig)
    schedule: ScheduleConfig = option("learning rate over optimizer steps", factory=ScheduleConfig)


@frozen(kw_only=True)
class BackendChoice:
    name: str = option("an installed training backend, 'distribution:name', or 'package.module:SPEC'")


@frozen(kw_only=True)
class RoleChoice:
    ranks: int = option("worker processes of this role, one a device", default=1, validator=at_least(1))
    backend: str = option("a backend for this role alone; empty takes backend.name", default="")
    options: Mapping[str, Any] | None = option(
        "a table of the backend's own options for this role alone, whole; unset takes [backends.NAME]", default=None
    )
    train: TrainConfig | None = option("a [train] for this role alone, whole", default=None)


@frozen(kw_only=True)
class CriticChoice(RoleChoice):
    devices: Literal["shared", "own"] = option(
        "shared: the actor's devices, and their memory too; own: devices that only the critic is on", default="shared"
    )
    model: ModelConfig | None = option(
        "a [model] for the critic alone, whole, but for the tokenizer; unset takes the actor's, with a value head",
        default=None,
    )


@frozen(kw_only=True)
class RolesConfig:
    actor: RoleChoice = option("the policy that is trained", factory=RoleChoice)
    critic: CriticChoice | None = option("the value function, which algorithm.name = 'ppo' wants", default=None)


@frozen(kw_only=True)
class CriticConfig:
    """Generalized advantage estimation (Schulman et al. 2016) and the critic's loss, for algorithm.name = 'ppo'."""

    gamma: float = option("discount of a token's reward for each token before it", default=1.0, validator=between(0, 1))
    gae_lambda: float = option(
        "1 compares whole returns with values; lower trusts the values more", default=1.0, validator=between(0, 1)
    )
    whiten: bool = option("advantages of a rollout batch to mean 0 and standard deviation 1", default=True)
    value_clip: float = option(
        "a value counts as moved by no more than this from the one before the update; 0 does not clip",
        default=0.2,
        validator=at_least(0),
    )
    warmup_steps: int = option(
        "rollout steps at the start in which the critic alone is trained", default=0, validator=at_least(0)
    )


@frozen(kw_only=True)
class AlgorithmConfig:
    """The settings that lead from rewards to the policy's loss."""

    name: Literal["grpo", "ppo"] = option(
        'how rewards become advantages: grpo compares the samples of a prompt (Shao et al. 2024, "DeepSeekMath"), '
        "ppo asks a critic (Schulman et al. 2017)",
        default="grpo",
    )
    normalize_std: bool = option(
        "grpo: divide a group's centred rewards by their standard deviation; false is Dr.GRPO", default=True
    )
    critic: CriticConfig = option("ppo: what is asked of the critic", factory=CriticConfig)
    loss: str = option("the policy loss: a registered name, or 'module:function'", default="clipped")
    clip_low: float = option("the ratio is clipped below 1 - clip_low", default=0.2, validator=between(0, 1))
    clip_high: float = option("the ratio is clipped above 1 + clip_high", default=0.2, validator=at_least(0))
    entropy_coef: float = option("weight of the entropy bonus", default=0.0, validator=[at_least(0), finite])
    kl_coef: float = option(
        "weight of the KL penalty to the reference policy; 0 keeps none", default=0.0, validator=[at_least(0), finite]
    )
    kl_estimator: Literal["k1", "k2", "k3"] = option("of the KL (Schulman 2020)", default="k3")
    kl_in: Literal["loss", "reward"] = option(
        "where the KL penalty goes: into the loss, or off each token's reward", default="loss"
    )
    kl_target: float = option(
        "the KL per token that kl_coef is adapted towards (Ziegler et al. 2019); 0 leaves it as it is",
        default=0.0,
        validator=[at_least(0), finite],
    )
    kl_horizon: int = option(
        "samples in which an adapted kl_coef can change by a fifth", default=10_000, validator=at_least(1)
    )
    aggregation: Literal["token-mean", "sequence-mean", "constant-length"] = option(
        "what one token weighs in a step: equal tokens, equal sequences, or 1 / rollout.max_tokens (Dr.GRPO)",
        default="token-mean",
    )
    old_logprobs: Literal["rollout", "recompute"] = option(
        "the ratio's denominator: the engine's log-probs, or the trainer's own before the first step", default="rollout"
    )
    correction: Literal["none", "token", "sequence"] = option(
        "importance weights for the engine's log-probs against the trainer's, per token or per sample, truncated at "
        "correction_cap (Yao et al. 2025; Liu et al. 2025); wants old_logprobs = 'recompute'",
        default="none",
    )
    correction_cap: float = option("the largest importance weight", default=2.0, validator=above(0))
    routing_replay: Literal["none", "recompute", "engine"] = option(
        "a model of experts, and which experts each token is trained through: those that its routers choose by now; "
        "recompute: those that they chose when old_logprobs were recomputed (R2); engine: those that the engine chose "
        'as it sampled (R3). Ma et al. 2025, "Stabilizing MoE Reinforcement Learning by Aligning Training and '
        'Inference Routers"; Zheng et al. 2025, "Stabilizing Reinforcement Learning with LLMs"',
        default="none",
    )
    dynamic_sampling: int = option(
        "times at most that groups whose rewards are all equal are dropped and other prompts sampled in their place "
        '(Yu et al. 2025, "DAPO"); 0 keeps them',
        default=0,
        validator=at_least(0),
    )
    overlong: Literal["keep", "mask", "penalty"] = option(
        "samples that reach, or come near, rollout.max_tokens: train on them as they are, leave out those that were "
        "cut off, or take up to 1 off their reward over the last overlong_buffer tokens (DAPO)",
        default="keep",
    )
    overlong_buffer: int = option(
        "tokens before rollout.max_tokens in which the penalty grows from 0 to 1", default=0, validator=at_least(0)
    )


@frozen(kw_only=True)
class DataSource:
    """One of several sources of prompts."""

    source: str = option("as data.source")
    name: str = option("what `Prompt.source` and metrics call it; empty takes the file's name", default="")
    weight: float = option(
        "its share of the prompts, relative to the others'", default=1.0, validator=[above(0), finite]
    )
    prompt_key: str = option("empty takes data.prompt_key", default="")
    answer_key: str = option("empty takes data.answer_key", default="")


@frozen(kw_only=True)
class DataConfig:
    source: str = option(
        "a generated task (sort-digits), a .jsonl or .parquet file, a directory of .parquet files, or one that the "
        "`datasets` library saved",
        default="sort-digits",
    )
    sources: tuple[DataSource, ...] = option("instead of source: several, mixed by weight", default=())
    prompt_key: str = option("the field that holds the prompt: a text, or a list of messages", default="prompt")
    answer_key: str = option("the field that holds the answer; missing is allowed", default="answer")
    chat: bool = option("make a text prompt the user's message in the tokenizer's chat template", default=False)
    system: str = option("with chat: what begins a chat that has no system message of its own", default="")
    held_out: int = option(
        "prompts, of each source, kept for evaluation and never trained on", default=256, validator=at_least(0)
    )


@frozen(kw_only=True)
class RewardConfig:
    name: str = option("a built-in reward, or 'module:function'", default="position-match")
    options: Mapping[str, Any] = option("keyword arguments of the reward function", factory=dict)
    processes: int = option(
        "in which samples are scored side by side; 0 scores them in the driver, without a time limit",
        default=2,
        validator=at_least(0),
    )
    timeout: float = option("seconds for one sample", default=30.0, validator=[above(0), finite])
    failed_value: float = option(
        "the reward of a sample whose own raises, is no finite number, takes too long or ends its process",
        default=0.0,
        validator=between(-1e9, 1e9),
    )


@frozen(kw_only=True)
class EpisodesConfig:
    """How `rollout.function` is called."""

    options: Mapping[str, Any] = option("keyword arguments of the function", factory=dict)
    concurrency: int = option(
        "episodes that are played side by side; each takes two threads and two open files of the driver",
        default=256,
        validator=at_least(1),
    )
    tool_calls: Literal["auto", "hermes", "llama-json", "none"] = option(
        "how the policy writes calls of a request's tools, to be read out of its answers: hermes as Qwen 2.5 and 3 do, "
        "llama-json as Llama 3.1; auto: as the chat template teaches; none: they stay text",
        default="auto",
    )
    timeout: float = option(
        "seconds for one episode; one that takes longer gets reward.failed_value",
        default=600.0,
        validator=[above(0), finite],
    )


@frozen(kw_only=True)
class RolloutConfig:
    engine: str = option("an installed rollout engine", default="transformers")
    replicas: int = option("engines that share the prompts", default=1, validator=at_least(1))
    restarts: int = option(
        "times in a row, without a step completed in between, that an engine which died or failed is started anew",
        default=3,
        validator=at_least(0),
    )
    prompts: int = option("prompts of one rollout step", default=64, validator=at_least(1))
    samples: int = option("samples drawn for each prompt: a group", default=8, validator=at_least(1))
    temperature: float = option("divides the logits", default=1.0, validator=[above(0), finite])
    top_p: float = option("keep the likeliest tokens that hold this share of probability", default=1.0, validator=share)
    max_tokens: int = option(
        "new tokens at most, of an episode all that follow its first request; a sample cut there is marked truncated",
        default=256,
        validator=at_least(1),
    )
    context_length: int = option(
        "tokens of a prompt and its response at most: prompts that leave no room for max_tokens are left out; 0 takes "
        "the model's max_position_embeddings",
        default=0,
        validator=at_least(0),
    )
    stop: tuple[str, ...] = option(
        "tokens that end a sample, besides those of the tokenizer and of the model's generation_config.json; the text "
        "that is scored is without it",
        default=(),
    )
    function: str = option(
        "'module:function' that plays each sample as an episode: it asks the policy over several turns, with tools "
        "between them, at an OpenAI-compatible base URL; empty: a sample is one response",
        default="",
    )
    episodes: EpisodesConfig = option("how function is called", factory=EpisodesConfig)
    source: Literal["synchronous", "one-step-off", "asynchronous"] = option(
        "when engines sample: while nothing is trained; or each batch while the one before it is trained on; or all "
        "the time, interrupted by weight updates and continued with the new weights",
        default="synchronous",
    )
    max_staleness: int = option(
        "asynchronous: weight updates that a sample's oldest token may be behind what is trained; older samples are "
        "dropped, and their prompts drawn again",
        default=1,
        validator=at_least(1),
    )
    postprocess: str = option(
        "'module:function' from one scored batch to another, called before advantages are made of it", default=""
    )
    save: bool = option("keep every batch under run.dir/rollouts; rollout-only always does", default=False)
    saved: str = option("train-only: the directory of batches to train from", default="")


@frozen(kw_only=True)
class WeightsConfig:
    transport: str = option(
        "how weights reach engines: ipc, collective, disk or delta; auto takes ipc where every engine is on a rank's "
        "device, else collective. delta writes to disk what has changed, and keeps a copy of the weights in host "
        "memory on the first rank and at each of the engines' receivers",
        default="auto",
    )
    every: int = option(
        "rollout steps between updates; engines sample from weights that are up to this much older",
        default=1,
        validator=at_least(1),
    )
    bucket_bytes: int = option(
        "weights sent at once, for which each rank takes memory twice; 0 is a sixteenth of all, from 256 MiB to 1 GiB",
        default=0,
        validator=at_least(0),
    )
    dtype: Precision | Literal["model"] = option("sent as; model takes train.precision", default="model")
    quantize: Literal["none", "fp8"] = option(
        "fp8 sends the matrices of layers in 8 bits with a float32 scale for each block of 128 x 128, to an engine "
        "that computes in them",
        default="none",
    )
    unquantized: tuple[str, ...] = option(
        "parts of names of weights that are not quantised, besides embeddings, head, norms and routers; the engine "
        "must leave out the same",
        default=(),
    )
    verify_every: int = option(
        "updates from one to the next after which what engines hold is compared with what was sent, tensor by tensor; "
        "the first is one of them; 0 never",
        default=10,
        validator=at_least(0),
    )


@frozen(kw_only=True)
class EvalConfig:
    every: int = option(
        "rollout steps between evaluations on held-out prompts; 0 never", default=25, validator=at_least(0)
    )
    at_start: bool = option("also before the first step", default=True)


@frozen(kw_only=True)
class CheckpointConfig:
    every: int = option("rollout steps between checkpoints; 0 saves only at the end", default=50, validator=at_least(0))
    keep: int = option("complete checkpoints to keep, newest first; 0 keeps all", default=2, validator=at_least(0))
    background: bool = option("write while training goes on", default=True)
    resume: str = option("never, auto (the newest complete one in run.dir), or a checkpoint's path", default="never")
    export: bool = option("write a Hugging Face directory at the end", default=True)


@frozen(kw_only=True)
class ExtensionChoice:
    name: str = option("an installed extension")
    options: Mapping[str, Any] = option("its own settings", factory=dict)


DEFAULT_EXTENSIONS = tuple(ExtensionChoice(name=name) for name in ("console", "jsonl", "tensorboard", "curves"))


@frozen(kw_only=True)
class Config:
    """The complete configuration of a run; also written next to its results, as a file that can be loaded again."""

    run: RunConfig = option("where, how long, which seed", factory=RunConfig)
    cluster: ClusterConfig = option("machines and devices", factory=ClusterConfig)
    model: ModelConfig = option("what is trained", factory=ModelConfig)
    backend: BackendChoice = option("which backend trains")
    backends: Mapping[str, Any] = option("options that only one backend knows, a table each", factory=dict)
    engines: Mapping[str, Any] = option("options that only one engine knows, a table each", factory=dict)
    roles: RolesConfig = option("groups of workers", factory=RolesConfig)
    train: TrainConfig = option("what is common to all backends", factory=TrainConfig)
    algorithm: AlgorithmConfig = option("from rewards to a loss", factory=AlgorithmConfig)
    data: DataConfig = option("prompts", factory=DataConfig)
    reward: RewardConfig = option("what a sample is worth", factory=RewardConfig)
    rollout: RolloutConfig = option("sampling", factory=RolloutConfig)
    weights: WeightsConfig = option("from trainer to engines", factory=WeightsConfig)
    eval: EvalConfig = option("held-out scores", factory=EvalConfig)
    checkpoint: CheckpointConfig = option("saving and resuming", factory=CheckpointConfig)
    extensions: tuple[ExtensionChoice, ...] = option(
        "observers and wrappers, in order: the first is outermost", default=DEFAULT_EXTENSIONS
    )

    @property
    def chosen_roles(self) -> dict[str, RoleChoice]:
        """The roles of this run by name, the actor first; the critic only if the run trains."""
        roles: dict[str, RoleChoice] = {"actor": self.roles.actor}
        if self.roles.critic is not None and self.run.trains:
            roles["critic"] = self.roles.critic
        return roles

    @property
    def apart(self) -> tuple[str, ...]:
        """The roles that have their own devices."""
        return tuple(
            name
            for name, choice in self.chosen_roles.items()
            if isinstance(choice, CriticChoice) and choice.devices == "own"
        )

    def train_of(self, role: str) -> TrainConfig:
        """The training settings of `role`: its own table if it has one, else the common one."""
        return self.chosen_roles[role].train or self.train

    def train_table_of(self, role: str) -> str:
        """The path of `train_of(role)` in the config, for messages."""
        return "train" if self.chosen_roles[role].train is None else f"roles.{role}.train"

    def model_of(self, role: str) -> ModelConfig:
        """The model that `role` starts from."""
        choice = self.chosen_roles[role]
        own = choice.model if isinstance(choice, CriticChoice) else None
        return own or self.model

    def model_table_of(self, role: str) -> str:
        """The path of `model_of(role)` in the config, for messages."""
        return "model" if self.model_of(role) is self.model else f"roles.{role}.model"


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
    resume: str = ""  # directory of this role's part of a checkpoint; empty starts from the model
    sleeps: bool = False  # the run puts it to sleep, so host memory for that is reserved at the start
    max_residual_gib: float = 0.0  # device memory that a rank may hold while it sleeps; 0 is no bound
    suspend_communicators: bool = False  # while all memory kinds sleep


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
