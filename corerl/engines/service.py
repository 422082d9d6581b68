"""The code of an engine process: one replica, resolved by name in that process.

Importing this loads no torch: an engine's server begins to start before that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from attrs import frozen

from corerl.config.schema import ModelConfig
from corerl.engines.base import Engine, EngineContext, GenerateRequest, Generation
from corerl.plugin.origins import Origin, load_same
from corerl.plugin.registry import Kind, load_implementation, options_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from corerl.engines.stops import Stops

KEPT_STOPS = 32  # sets of stop texts


@frozen(kw_only=True)
class EngineAssignment:
    """What the driver sends to one replica, as plain data."""

    engine: str  # the name, resolved again in the engine's process
    origins: tuple[Origin, ...]  # of the plugins the driver resolved, to compare
    model: ModelConfig
    options: Mapping[str, Any]  # the engine's own table
    context: EngineContext
    transport: str = ""  # of the weight updates that it receives; empty if it is not known


class EngineService:
    """One replica, in its own process."""

    def __init__(self, assignment: EngineAssignment) -> None:
        loaded, *_ = load_same(
            assignment.origins,
            (Kind.ENGINES, assignment.engine),
            (Kind.TRANSPORTS, assignment.transport),
            (Kind.PICTURES, assignment.model.pictures),
        )
        options = options_of(loaded, assignment.options, path=f"engines.{loaded.name}")
        make: Callable[..., Engine] = load_implementation(Kind.ENGINES, loaded)
        self.engine = make(assignment.model, options, assignment.context)
        for method in ("receive", "forget", "weight_sums", "cache_use", "pause", "resume", "sleep", "wake_up", "close"):
            setattr(self, method, getattr(self.engine, method))
        self._model = assignment.model
        self._counting = threading.Lock()
        self._counts: dict[int, tuple[int, int]] = {}  # thread -> rows that have ended, of how many
        self._stops = lru_cache(KEPT_STOPS)(self._make_stops)  # each looks through the tokenizer's special tokens

    def generate(self, request: GenerateRequest) -> Generation:
        thread = threading.get_ident()

        def on_finished(rows: int) -> None:
            with self._counting:
                self._counts[thread] = self._counts[thread][0] + rows, len(request)

        self._counts[thread] = 0, len(request)
        try:
            if not request.params.stop:
                return self.engine.generate(request, on_finished)
            from corerl.engines.stops import until_stop  # slow to import, and few runs have stop texts

            return until_stop(self.engine.generate_watched, request, self._stops(request.params.stop), on_finished)
        finally:
            with self._counting:
                del self._counts[thread]

    def counts(self) -> Mapping[int, tuple[int, int]]:
        """Of each thread that generates: how many rows of its request have ended, and how many it has."""
        with self._counting:
            return dict(self._counts)

    def _make_stops(self, texts: tuple[str, ...]) -> Stops:
        from corerl.engines.stops import Stops

        return Stops(self._tokenizer, texts)

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        from corerl.models.tokenizer import load_tokenizer

        return load_tokenizer(tokenizer=self._model.tokenizer, path=self._model.path)
