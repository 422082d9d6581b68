"""Where a run stands, and what its observers hear of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from attrs import define, field

from corerl.observability.timing import Phases
from corerl.plugin.events import Event, Notice, PhaseStarted
from corerl.plugin.observers import Observers


@define(eq=False)
class Progress:
    """One for all parts of a run on the driver."""

    observers: Observers
    step: int  # rollout steps that are behind it
    seconds: Phases = field(factory=Phases)  # of the step that goes on, by phase

    def tell(self, event: Event) -> None:
        self.observers.emit(event)

    def notice(self, text: str) -> None:
        """A sentence that the user should read."""
        self.tell(Notice(text=text))

    def begin(self, name: str) -> None:
        """Show that something begins that takes a while."""
        self.tell(PhaseStarted(name=name, step=self.step))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Shown while it lasts, and counted in the step's seconds."""
        self.begin(name)
        with self.seconds(name):
            yield
