"""What the driver tells a rank, in a module that imports nothing of what only a rank needs."""

from __future__ import annotations

from attrs import frozen

from corerl.config.schema import ExtensionChoice, RoleConfig
from corerl.plugin.context import Context
from corerl.plugin.origins import Origin


@frozen(kw_only=True)
class Assignment:
    """Of one rank: plain data, so that it arrives even where a plugin is missing."""

    context: Context
    backend: str  # the name, resolved again where the worker runs
    config: RoleConfig  # with `options` as a plain table
    extensions: tuple[ExtensionChoice, ...] = ()  # those that live in workers, options as plain tables
    origins: tuple[Origin, ...]  # of what the driver resolved
