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
    """Collects user errors, each under a setting, to raise them together."""

    def __init__(self) -> None:
        self._found: list[tuple[str, UserError]] = []

    def add(self, *lines: str) -> None:
        """Add lines that begin with the settings that they are about."""
        self._found += [(line.partition(":")[0], ConfigError(line)) for line in lines]

    @contextmanager
    def stage(self, setting: str, *, path: str = "") -> Iterator[None]:
        """Collect a UserError raised in the block, which ends only the block. `path` is put before lines that do not
        begin with a path in the config."""
        try:
            yield
        except UserError as error:
            self._found.append((setting, _at(path, error) if path else error))

    def __bool__(self) -> bool:
        """Whether any problem was found."""
        return bool(self._found)

    def none_in(self, *settings: str) -> bool:
        """Whether no problem was found in these settings or inside them: check before building on them."""
        return not any(f"{found}.".startswith(f"{setting}.") for setting in settings for found, _ in self._found)

    def raise_all(self) -> None:
        """Raise a single error as it is, several as one ConfigError with the lines of all."""
        errors = list({error.message: error for _, error in self._found}.values())
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
