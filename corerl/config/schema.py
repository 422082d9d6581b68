"""The whole configuration of a run, one frozen class for each table of the TOML file.

Every field has help text, which `corerl config` prints; a field without a default is required. The largest tables are
in `algorithm`, `sampling` and `training`. Options of a single plugin are in `backends.NAME`, `engines.NAME`,
`algorithms.NAME` or `transports.NAME`, as its own class.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from attrs import evolve, field, frozen

from corerl.config.algorithm import KL_ESTIMATOR as KL_ESTIMATOR
from corerl.config.algorithm import AlgorithmConfig as AlgorithmConfig
from corerl.config.options import MOST, above, at_least, between, custom_resources, filled, finite, option, variables
from corerl.config.sampling import MOST_SAMPLES as MOST_SAMPLES
from corerl.config.sampling import DataConfig as DataConfig
from corerl.config.sampling import DataSource as DataSource
from corerl.config.sampling import EvalConfig as EvalConfig
from corerl.config.sampling import EvalSampling as EvalSampling
from corerl.config.sampling import EvalSource as EvalSource
from corerl.config.sampling import RewardConfig as RewardConfig
from corerl.config.sampling import RewardFunction as RewardFunction
from corerl.config.sampling import RolloutConfig as RolloutConfig
from corerl.config.training import ALL_LINEAR as ALL_LINEAR
from corerl.config.training import EXPERTS as EXPERTS
from corerl.config.training import LoraConfig as LoraConfig
from corerl.config.training import ModelConfig as ModelConfig
from corerl.config.training import OptimizerConfig as OptimizerConfig
from corerl.config.training import Precision as Precision
from corerl.config.training import ScheduleConfig as ScheduleConfig
from corerl.config.training import TrainConfig as TrainConfig
from corerl.kinds import MemoryKind

Device = Literal["auto", "cpu", "cuda"]


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

    devices: Literal["colocated", "own"] = option(
        "colocated: the role runs on the actor's devices and shares their memory; own: it has devices of its own",
        default="colocated",
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
