"""NVIDIA megatron-core as a training backend for CoreRL: tensor, pipeline, context and expert parallelism."""

from corerl_megatron.spec import SPEC

__all__ = ["SPEC", "__version__"]
__version__ = "0.1.0"
