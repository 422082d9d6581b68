"""Plugin-based training backends for reinforcement-learning post-training of language models."""

from corerl.plugin.api import hookimpl

__all__ = ["__version__", "hookimpl"]
__version__ = "0.1.0"
