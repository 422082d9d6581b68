"""`corerl models` prints a line for each model type as it is examined, or a JSON array."""

from __future__ import annotations

import pytest

from corerl_testing import main


@pytest.mark.processes
def test_types_are_lines_with_their_reason_and_a_count(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "qwen3", "bloom", "xlnet"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in out[:3]] == [["qwen3", "packed"], ["bloom", "whole"], ["xlnet", "refused"]]
    assert out[2].endswith("XLNetLMHeadModel lets every token see later ones; use another model")
    assert out[3:] == ["1 packed, 1 whole, 1 refused"]


def test_an_unknown_type_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "qwen33"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("corerl: error: 'qwen33' is no language model of transformers") and "qwen3" in err
