"""Backends with one fault each, and the check that must find it: they prove that the suite can fail.

Each is the plain backend with a few wrong lines. `corerl verify corerl_testing.broken:LEAKS_ON_SLEEP` shows how a fault
is reported: its check fails, and checks that build on it are blocked.
"""

from __future__ import annotations

from attrs import evolve, frozen

from corerl.config import ClusterInfo
from corerl.kinds import MemoryKind, ModelSize
from corerl.plugin import BackendSpec, Capability, RankMemory, Variant
from corerl_testing.plain.spec import SPEC as PLAIN
from corerl_testing.plain.spec import PlainConfig, memory


@frozen(kw_only=True)
class BrokenSpec(BackendSpec):
    """The spec of a backend that is wrong on purpose."""

    seen_by: str  # the check that must fail, and the only one that may


def broken(cls: str, fault: str, *, seen_by: str) -> BrokenSpec:
    """A faulty backend of one process, like the plain backend."""
    return BrokenSpec(
        implementation=f"{__name__}.backends:{cls}",
        config=PlainConfig,
        api=PLAIN.api,
        summary=f"wrong on purpose: {fault}",
        capabilities=PLAIN.capabilities,
        seen_by=seen_by,
    )


def broken_on_several_ranks(cls: str, fault: str, *, seen_by: str) -> BrokenSpec:
    """A faulty backend on any number of ranks, each with the whole model."""
    lacks = dict(PLAIN.capabilities)
    del lacks[Capability.MULTI_RANK]
    return evolve(broken(cls, fault, seen_by=seen_by), capabilities=lacks)


def without_moments(config: PlainConfig, cluster: ClusterInfo, size: ModelSize) -> RankMemory:
    found = memory(config, cluster, size)
    return evolve(found, kinds={kind: count for kind, count in found.kinds.items() if kind is not MemoryKind.OPTIMIZER})


# ---- the contract of hooks -------------------------------------------------------------------------------------------

UNKNOWN_ARGUMENT = broken("UnknownArgument", "a hook demands an argument that core does not pass", seen_by="C06")
DROPS_RESULT = broken("DropsResult", "a step returns nothing", seen_by="C12")
SWALLOWS_ERRORS = broken("SwallowsErrors", "an error in a pass counts as a batch without samples", seen_by="C24")
MUTATES_BATCH = broken("MutatesBatch", "the caller's advantages are whitened in place", seen_by="C16")

# ---- loading, forward and training -----------------------------------------------------------------------------------

LEAVES_A_TENSOR_OUT = broken("LeavesATensorOut", "the last norm is never loaded", seen_by="C11")
LOADS_TWICE = broken("LoadsTwice", "all weights are read a second time, and kept", seen_by="C45")
OFF_BY_ONE_LOGPROBS = broken("OffByOneLogprobs", "log-probs are those of the token before", seen_by="C51")
LEAKS_BETWEEN_LONG_SEQUENCES = broken(
    "LeaksBetweenLongSequences", "from its 29th token on, a sequence sees the one packed before it", seen_by="C51"
)
LEAKS_IN_TRAINING = broken(
    "LeaksInTraining", "in training, from its 29th token on, a sequence sees the one packed before it", seen_by="C15"
)
LEAKS_IN_A_CRITIC = broken(
    "LeaksInACritic", "a critic's sequence sees, from its 29th token on, the one packed before it", seen_by="C52"
)
FORGETS_TEMPERATURE = broken("ForgetsTemperature", "logits are not divided by the temperature", seen_by="C51")
SAMPLES_BACKWARDS = broken("SamplesBackwards", "forward returns its values in the wrong order", seen_by="C51")
LOSES_WEIGHTS_IN_SWAP = broken("LosesWeightsInSwap", "a snapshot stays where a pass fails", seen_by="C48")
KEEPS_SNAPSHOT = broken("KeepsSnapshot", "a snapshot stays in the model's place", seen_by="C48")
WRONG_TOKEN_WEIGHTS = broken("WrongTokenWeights", "every micro-batch counts the same", seen_by="C15")
OWN_EXPERTS = broken("OwnExperts", "training uses other experts than those requested", seen_by="C60")
IGNORES_AUX_LOSS = broken("IgnoresAuxLoss", "the balancing loss is left out", seen_by="C76")
IGNORES_PICTURES = broken("IgnoresPictures", "the model is shown placeholders in place of pictures", seen_by="C77")
FREEZES_TOWERS = broken("FreezesTowers", "a tower that is to be trained gets no gradients", seen_by="C77")
KEEPS_FIRST_RATE = broken("KeepsFirstRate", "the learning rate of the first step is kept", seen_by="C41")
IGNORES_BETAS = broken("IgnoresBetas", "betas are the config's, whatever a step says", seen_by="C79")
KEEPS_A_STEPS_CLIP = broken("KeepsAStepsClip", "later steps clip as one step was to", seen_by="C79")
IGNORES_TARGETS = broken("IgnoresTargets", "log-probs are of the row's own tokens alone", seen_by="C81")
LOSES_EQUAL_TARGETS = broken("LosesEqualTargets", "of equal targets of a token one has a gradient", seen_by="C81")
SEES_OTHER_BRANCHES = broken("SeesOtherBranches", "a branch sees those before it", seen_by="C82")
TRAINS_ONE_COPY = broken(
    "TrainsOneCopy", "a shared token has the gradient of one of its sequences alone", seen_by="C82"
)
ALWAYS_SCALES = broken("AlwaysScales", "a gradient below the norm is scaled up to it", seen_by="C61")
DECAYS_NORMS = broken("DecaysNorms", "norms are decayed as matrices are", seen_by="C41")
COUNTS_SKIPPED_STEPS = broken("CountsSkippedSteps", "Adam counts a step that was skipped", seen_by="C50")
FORGETS_EARLIER_CALLS = broken("ForgetsEarlierCalls", "each call clears the gradients of those before", seen_by="C67")
STEPS_IN_EVERY_CALL = broken("StepsInEveryCall", "a step of several calls is several steps", seen_by="C67")
REDUCES_TWICE = broken_on_several_ranks(
    "ReducesTwice", "gradients of earlier calls are summed over ranks once more", seen_by="C67"
)
IGNORES_SCALE = broken("IgnoresScale", "gradients are not multiplied by the step's scale", seen_by="C68")
CLEARS_TOO_EARLY = broken("ClearsTooEarly", "a forward pass between the halves clears gradients", seen_by="C69")
RETURNS_OUTPUTS_OF_ONE_MICRO_BATCH = broken(
    "ReturnsOutputsOfOneMicroBatch", "outputs of a training pass are of the first micro-batch alone", seen_by="C70"
)
RANK_DEPENDENT_METRICS = broken_on_several_ranks(
    "RankDependentMetrics", "each rank reports its own mean, whatever it is a mean of", seen_by="C27"
)


