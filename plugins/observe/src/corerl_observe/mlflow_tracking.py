"""Send every metric, the config and the shown answers to MLflow."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from corerl.config import CONFIG_FILE
from corerl.plugin import RunStarted, SampleShown
from corerl_observe.specs import MlflowOptions
from corerl_observe.tensorboard import markdown
from corerl_observe.tracking import Identity, Tracker, flat, read_config

IDENTITY_FILE = "mlflow.json"
STORE = "mlruns"
PARAMS_AT_ONCE = 100  # MLflow's limit
LONGEST_PARAM = 500  # characters; MLflow's limit
STATUSES = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}


class Mlflow(Tracker):
    """Tracks a run in MLflow. A resumed run continues the same MLflow run, which then has two values per repeated
    step."""

    _options: MlflowOptions
    _library: Any  # an MlflowClient
    _run: str  # MLflow's id

    def start(self, event: RunStarted) -> None:
        default = (self._run_dir / STORE).absolute().as_uri()
        uri = self._options.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or default
        if urlsplit(uri).scheme in ("", "file"):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # newer versions refuse a directory without it
        from mlflow import MlflowClient
        from mlflow.entities import Param

        client = MlflowClient(tracking_uri=uri)
        identity = Identity(self._run_dir / IDENTITY_FILE)
        known = identity.read(goes_on=event.goes_on)
        if known.get("tracking_uri") == uri:
            self._run = known["run_id"]
            client.update_run(self._run, status="RUNNING")
        else:
            name = self._options.name or self._run_dir.name
            tags = {"corerl.title": event.title, "corerl.run_dir": event.run_dir, **self._options.tags}
            run = client.create_run(_experiment(client, self._options.experiment), run_name=name, tags=tags)
            self._run = run.info.run_id
            identity.write(tracking_uri=uri, run_id=self._run)
            params = [
                Param(_named(key), str(value)[:LONGEST_PARAM])
                for key, value in flat(read_config(self._run_dir)).items()
            ]
            for first in range(0, len(params), PARAMS_AT_ONCE):
                client.log_batch(self._run, params=params[first : first + PARAMS_AT_ONCE])
        if (self._run_dir / CONFIG_FILE).exists():
            client.log_artifact(self._run, str(self._run_dir / CONFIG_FILE))  # a resumed run may have a different one
        self._library = client

    def log(self, step: int, metrics: Mapping[str, float], kind: str, shown: Sequence[SampleShown]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        named = [Metric(_named(name), float(value), now, step) for name, value in metrics.items()]
        self._library.log_batch(self._run, metrics=named)
        if shown:
            self._library.log_text(self._run, markdown(shown), f"samples/{kind}-{step:08d}.md")

    def close(self, library: Any, reason: str) -> None:
        library.set_terminated(self._run, STATUSES.get(reason, "FAILED"))


def _named(name: str) -> str:
    """The name, restricted to characters that MLflow accepts."""
    return re.sub(r"[^\w\-. /]", "_", name)


def _experiment(client: Any, name: str) -> str:
    """The id of the experiment of this name, which is created if missing."""
    found = client.get_experiment_by_name(name)
    return str(found.experiment_id if found is not None else client.create_experiment(name))
