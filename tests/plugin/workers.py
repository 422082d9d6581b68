"""What a worker process answers where its plugins are not the driver's."""

from __future__ import annotations

from corerl.errors import PluginError
from corerl.plan.roles import Assignment
from corerl.trainer.worker import Worker


class Refusing:
    """In a process with an environment of its own."""

    def refusal(self, assignment: Assignment) -> tuple[str, str]:
        """The type and the message of the error that a rank's beginning raises here; ("", "") where it begins."""
        try:
            Worker(assignment)
        except PluginError as error:
            return type(error).__name__, error.message
        return "", ""
