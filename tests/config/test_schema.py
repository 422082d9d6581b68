import math

import pytest

from corerl.config.load import config_of
from corerl.config.schema import Config, LoraConfig
from corerl.errors import ConfigError

# ---- adapters --------------------------------------------------------------------------------------------------------


def config_with(**tables: object) -> Config:
    return config_of({"backend": {"name": "plain"}, **tables})


@pytest.mark.parametrize(
    ("rank", "rslora", "scale"), [(16, False, 2.0), (64, False, 0.5), (16, True, 8.0), (64, True, 4.0)]
)
def test_the_scale_is_alpha_by_rank_or_its_root(rank: int, rslora: bool, scale: float) -> None:
    assert LoraConfig(rank=rank, alpha=32.0, rslora=rslora).scale == scale


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"rank": 0}, "lora.rank: must be >= 1, got 0"),
        ({"alpha": 0}, "lora.alpha: must be > 0, got 0.0"),
        ({"alpha": math.inf}, "lora.alpha: must be finite, got inf"),
        ({"targets": []}, "lora.targets: its length must be >= 1, got 0"),
        ({"init": "pissa"}, "lora.init: expected one of 'kaiming', 'gaussian', got string 'pissa'"),
        ({"r": 8}, "lora.r: unknown key; did you mean 'rank'?"),
        ({"lora_alpha": 8}, "lora.lora_alpha: unknown key; did you mean 'alpha'?"),
        ({"target_modules": ["q_proj"]}, "lora.target_modules: unknown key; did you mean 'targets'?"),
        ({"dropout": 0.1}, "lora.dropout: unknown key; known: rank, alpha, targets, rslora, init, path"),
    ],
)
@pytest.mark.parametrize("role", ["actor", "critic"])
def test_wrong_settings_of_adapters_are_named_by_path(role: str, given: dict[str, object], line: str) -> None:
    own = role == "critic"
    tables: dict[str, object] = {"roles": {"critic": {"ranks": 1, "lora": given}}} if own else {"lora": given}
    with pytest.raises(ConfigError) as caught:
        config_with(**tables)
    assert caught.value.message == ("roles.critic." if own else "") + line
