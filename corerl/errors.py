"""Every error that CoreRL raises, as one tree, which docs/errors.md shows: what went wrong, and who can fix it.

Each takes one message, so that it survives pickling by Ray; further information is in attributes. A plugin may derive
its own: outside its process they arrive as their nearest base listed here.
"""

from __future__ import annotations


class CorerlError(Exception):
    """Base class of all CoreRL errors."""

    exit_status = 1
    harmless = False  # True: the call changed nothing in the callee, which may be called again
    details: str = ""  # the worker's traceback as text, if the error comes from a worker

    def __init__(self, message: str) -> None:
        super().__init__(message)

    @property
    def message(self) -> str:
        return str(self.args[0])


class HookFailed(CorerlError):
    """A hook raised a foreign exception, which may not unpickle; `details` describes it."""

    hook: str = ""
    rank: int = -1


class WorkerDied(CorerlError):
    """A process ended without answering."""


class InsufficientResources(CorerlError):
    """No resources are left to replace the processes of a lost machine; the message says which."""

    def with_cause(self, death: CorerlError) -> WorkerDied:
        """The error of the process whose death led to that."""
        died = WorkerDied(f"{death.message}; a machine is gone, and its processes have no other places: {self.message}")
        died.details = death.details
        return died


class ContractError(CorerlError):
    """A plugin violates the hook contract; found at registration or from what it returns."""


class WrongState(CorerlError):
    """The verb is not allowed in this state; nothing was changed."""

    harmless = True


class NotResident(WrongState):
    """The verb needs memory kinds that are asleep; `wake_up` them first."""


class WeightUpdateError(CorerlError):
    """A weight update was refused or did not arrive completely."""

    harmless = True


class LogprobMismatch(CorerlError):
    """Trainer and engines give the same tokens different log-probs, with the same weights."""


class SaveFailed(CorerlError):
    """A checkpoint could not be written; earlier ones are untouched."""

    harmless = True


class ResizeFailed(CorerlError):
    """A group of ranks or engines could not be given another size, layout or backend; it is as before."""

    harmless = True


class EngineFailed(CorerlError):
    """A rollout engine raised or does not answer."""


class VersionGone(CorerlError):
    """No engine holds the version of the weights that rows are to be sampled from; none was sampled from others."""


class UserError(CorerlError):
    """Something the user can fix; printed as is, without a traceback."""

    exit_status = 2
    several = False  # whether each line of the message is a problem of its own; else it is one, whatever a library says

    def __init__(self, message: str) -> None:
        super().__init__(message if self.several else " ".join(line.strip() for line in message.split("\n")))


class ConfigError(UserError):
    """The config has problems: one line for each, with its dotted path."""

    several = True


class DataError(UserError):
    """A data set is missing, empty or malformed."""


class ModelError(UserError):
    """A model directory is missing, damaged or of an unknown kind."""


class CheckpointError(UserError):
    """A checkpoint is incomplete, or of another model."""


class CheckpointDamaged(CheckpointError):
    """A checkpoint's files are not what was saved; one of another step may be intact."""


class RewardError(UserError):
    """The reward function raised, or did not return a finite number."""


class NothingLeft(UserError):
    """All steps of the run are already done: nothing was started, and nothing failed."""

    exit_status = 0


class Unsupported(UserError):
    """The run needs capabilities that the backend declares unsupported: one line for each."""

    several = True


class PluginError(UserError):
    """Base class of errors in finding and loading plugins."""


class PluginNotFound(PluginError):
    """No installed distribution offers this name."""

    install: str = ""  # the install command or the likely intended name, if known


class PluginConflict(PluginError):
    """Several installed distributions offer this name."""


class PluginBroken(PluginError):
    """The name was found, but its code cannot be imported or is not a spec."""


class PluginIncompatible(PluginError):
    """The plugin was written for an API version that this CoreRL does not support."""

    api: tuple[int, int] = (0, 0)  # (major, minor) that it was written for; (0, 0) if it is not the API that differs
