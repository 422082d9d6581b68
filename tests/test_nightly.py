"""A name that no check has any more would let what it stood for run every day, unnoticed."""

from corerl.plugin import Kind, load
from corerl_testing.marks import check_of
from corerl_testing.suite import CHECKS
from tests.nightly import OF_CORE, OF_MODELS, OF_VARIANTS, RESUMED_IN_HALF


def test_checks_that_run_at_night_alone_are_there() -> None:
    assert OF_MODELS - CHECKS.keys() == set()
    ids = {found.id for function in CHECKS.values() if (found := check_of(function)) is not None}
    assert (OF_CORE | OF_VARIANTS) - ids == set()
    spec = load(Kind.BACKENDS, "deepspeed").spec
    assert RESUMED_IN_HALF - {variant.name for variant in spec.variants} == set()
