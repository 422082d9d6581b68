from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from attrs import evolve

from corerl.config.schema import ClusterInfo, ModelConfig
from corerl.engines import service
from corerl.engines.base import EngineContext
from corerl.engines.service import EngineAssignment, EngineService
from corerl.engines.specs import FAKE, TRANSFORMERS, TransformersConfig
from corerl.errors import PluginError
from corerl.plugin.spec import Begun

CONTEXT = EngineContext(name="engine-1", index=1, device="cpu", precision="float32")


def test_an_engine_gets_what_its_spec_started_before_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[Any] = []
    server = mock.Mock()

    def begin(options: Any, context: EngineContext) -> Begun:
        order.append((options.vocab_size, context))
        return server

    class Engine:
        def __init__(self, model: ModelConfig, options: Any, context: EngineContext) -> None:
            order.append(context)

    def load_implementation(kind: Any, loaded: Any) -> type:
        order.append("import")
        return Engine

    loaded = SimpleNamespace(name="fake", spec=evolve(FAKE, begin=begin))
    monkeypatch.setattr(service, "load", lambda kind, name: loaded)
    monkeypatch.setattr(service, "require_same", lambda *_: None)
    monkeypatch.setattr(service, "load_implementation", load_implementation)
    EngineService(
        EngineAssignment(engine="fake", origins=(), model=ModelConfig(), options={"vocab_size": 7}, context=CONTEXT)
    )
    assert order == [(7, CONTEXT), "import", evolve(CONTEXT, begun=server)]
    server.stop.assert_not_called()


def test_an_engine_that_fails_stops_what_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, loaded = mock.Mock(), SimpleNamespace(name="fake", spec=evolve(FAKE, begin=lambda *_: begun))
    monkeypatch.setattr(service, "load", lambda kind, name: loaded)
    monkeypatch.setattr(service, "require_same", lambda *_: None)
    monkeypatch.setattr(service, "load_implementation", mock.Mock(side_effect=PluginError("no such module")))
    with pytest.raises(PluginError, match="no such module"):
        EngineService(EngineAssignment(engine="fake", origins=(), model=ModelConfig(), options={}, context=CONTEXT))
    begun.stop.assert_called_once_with()


@pytest.mark.processes
def test_an_engines_process_begins_without_torch() -> None:
    asked = "import sys, corerl.cluster.process, corerl.engines.service; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


def test_a_replica_takes_a_device_where_there_are_some() -> None:
    for device, gpus in [("cpu", 0.0), ("cuda", 1.0)]:
        cluster = ClusterInfo(device=device, ranks=1)
        assert TRANSFORMERS.resources(TransformersConfig(), cluster).gpus == gpus
