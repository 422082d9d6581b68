"""Extensions made from a config: each in the process that its spec names, and none of them able to end the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from corerl.config.schema import ExtensionChoice
from corerl.errors import ConfigError, ContractError, CorerlError, PluginBroken, WorkerDied
from corerl.plugin.events import Event, Notice
from corerl.plugin.hooks import RunControl
from corerl.plugin.host import PluginHost
from corerl.plugin.observers import Observers, load_extensions
from corerl.plugin.spec import Process
from tests.plugin.test_host import CONTEXT, Fake

Install = Callable[..., Path]

CODE = """

class Code:
    def __init__(self, options, run_dir):
        if options.every < 0:
            raise ValueError("every is below 0")
        self.options, self.run_dir = options, run_dir

    def observe(self, event):
        print(self.run_dir, self.options.every, event.text)
"""


class Hears:
    def __init__(self, name: str, log: list[str], error: Exception | None = None) -> None:
        self.name, self.log, self.error = name, log, error

    def observe(self, event: Event) -> None:
        self.log.append(self.name)
        if self.error:
            raise self.error

    def shutdown(self, reason: str) -> None:
        self.log.append(f"{self.name} {reason}")
        if self.error:
            raise self.error


@pytest.fixture
def plugins(install: Install, extension_spec: str) -> None:
    driver = extension_spec.replace("Process.WORKER", "Process.DRIVER")
    install("corerl-wrap", {"extensions": {"wrap": "wrap_ob:SPEC"}}, wrap_ob=extension_spec, wrap_ob_code=CODE)
    install("corerl-watch", {"extensions": {"watch": "watch_ob:SPEC"}}, watch_ob=driver, watch_ob_code=CODE)


@pytest.mark.usefixtures("plugins")
def test_an_extension_that_cannot_be_made_says_which_and_why() -> None:
    with pytest.raises(PluginBroken) as caught:
        load_extensions([ExtensionChoice(name="wrap", options={"every": -1})], "runs/x", Process.WORKER)
    assert caught.value.message == (
        "extension 'wrap' (corerl-wrap 0.1.0) cannot be started: wrap_ob_code:Code(options, run_dir) raised "
        "ValueError: every is below 0"
    )
    with pytest.raises(ConfigError, match=r"^extensions\.wrap\.options\.evry: unknown key"):
        load_extensions([ExtensionChoice(name="wrap", options={"evry": 1})], "runs/x", Process.WORKER)


def test_an_observer_that_raises_is_disabled(capsys: pytest.CaptureFixture[str]) -> None:
    log: list[str] = []
    observers = Observers(
        [("a", Hears("a", log)), ("b", Hears("b", log, OSError("disk full"))), ("c", Hears("c", log))]
    )
    observers.emit(Notice(text="one"))
    observers.emit(Notice(text="two"))
    assert log == ["a", "b", "c", "a", "c"]
    assert capsys.readouterr().err == (
        "warning: extension:b is disabled because observe(Notice) raised OSError: disk full\n"
        "corerl: note: one\n"
        "corerl: note: two\n"
    )


def test_notices_go_to_stderr_only_while_no_extension_shows_them(capsys: pytest.CaptureFixture[str]) -> None:
    shows = Hears("a", [])
    observers = Observers([("a", shows), ("b", Hears("b", []))], showing=["a"])
    observers.emit(Notice(text="shown"))
    assert capsys.readouterr().err == ""
    shows.error = OSError("broken pipe")
    observers.emit(Notice(text="lost by a"))
    observers.emit(Notice(text="after it"))
    assert capsys.readouterr().err.splitlines()[1:] == ["corerl: note: lost by a", "corerl: note: after it"]


class Decides:
    def __init__(self, name: str, log: list[str], error: BaseException | None = None) -> None:
        self.name, self.log, self.error = name, log, error

    def between_steps(self, run: RunControl) -> None:
        self.log.append(f"{self.name} {run}")
        if self.error:
            raise self.error


def test_an_error_of_a_deciding_hook_names_the_extension() -> None:
    log: list[str] = []
    Observers([(name, Decides(name, log)) for name in ("a", "b")]).ask("between_steps", run="a run")
    assert log == ["a a run", "b a run"]
    for error, told, notes in (
        (ValueError("no luck"), "extension:a: between_steps failed: ValueError: no luck", []),
        (SystemExit(3), "extension:a: between_steps failed: SystemExit: 3", []),
        (ConfigError("roles.actor.ranks: no"), "roles.actor.ranks: no", ["raised in between_steps of extension:a"]),
        (WorkerDied("actor rank 0 has died"), "actor rank 0 has died", []),  # the run's own: it goes on from there
    ):
        log.clear()
        with pytest.raises(CorerlError) as caught:
            Observers([("a", Decides("a", log, error)), ("b", Decides("b", log))]).ask("between_steps", run="a run")
        assert (caught.value.message, getattr(caught.value, "__notes__", [])) == (told, notes)
        assert log == ["a a run"]


def test_shutdown_reaches_every_observer_once_and_never_raises(capsys: pytest.CaptureFixture[str]) -> None:
    log: list[str] = []
    observers = Observers([("a", Hears("a", log, OSError("disk full"))), ("b", Hears("b", log))])
    observers.shutdown("finished")
    observers.shutdown("finished")
    observers.emit(Notice(text="late"))
    assert log == ["a finished", "b finished"]
    assert capsys.readouterr().err == "warning: shutdown of extension:a raised OSError: disk full\n"


def test_hooks_of_another_process_are_refused() -> None:
    class Wraps:
        def optimizer_step(self) -> Iterator[None]:
            return (yield)

    with pytest.raises(ContractError, match="^extension:a implements observe, but it is called on the driver only; "):
        PluginHost(Fake(), name="mine", extensions=[("a", Hears("a", []))], context=CONTEXT)
    with pytest.raises(ContractError) as caught:
        Observers([("t", Wraps())])
    assert caught.value.message == (
        "extension:t implements optimizer_step, but it is called in workers only; remove it, or move it to an "
        "extension whose spec has process=Process.WORKER"
    )
