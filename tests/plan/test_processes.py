from __future__ import annotations

from pathlib import Path

import pytest

from corerl.errors import ConfigError
from corerl.plan.make import make_plan
from corerl.plan.processes import choose_transport
from tests.driver.saved import CRITIC, config_in, make_config, make_model


def test_backends_are_asked_with_the_fields_of_each_roles_model(tmp_path: Path) -> None:
    fields = make_config().model.config
    small = {**fields, "num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 8}
    roles = {"critic": {"backend": "tests.trainer.fakes:CHOOSY", "model": {"config": small}}}
    with pytest.raises(ConfigError) as caught:
        make_plan(config_in(tmp_path / "run", **{**CRITIC, "roles": roles}))
    assert caught.value.message == "roles.critic.model.config.num_key_value_heads: 2 more than a multiple of 4"
    make_model(make_config(), seed=0).save_pretrained(tmp_path / "model")
    tables = {"backend": {"name": "tests.trainer.fakes:CHOOSY"}, "model": {"path": str(tmp_path / "model")}}
    with pytest.raises(ConfigError) as caught:
        make_plan(
            config_in(
                tmp_path / "run", **{**tables, "model": {**tables["model"], "tokenizer": "characters:0123456789>s"}}
            )
        )
    assert caught.value.message == "model.path: num_key_value_heads in its config.json: 2 more than a multiple of 4"


# ---- how weights reach engines ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("transport", "placement", "sending", "by_handle", "chosen"),
    [
        ("auto", "colocated", (0, 1), True, "ipc"),
        ("auto", "colocated", (0, 1), False, "collective"),  # the backend cannot
        ("auto", "colocated", (), True, "collective"),
        ("auto", "disaggregated", (0, 0), True, "collective"),
        ("ipc", "disaggregated", (0, 0), True, "ipc"),  # CPUs of one machine
        ("disk", "colocated", (0, 1), True, "disk"),
    ],
)
def test_auto_hands_over_memory_where_ranks_and_engines_share_devices(
    transport: str, placement: str, sending: tuple[int, ...], by_handle: bool, chosen: str
) -> None:
    config = make_config(weights={"transport": transport}, cluster={"placement": placement})
    assert choose_transport(config, sending, by_handle=by_handle) == chosen
