"""The files that a run writes of itself, and how long its phases take."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from corerl.observability.jsonl import METRICS_FILE as METRICS_FILE
    from corerl.observability.jsonl import NOTICES_FILE as NOTICES_FILE
    from corerl.observability.jsonl import SAMPLES_FILE as SAMPLES_FILE
    from corerl.observability.jsonl import keep as keep
    from corerl.observability.jsonl import read_lines as read_lines
    from corerl.observability.jsonl import read_notices as read_notices
    from corerl.observability.jsonl import reopen as reopen
else:
    from corerl.imports import on_demand

    __getattr__, __dir__ = on_demand(__name__, __file__)
