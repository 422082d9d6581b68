"""The message from the driver to a rank; this module imports nothing that only ranks need."""

from __future__ import annotations

from attrs import frozen

from corerl.config.schema import ExtensionChoice, RoleConfig
from corerl.plugin.fingerprint import Origin
from corerl.plugin.hookspecs import Context


@frozen(kw_only=True)
class Assignment:
    """One rank's assignment, as plain data, so that it unpickles even if a plugin is missing."""

    context: Context
    backend: str  # the name, resolved again in the worker
    config: RoleConfig  # with `options` as a plain table
    extensions: tuple[ExtensionChoice, ...] = ()  # the ones for workers, options as plain tables
    transport: str = ""  # of the weight updates that it sends; empty if it sends none, or it is not known
    origins: tuple[Origin, ...]  # of the plugins the driver resolved
