"""Fixtures that core's tests have too."""

from tests.cli.conftest import own_sys_path as own_sys_path
from tests.conftest import absent_backend as absent_backend
from tests.conftest import old_tomli_w as old_tomli_w
from tests.conftest import own_plugins_only as own_plugins_only
from tests.plugin.conftest import install as install
