"""The extension: keeps samples with their tokens in rollouts.jsonl, and serves the page while the run goes on."""

from __future__ import annotations

import contextlib
import json
import platform
from collections.abc import Callable, Collection, Sequence
from importlib import metadata
from pathlib import Path
from typing import IO, Any

from corerl.config import CONFIG_FILE, Config, load_config
from corerl.errors import ConfigError, CorerlError
from corerl.messages import note
from corerl.observability import reopen
from corerl.plugin import Evaluated, Event, RunRewound, RunStarted, StepFinished
from corerl_page.records import Pieces, chosen, credit_of, rows_by_sample, tokens_record
from corerl_page.runs import ROLLOUTS_FILE, VERSIONS_FILE
from corerl_page.spec import PageOptions


def installed() -> dict[str, str]:
    """The version of Python and of each distribution, by its name."""
    found: dict[str, str] = {}
    for each in metadata.distributions():
        # Interrupted installs leave directories without a name behind, of which newer importlibs raise an error. Of two
        # of one name, the first is imported.
        with contextlib.suppress(FileNotFoundError):
            if name := each.metadata["Name"]:
                found.setdefault(name, each.version)
    return {"Python": platform.python_version(), **dict(sorted(found.items()))}


class Recorder:
    """Writes what `corerl_page.records` describes. A resumed run first drops the steps that it repeats."""

    def __init__(self, *, options: PageOptions, run_dir: str) -> None:
        self._options = options
        self._run_dir = Path(run_dir)
        self._file: IO[str] | None = None
        self._pieces: Pieces | None = None
        self._ends: Collection[int] = ()
        self._recomputed = False
        self._stop: Callable[[], None] = lambda: None

    def observe(self, event: Event) -> None:
        match event:
            case RunStarted():
                self._open(event.repeats_from)
                (self._run_dir / VERSIONS_FILE).write_text(json.dumps(installed(), indent=0), encoding="utf-8")
                self._read(load_config(self._run_dir / CONFIG_FILE))
                if self._options.serve:
                    self._serve()
            case RunRewound():
                self._open(event.step, same_run=True)
            case StepFinished() if event.step % self._options.every == 0:
                self._write(event)
            case Evaluated():
                self._put({"step": event.step, "kind": "held-out", **each.record()} for each in event.shown)

    def shutdown(self, reason: str) -> None:
        self._stop()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self, before: float, *, same_run: bool = False) -> None:
        if self._file is not None:
            self._file.close()
        self._run_dir.mkdir(parents=True, exist_ok=True)
        self._file = reopen(self._run_dir / ROLLOUTS_FILE, before=before, same_run=same_run)

    def _read(self, config: Config) -> None:
        """What tokens mean in this run."""
        from corerl.models import end_tokens, load_tokenizer

        self._recomputed = config.algorithm.old_logprobs == "recompute"
        try:
            tokenizer = load_tokenizer(tokenizer=config.model.tokenizer, path=config.model.path)
        except CorerlError:  # a run may train on tokens that nothing turns into text
            self._pieces = Pieces(lambda tokens: " ".join(map(str, tokens)) + " ")
            return
        self._pieces = Pieces(lambda tokens: str(tokenizer.decode(list(tokens), skip_special_tokens=False)))
        self._ends = frozenset(end_tokens(tokenizer, config.model))

    def _write(self, event: StepFinished) -> None:
        batch, pieces = event.batch, self._pieces
        if batch is None or pieces is None:
            return
        rows, credit = rows_by_sample(batch), credit_of(batch)
        lines: Sequence[dict[str, Any]] = [
            {
                "step": event.step,
                "kind": "sampled",
                **event.samples[number].record(),
                "number": number,
                **credit[number],
                **tokens_record(batch, rows[number], pieces, recomputed=self._recomputed, ends=self._ends),
            }
            for number in chosen(len(event.samples), self._options.samples)
        ]
        self._put(lines)

    def _put(self, lines: Any) -> None:
        if self._file is not None:
            self._file.writelines(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n" for line in lines)
            self._file.flush()

    def _serve(self) -> None:
        from corerl_page.server import Server

        try:
            server = Server([self._run_dir], port=self._options.port)
        except ConfigError as error:  # such as a port that another run has: samples are kept all the same
            note(f"the run's page is not shown: {error.message}")
            return
        server.start()
        self._stop = server.stop
        note(f"the run's page is at {server.url}")
