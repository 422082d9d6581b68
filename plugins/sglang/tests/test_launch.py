"""What a rank of the server sets before it builds a model."""

from __future__ import annotations

import os

import pytest

from corerl_sglang.launch import STATIC_SPLITS, split_keys_of_equal_rows
from corerl_testing import smallest_config


def splits(model_type: str) -> str | None:
    split_keys_of_equal_rows(smallest_config(model_type).to_dict())
    return os.environ.pop(STATIC_SPLITS, None)


def test_keys_are_split_except_those_of_latent_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(STATIC_SPLITS, raising=False)
    assert splits("qwen3") == "true"
    assert splits("deepseek_v3") is None


def test_the_users_environment_has_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STATIC_SPLITS, "false")
    assert splits("qwen3") == "false"
