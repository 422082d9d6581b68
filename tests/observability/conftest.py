"""Small real distributions, as the registry's own tests install them."""

from tests.plugin.conftest import install as install
