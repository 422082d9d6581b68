"""Fixtures that core's tests have too."""

from tests.data.conftest import own_cache as own_cache
