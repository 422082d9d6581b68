"""What is looked at of a plugin, whatever its kind."""

from __future__ import annotations

from corerl_doctor.child import CheckStarted
from corerl_doctor.plugins import check_named
from corerl_sglang import SPEC


def told(name: str) -> list[str]:
    return [each.what for each in check_named(name) if not isinstance(each, CheckStarted)]


def test_an_engine_is_imported_and_its_probe_asked() -> None:
    found, probed = told("sglang"), [finding.what for finding in SPEC.probe()]
    assert any("corerl_sglang.start:start_engine can be imported" in what for what in found)
    assert probed and found[-len(probed) :] == probed


def test_a_commands_code_is_imported() -> None:
    loads, imported = told("doctor")
    assert loads.startswith("command 'doctor' (corerl-doctor ") and loads.endswith(" loads, written for API 2.0")
    assert imported.endswith(": corerl_doctor.command:add_arguments can be imported")
