"""Every error that CoreRL raises, as one tree: what went wrong, and whose move it is.

    CorerlError                     a failure of the run                    exit status 1
      HookFailed                      a backend's hook raised, on one rank
      WorkerDied                      a worker or engine process is gone
      ContractError                   a plugin broke the contract of hooks
      WrongState                      a verb in a state that does not allow it
        NotResident                     the memory that the verb needs is asleep
      WeightUpdateError               an update was refused or did not commit
      SaveFailed                      a checkpoint could not be written
      MemoryHeld                      a sleeping rank holds more memory than it may
      EngineFailed                    a rollout engine raised or does not answer
      UserError                     something the user can mend             exit status 2
        ConfigError                     config file, override or combination of settings
        DataError                       prompts, rows, files of a data set
        ModelError                      model directory, tokenizer, weights
        CheckpointError                 a checkpoint that cannot be resumed
        RewardError                     the user's reward function
        Unsupported                     a capability the backend does not have
        PluginError                     finding and loading plugins
          PluginNotFound, PluginConflict, PluginBroken, PluginIncompatible

Each takes one message, so that each survives pickling on its way through Ray; what else it knows is an attribute.
A plugin may derive its own: outside its process they arrive as the nearest of these.
"""

from __future__ import annotations


class CorerlError(Exception):
    """Base of all errors of CoreRL."""

    exit_status = 1
    harmless = False  # True: whoever raised it is as if it had not been asked, and may be asked again
    details: str = ""  # of one that left a worker: its traceback there, as text

    def __init__(self, message: str) -> None:
        super().__init__(message)

    @property
    def message(self) -> str:
        return str(self.args[0])


class HookFailed(CorerlError):
    """A hook raised something that is no error of CoreRL, and that may not unpickle: `details` tells of it."""

    hook: str = ""
    rank: int = -1


class WorkerDied(CorerlError):
    """A process ended without an answer."""


class ContractError(CorerlError):
    """A plugin does not keep the contract; found when it is registered or by the type of what it returns."""


class WrongState(CorerlError):
    """The verb is not allowed now; nothing has been changed."""

    harmless = True


class NotResident(WrongState):
    """The verb needs memory kinds that sleep; `wake_up` them first."""


class WeightUpdateError(CorerlError):
    """A weight update was refused, or did not arrive whole."""

    harmless = True


class SaveFailed(CorerlError):
    """A checkpoint could not be written; earlier ones are untouched."""

    harmless = True


class MemoryHeld(CorerlError):
    """All of a rank sleeps, and it holds more device memory than the config allows."""


class EngineFailed(CorerlError):
    """A rollout engine raised, or does not answer."""


class UserError(CorerlError):
    """Something that the user can mend: printed as it stands, without a traceback."""

    exit_status = 2


class ConfigError(UserError):
    """One line for each problem of a configuration, each with its dotted path."""


class DataError(UserError):
    """A data set is missing, empty or malformed."""


class ModelError(UserError):
    """A model directory is missing, damaged or of an unknown kind."""


class CheckpointError(UserError):
    """A checkpoint is incomplete, or of another model."""


class RewardError(UserError):
    """The reward function raised, or returned something that is no finite number."""


class NothingLeft(UserError):
    """A run is begun whose steps are done: nothing is started, and nothing has failed."""

    exit_status = 0


class Unsupported(UserError):
    """The run asks for a capability that the backend declares it does not have."""


class PluginError(UserError):
    """Base of what can go wrong between a plugin's name and its code."""


class PluginNotFound(PluginError):
    """No installed distribution offers this name."""

    install: str = ""  # the command that installs it, or what was likely meant, where one is known


class PluginConflict(PluginError):
    """Several installed distributions offer this name."""


class PluginBroken(PluginError):
    """The name was found, and its code cannot be imported or is no spec."""


class PluginIncompatible(PluginError):
    """The plugin was written for an API that this CoreRL does not speak."""

    api: tuple[int, int] = (0, 0)  # (major, minor) that it was written for; (0, 0) where it is not the API that differs
