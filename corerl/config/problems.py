"""What is wrong with a run, collected, so that a user is told of everything at once."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import attrs

from corerl.config.schema import Config
from corerl.errors import ConfigError, UserError

TABLE = re.compile(rf"(?:{'|'.join(attrs.fields_dict(Config))})[.\[=:]")  # how a line begins that has its path


class Problems:
    """Collects the user's errors, each under a setting, so that they are told together."""

    def __init__(self) -> None:
        self._found: list[tuple[str, UserError]] = []

    def add(self, line: str) -> None:
        """A line that begins with the setting that it is about."""
        self._found.append((line.partition(":")[0], ConfigError(line)))

    @contextmanager
    def stage(self, setting: str, *, path: str = "") -> Iterator[None]:
        """An error of the user's ends the block, and no more than the block. `path` is where it stands in the config,
        for what raises without knowing."""
        try:
            yield
        except UserError as error:
            self._found.append((setting, _at(path, error) if path else error))

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._found)

    def none_in(self, *settings: str) -> bool:
        """Whether nothing is wrong with these settings, or with what is inside them: ask before building on them."""
        return not any(f"{found}.".startswith(f"{setting}.") for setting in settings for found, _ in self._found)

    def raise_all(self) -> None:
        """One error as it is; several as one ConfigError with the lines of each."""
        errors = list({error.message: error for _, error in self._found}.values())
        if len(errors) == 1:
            raise errors[0]
        if errors:
            raise ConfigError("\n".join(error.message for error in errors)) from ExceptionGroup("problems", errors)


def _at(path: str, error: UserError) -> UserError:
    """The same error, `path` before each line that has none."""
    lines = [line if TABLE.match(line) else f"{path}: {line}" for line in error.message.splitlines()]
    told = type(error)("\n".join(lines))
    told.__cause__ = error
    return told
