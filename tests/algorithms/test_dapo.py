from corerl.algorithms.dapo import SPEC, Options
from corerl.algorithms.grpo import GRPO
from corerl.algorithms.losses import clipped
from corerl.config.schema import AlgorithmConfig
from corerl.plugin.spec import ACTOR
from tests.algorithms.ragged import Sample, step_of


def test_it_is_grpo_with_the_papers_settings_and_those_of_the_config_win() -> None:
    assert SPEC.implementation == f"{GRPO.__module__}:{GRPO.__name__}"
    settled = AlgorithmConfig().settled(SPEC.defaults, max_tokens=20_480)
    assert (settled.aggregation, settled.dynamic_sampling, settled.overlong) == ("token-mean", 10, "penalty")
    assert settled.overlong_buffer == 4096  # as in section 4.1
    own = AlgorithmConfig(dynamic_sampling=0, overlong="keep").settled(SPEC.defaults, max_tokens=20_480)
    assert (own.dynamic_sampling, own.overlong, own.overlong_buffer) == (0, "keep", 0)


def test_a_token_may_become_likelier_by_more_than_it_may_become_rarer() -> None:
    params = GRPO(Options()).objectives()[ACTOR].loss.params
    assert params == {"clip_low": 0.2, "clip_high": 0.28}
    rising = Sample(ratios=[1.25, 1.3], advantages=[1, 1], weight=0.5)
    falling = Sample(ratios=[0.85, 0.75], advantages=[-1, -1], weight=0.5)
    step = step_of(clipped, [rising, falling], **params)
    assert step.gradients == [[-0.625, 0.0], [0.425, 0.0]]