def one_group(config: PlainConfig, cluster: ClusterInfo) -> int:
    return 1


ANSWERS_ON_EVERY_RANK = evolve(
    broken_on_several_ranks("AnswersOnEveryRank", "ranks that share samples all set outputs", seen_by="C51"),
    data_parallel=one_group,
)

ANNOUNCES_ONE_GROUP = evolve(
    broken_on_several_ranks("DataParallel", "its spec announces one data-parallel group", seen_by="C11"),
    data_parallel=one_group,
)


def pairs(config: PlainConfig, cluster: ClusterInfo) -> int:
    return max(1, cluster.ranks // 2)


FORGETS_OTHER_PAIRS = evolve(
    broken_on_several_ranks(
        "ForgetsOtherPairs", "ranks that share samples sum gradients with nobody else", seen_by="C41"
    ),
    data_parallel=pairs,
    variants=[Variant(name="in pairs", options={}, ranks=4)],
)

# ---- checkpoints, weights and memory ---------------------------------------------------------------------------------

FORGETS_OPTIMIZER = broken("ForgetsOptimizer", "moments are zeros after a resume", seen_by="C18")
LOADS_MOMENTS_ANYWAY = broken("LoadsMomentsAnyway", "moments are loaded where weights alone are to be", seen_by="C80")
PARTIAL_CHECKPOINT = broken("PartialCheckpoint", "the index is written before the files it lists", seen_by="C19")
STAGES_TOO_LATE = broken("StagesTooLate", "a background save reads the state while it writes", seen_by="C20")
STALE_WEIGHTS = broken("StaleWeights", "engines are sent the initial weights", seen_by="C21")
SENDS_ONCE = broken("SendsOnce", "engines are sent the first update's weights again and again", seen_by="C21")
ROUNDS_BUFFERS = broken("RoundsBuffers", "engines are sent a router's bias in bfloat16", seen_by="C64")
SKIPS_TIED_PARAMETER = broken("SkipsTiedParameter", "engines are never sent tied embeddings", seen_by="C21")
LEAKS_ON_SLEEP = broken("LeaksOnSleep", "a copy of the parameters stays while they sleep", seen_by="C43")
LEAKS_BESIDE_GRADIENTS = broken(
    "LeaksBesideGradients", "a copy of the parameters takes the place of sleeping gradients", seen_by="C43"
)
KEEPS_GRADIENTS = broken("KeepsGradients", "gradients are zeroed and never freed", seen_by="C43")
KEEPS_MOMENTS_AWAKE = broken("KeepsMomentsAwake", "moments are not known to be memory", seen_by="C43")
WAKES_DIRTY = broken("WakesDirty", "moments are zeros after waking", seen_by="C43")
TRAINS_A_FROZEN_ROLE = broken(
    "TrainsAFrozenRole", "a role that is never trained has moments once it has slept", seen_by="C66"
)
SCALES_ADAPTERS_TWICE = broken("ScalesAdaptersTwice", "what adapters add is counted twice", seen_by="C72")
TRAINS_BESIDE_ADAPTERS = broken("TrainsBesideAdapters", "weights other than adapters are trained too", seen_by="C72")
SENDS_WITHOUT_ADAPTERS = broken("SendsWithoutAdapters", "engines are sent the weights alone", seen_by="C73")
PREDICTS_TOO_LITTLE = evolve(
    broken("PredictsTooLittle", "its spec predicts memory without moments", seen_by="C65"), memory=without_moments
)

BROKEN: dict[str, str] = {  # name of a backend -> the check that must fail
    f"{__name__}.imports_torch:SPEC": "C01",
    **{f"{__name__}:{name}": spec.seen_by for name, spec in list(vars().items()) if isinstance(spec, BrokenSpec)},
}
