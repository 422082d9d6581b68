"""DeepSpeed's ZeRO as a training backend for CoreRL: any model of transformers, sharded and offloaded."""

from corerl_deepspeed.spec import SPEC

__all__ = ["SPEC", "__version__"]
__version__ = "0.1.0"
