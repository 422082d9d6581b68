"""What an algorithm is on the driver: columns computed from a batch, the passes they need, and each role's loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

from attrs import field, frozen

from corerl.config.options import at_least, between, option
from corerl.plugin.spec import ACTOR
from corerl.types import FloatArray, LossSpec, Output, SampleBatch

REFERENCE = "reference"  # the policy that KL is measured against; a role of that name, or else the actor's snapshot


@frozen(kw_only=True, eq=False)
class ForwardPass:
    """One forward pass of all samples through a role's model, without gradients."""

    role: str
    columns: Mapping[str, Output]  # column -> the output that fills it
    snapshot: str = ""  # REFERENCE, of the actor; "" for the weights as they are
    replay: bool = False  # route through the experts in the column `routed_experts`


@frozen(kw_only=True)
class Advantages:
    """What an algorithm computes from a batch."""

    advantages: FloatArray  # [N] at loss tokens; 0 elsewhere
    columns: Mapping[str, FloatArray] = field(factory=dict)  # what else losses read, each [N]: a critic's returns
    metrics: Mapping[str, float] = field(factory=dict)


# (samples, rewards [B], rewards of tokens [N]) -> advantages, as `Algorithm.advantages`
Estimate: TypeAlias = Callable[[SampleBatch, FloatArray, FloatArray], Advantages]
Postprocess: TypeAlias = Callable[[SampleBatch], SampleBatch]


@frozen(kw_only=True)
class Objective:
    """How a role is trained."""

    # The actor's gets the entropy bonus and the KL penalty of [algorithm] as parameters besides its own.
    loss: LossSpec
    aggregation: str = ""  # how its tokens are weighted; "" as `algorithm.aggregation` says
    trained_from: int = 0  # the rollout step in which its training starts


class Algorithm(ABC):
    """An algorithm on the driver, constructed with its options: an instance of its spec's config class.

    What all algorithms share is done elsewhere: the overlong penalty, the KL in reward or loss, the entropy
    bonus, and weights that correct for another engine are applied before and after, as `[algorithm]` says.
    """

    def __init__(self, options: Any) -> None:
        self.options = options

    def forwards(self) -> Sequence[ForwardPass]:
        """The forward passes whose columns `advantages` reads, besides `old_logprobs`."""
        return ()

    @abstractmethod
    def advantages(self, samples: SampleBatch, rewards: FloatArray, token_rewards: FloatArray) -> Advantages:
        """The advantages of B samples with N tokens, from their `rewards` [B] and the rewards of single tokens [N]: the
        penalty if `algorithm.kl_in` is 'reward', and if the spec says `credits_turns`, those of an episode's turns,
        which are then not in `rewards`. Group numbers are `samples.row_columns["group"]`."""

    @abstractmethod
    def objectives(self) -> Mapping[str, Objective]:
        """How each role of the spec is trained."""


@frozen(kw_only=True)
class Clip:
    """Options of algorithms with PPO's clipped loss."""

    clip_low: float = option("the ratio is clipped below 1 - clip_low", default=0.2, validator=between(0, 1))
    clip_high: float = option("the ratio is clipped above 1 + clip_high", default=0.2, validator=at_least(0))


class ActorOnly(Algorithm):
    """Trains the actor alone, with a loss whose parameters `clip_low` and `clip_high` are options."""

    options: Clip

    loss: ClassVar[str] = "clipped"

    def objectives(self) -> Mapping[str, Objective]:
        clip = {"clip_low": self.options.clip_low, "clip_high": self.options.clip_high}
        return {ACTOR: Objective(loss=LossSpec(name=self.loss, params=clip))}
