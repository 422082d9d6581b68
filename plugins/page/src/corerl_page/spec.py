"""The specs of the extension `page` and of `corerl view`; imports neither torch nor the server's packages."""

from __future__ import annotations

from attrs import frozen

from corerl.config import at_least, between, option
from corerl.plugin import CommandSpec, ExtensionSpec, Process

PORTS = range(2**16)


@frozen(kw_only=True)
class PageOptions:
    samples: int = option(
        "samples of a step that are kept with their tokens, spread evenly over the step; 0 keeps all",
        default=64,
        validator=at_least(0),
    )
    every: int = option("rollout steps between those whose samples are kept", default=1, validator=at_least(1))
    serve: bool = option("show the page while the run goes on; its address is printed at the start", default=False)
    port: int = option(
        "port of that page on 127.0.0.1; 0 takes one that is free", default=0, validator=between(PORTS[0], PORTS[-1])
    )


PAGE = ExtensionSpec(
    implementation="corerl_page.recorder:Recorder",
    config=PageOptions,
    api=(2, 0),
    summary="samples token by token in rollouts.jsonl, for `corerl view`, and that page while the run goes on",
    process=Process.DRIVER,
)
VIEW = CommandSpec(
    implementation="corerl_page.command:add_arguments",
    api=(2, 0),
    summary="a local page on one or several runs: curves, samples, idle time, processes, notices",
)
