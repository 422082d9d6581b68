"""An extension that stops a run once a metric has been high enough for some steps."""

from collections import deque

from attrs import frozen

from corerl.config import at_least, option
from corerl.plugin import Event, ExtensionSpec, Process, RunControl, RunRewound, StepFinished


@frozen(kw_only=True)
class EnoughOptions:
    metric: str = option("the one that is to be high", default="rollout/reward")
    value: float = option("how high", default=1.0)
    steps: int = option("the run stops once so many steps in a row had it", default=3, validator=at_least(1))


class Enough:
    def __init__(self, *, options: EnoughOptions, run_dir: str) -> None:
        self.options = options
        self.values: deque[float] = deque(maxlen=options.steps)

    def observe(self, event: Event) -> None:
        if isinstance(event, StepFinished):
            self.values.append(event.metrics.get(self.options.metric, float("-inf")))
        elif isinstance(event, RunRewound):  # steps come again
            self.values.clear()

    def between_steps(self, run: RunControl) -> None:
        options = self.options
        if len(self.values) == options.steps and min(self.values) >= options.value:
            run.notice(f"{options.metric} has been {options.value:g} or more for {options.steps} steps: enough")
            run.request_stop()


SPEC = ExtensionSpec(
    implementation="corerl_enough:Enough",
    config=EnoughOptions,
    api=(2, 0),
    summary="stops a run once a metric has been high enough for some steps",
    process=Process.DRIVER,
)
