"""What the tests of core have for a command that is refused."""

from tests.end_to_end.conftest import refused as refused
