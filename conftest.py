"""What tests of core and of plugins share."""

import pytest

pytest_plugins = ["corerl.testing.plugin"]

pytest.register_assert_rewrite("tests.bare_loop")
