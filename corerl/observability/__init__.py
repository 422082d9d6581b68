"""Metrics of a run over time, and the extensions that core brings: lines and files."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from corerl.observability.jsonl import METRICS_FILE as METRICS_FILE
    from corerl.observability.jsonl import NOTICES_FILE as NOTICES_FILE
    from corerl.observability.jsonl import SAMPLES_FILE as SAMPLES_FILE
    from corerl.observability.jsonl import keep as keep
    from corerl.observability.jsonl import read_notices as read_notices
    from corerl.observability.jsonl import reopen as reopen
    from corerl.observability.run_state import History as History
    from corerl.observability.run_state import RunState as RunState
    from corerl.observability.run_state import duration as duration
    from corerl.observability.run_state import number as number
    from corerl.observability.run_state import phases as phases
    from corerl.observability.run_state import prompt_text as prompt_text
    from corerl.observability.run_state import scores as scores
else:
    from corerl.imports import on_demand

    __getattr__, __dir__ = on_demand(__name__, __file__)
