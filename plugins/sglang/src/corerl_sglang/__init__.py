"""SGLang as a rollout engine for CoreRL: one supervised server per replica, with weights from the trainer."""

from corerl_sglang.spec import SPEC

__all__ = ["SPEC", "__version__"]
__version__ = "0.1.0"
