"""SGLang as a rollout engine of CoreRL: a server for each replica, supervised, its weights from the trainer."""

from corerl_sglang.spec import SPEC

__all__ = ["SPEC", "__version__"]
__version__ = "0.1.0"
