"""Track where a run stands, and report it to observers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from attrs import define, field

from corerl.observability.timing import Phases
from corerl.plugin.events import Event, Notice, PhaseStarted
from corerl.plugin.observers import Observers


@define(eq=False)
class Progress:
    """Shared by all parts of a run on the driver."""

    observers: Observers
    step: int  # rollout steps done
    seconds: Phases = field(factory=Phases)  # of the current step, by phase

    def tell(self, event: Event) -> None:
        self.observers.emit(event)

    def notice(self, text: str) -> None:
        """Report a sentence that the user should read."""
        self.tell(Notice(text=text))

    def begin(self, name: str) -> None:
        """Announce the start of something that takes a while."""
        self.tell(PhaseStarted(name=name, step=self.step))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Announce a phase and time it for the step's metrics."""
        self.begin(name)
        with self.seconds(name):
            yield
