"""Collect everything that is wrong with a run, to report it all at once."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import attrs

from corerl.config.schema import Config
from corerl.errors import ConfigError, UserError

TABLE = re.compile(rf"(?:{'|'.join(attrs.fields_dict(Config))})[.\[=:]")  # a line that begins with its path


class Problems:
    """Collects user errors, to raise them together."""

    def __init__(self) -> None:
        self._found: list[UserError] = []

    def add(self, *lines: str) -> None:
        """Add lines that begin with the settings that they are about."""
        self._found += map(ConfigError, lines)

    @contextmanager
    def stage(self, setting: str = "") -> Iterator[None]:
        """Collect a UserError raised in the block, which ends only the block. `setting` is put before lines that do not
        begin with a path in the config."""
        try:
            yield
        except UserError as error:
            self._found.append(_at(setting, error) if setting else error)

    def raise_all(self) -> None:
        """Raise a single error as it is, several as one ConfigError with the lines of all."""
        errors = list({error.message: error for error in self._found}.values())
        if len(errors) == 1:
            raise errors[0]
        if errors:
            raise ConfigError("\n".join(error.message for error in errors)) from ExceptionGroup("problems", errors)


def _at(path: str, error: UserError) -> UserError:
    """The same error, with `path` before each line that has none."""
    lines = [line if TABLE.match(line) else f"{path}: {line}" for line in error.message.splitlines()]
    placed = type(error)("\n".join(lines))
    placed.__cause__ = error
    return placed
