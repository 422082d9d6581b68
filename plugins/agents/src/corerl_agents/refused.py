"""Why a request is not answered."""

from __future__ import annotations

SHOWN = 60  # characters of a value that a refusal shows


class Refused(Exception):
    """A request cannot be answered. The client gets the reason, and the conversation is unchanged."""

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.message, self.status, self.code = message, status, code


class Diverges(Refused):
    """The request does not continue this conversation: it was written with other tools, or in other words."""
