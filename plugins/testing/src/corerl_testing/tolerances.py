"""How close two numbers must be to count as equal: one table, cited by every check."""

from __future__ import annotations

from attrs import frozen


@frozen
class Tolerance:
    """How far a value may be from its reference: the larger of `absolute` and `relative` times the reference."""

    relative: float
    absolute: float = 0.0


# float32 on a CPU
LOSS = Tolerance(1e-5, 1e-7)  # eight steps against the plain backend, after a resume elsewhere, or streamed
GRAD_NORM = Tolerance(1e-5)
ROUTER_GRADS = 1e-4  # L2 relative; they come from differences of experts' outputs, which are similar in small models
BALANCED_ROUTER_GRADS = 1e-5  # L2 relative; with a balancing loss, whose part of them is no difference
METRICS = Tolerance(1e-4, 1e-5)  # means over tokens, some of nearly equal numbers
LOGPROBS = Tolerance(0.0, 1e-5)  # against transformers
WEIGHTS_L2 = (
    1e-5  # relative, after eight steps; never the largest element: Adam amplifies rounding where gradients vanish
)
ENGINE_LOGPROBS = 1e-4  # trainer against engine right after an update

# Algorithms: advantages in float32, losses in float64
ADVANTAGES = Tolerance(1e-4, 1e-6)  # of samples in another order: sums are rounded otherwise
FLOAT64 = Tolerance(1e-9, 1e-12)  # a step's loss, gradients and metrics, divided otherwise
DIFFERENCES = 1e-6  # relative to the largest gradient, against finite differences in float64

# float32 on a GPU against a CPU
GPU_LOGPROBS = 1e-4
GPU_LOSS = Tolerance(1e-4, 1e-6)
GPU_GRAD_NORM = Tolerance(1e-4)
GPU_WEIGHTS_L2 = 1e-4

# bfloat16, the mean over tokens: a frozen role's weights are rounded once, a trained one's for each pass
BFLOAT16_LOGPROBS = 2e-2
BFLOAT16_PACKED = 1e-2  # of the same sequences alone

# bfloat16, the mean over eight steps
BFLOAT16_LOSS = 2e-2
BFLOAT16_GRAD_NORM = 5e-2

# bfloat16 or float16, of what six steps add to the weights, relative: in bfloat16 it is 0.075, in float16 0.004
HALF_MOVES_L2 = 0.15
