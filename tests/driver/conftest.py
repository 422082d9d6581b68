"""Small models in files, as those of `tests/models`."""

from tests.models.conftest import tiny_model as tiny_model
from tests.models.conftest import tiny_models as tiny_models
