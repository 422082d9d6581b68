"""FSDP2 (torch's fully_shard) as a training backend for CoreRL: any causal language model of transformers, sharded."""

from corerl_fsdp.spec import SPEC

__all__ = ["SPEC", "__version__"]
__version__ = "0.1.0"
