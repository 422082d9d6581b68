"""Small real distributions, as the registry's own tests install them."""

from tests.plugin.conftest import backend_spec as backend_spec
from tests.plugin.conftest import extension_spec as extension_spec
from tests.plugin.conftest import install as install
