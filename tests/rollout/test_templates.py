"""Texts are compared with what transformers makes of a template in this process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from corerl.errors import ModelError
from corerl.rollout import templates
from corerl.rollout.templates import Limits, TemplateCostly, TemplateFailed, TemplateProcess
from tests.machine import paced

pytestmark = pytest.mark.processes

LIMITS = Limits(seconds=0.3, memory=2**26, characters=1000)
FOR_EVER = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
# Two objects of 2^40 leaves each, which Python compares, or writes as a text, in one operation.
DOUBLED = (
    "{% set n = namespace(a=[1], b=[1]) %}"
    "{% for i in range(40) %}{% set n.a = [n.a, n.a] %}{% set n.b = [n.b, n.b] %}{% endfor %}"
)


def chat(content: Any = "1 + 1?", **more: Any) -> dict[str, Any]:
    return {"conversations": [[{"role": "user", "content": content}]], "add_generation_prompt": True, **more}


@pytest.fixture(scope="module")
def process() -> Iterator[TemplateProcess]:
    made = TemplateProcess(LIMITS)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("template", "given"),
    [
        ("{{ bos }}{{ messages[0].content }}{% if add_generation_prompt %}>{% endif %}", chat(bos="<s>")),
        ("{{ tools | tojson }}{{ messages | length }}", chat(tools=[{"name": "\u00e9\U0001f600"}])),
        ("{{ messages[0].content }}", chat([date(2024, 2, 29), b"\xff"])),  # as a parquet file has them
        ("", chat()),
    ],
)
def test_the_text_is_that_of_transformers(template: str, given: dict[str, Any], process: TemplateProcess) -> None:
    (expected,), _ = render_jinja_template(chat_template=template, **given)
    assert process.render(template, given) == expected


@pytest.mark.parametrize(
    ("template", "kind", "why"),
    [
        (FOR_EVER, TemplateCostly, "takes more than 0.3 s of CPU time"),
        (DOUBLED + "{{ n.a == n.b }}", TemplateCostly, "takes more than 0.3 s of CPU time"),
        ("{{ 10**(10**8) }}", TemplateCostly, "takes more than 0.3 s of CPU time"),
        ("{{ 'a' * 10**10 }}", TemplateCostly, "takes more than 64 MiB of memory"),
        ("{{ '%1000000000d' % 1 }}", TemplateCostly, "takes more than 64 MiB of memory"),
        ("{{ '{:1000000000}'.format(1) }}", TemplateCostly, "takes more than 64 MiB of memory"),
        ("{{ 'a'.center(10**9) | length }}", TemplateCostly, "takes more than 64 MiB of memory"),
        ("{{ 'ab' * 501 }}", TemplateFailed, "its text has 1002 characters, at most 1000 are allowed"),
        ("{{ raise_exception('no\nsuch\x1b[31m') }}", TemplateFailed, "TemplateError: no"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", TemplateFailed, "RecursionError: "),
        ("{{ '\\ud800' }}", TemplateFailed, "UnicodeEncodeError: "),
        ("{{", TemplateFailed, "TemplateSyntaxError: "),
    ],
)
def test_what_takes_too_much_or_fails_is_told_and_the_next_one_is_rendered(
    template: str, kind: type[TemplateFailed], why: str, process: TemplateProcess
) -> None:
    with pytest.raises(TemplateFailed) as failed:
        process.render(template, chat())
    assert type(failed.value) is kind and str(failed.value).startswith(why)
    assert "\x1b" not in str(failed.value) and "\n" not in str(failed.value)
    assert process.render("{{ messages[0].content }}", chat()) == "1 + 1?"


def test_what_is_nested_too_deeply_to_be_sent_is_told(process: TemplateProcess) -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(TemplateFailed, match="^RecursionError"):
        process.render("", chat(deep))
    while deep:  # else its end overflows the stack
        deep = deep[0]


def test_a_process_that_ends_while_it_has_nothing_to_do_is_replaced(process: TemplateProcess) -> None:
    for number in (signal.SIGSEGV, signal.SIGKILL):
        assert process.render("1", chat()) == "1"
        assert process._running is not None
        os.kill(process._running._process.pid, number)
        process._running._process.wait()
        assert process.render("2", chat()) == "2"


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (signal.SIGSEGV, r"ends the process that renders it \(SIGSEGV\)"),
        (signal.SIGKILL, "lost the process that renders it, which was killed from outside,"),
    ],
)
def test_a_process_that_ends_as_it_renders_is_told_and_replaced(number: signal.Signals, said: str) -> None:
    patient = TemplateProcess(Limits(seconds=600.0))
    patient.render("", chat())
    assert patient._running is not None
    ended = patient._running._process

    def end() -> None:
        while not patient._lock.locked():
            time.sleep(0.01)
        os.kill(ended.pid, number)

    thread = threading.Thread(target=end)
    thread.start()
    with pytest.raises(TemplateCostly, match=f"^{said}$"):
        patient.render(FOR_EVER, chat())
    thread.join()
    assert patient.render("2", chat()) == "2"
    patient.close()


def test_a_thread_that_waits_for_a_text_does_not_hold_up_the_end() -> None:
    patient, told = TemplateProcess(Limits(seconds=600.0)), list[str]()
    patient.render("", chat())

    def ask() -> None:
        try:
            patient.render(FOR_EVER, chat())
        except TemplateFailed as failed:
            told.append(str(failed))

    thread = threading.Thread(target=ask)
    thread.start()
    while not patient._lock.locked():
        time.sleep(0.01)
    patient.close()
    thread.join()
    assert told and patient._running is None


def test_threads_get_their_own_texts(process: TemplateProcess) -> None:
    found: dict[int, list[str]] = {}

    def ask(number: int) -> None:
        found[number] = [process.render("{{ messages[0].content }}", chat(f"{number} {each}")) for each in range(50)]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: [f"{number} {each}" for each in range(50)] for number in range(4)}


@pytest.mark.usefixtures("forked_python")
def test_it_ends_with_the_program_that_asks_and_a_fork_of_that_has_its_own(tmp_path: Path) -> None:
    code = f"""
import os
from corerl.rollout.templates import Limits, TemplateProcess
process = TemplateProcess(Limits())
def shown():
    process.render("", {{"conversations": [[]]}})
    return process._running._process.pid
first = shown()
if os.fork():
    os.wait()
    open({str(tmp_path / "own")!r}, "w").write(f"{{first}} {{shown()}}")
else:
    open({str(tmp_path / "fork")!r}, "w").write(f"{{first}} {{shown()}}")
    process.close()
os._exit(0)  # closes nothing itself
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    first, same = map(int, (tmp_path / "own").read_text().split())
    before, other = map(int, (tmp_path / "fork").read_text().split())
    assert first == same == before != other
    for pid in (first, other):
        while Path(f"/proc/{pid}").exists():  # until it sees the end of its input
            time.sleep(0.01)


def test_one_that_cannot_start_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "START", "raise SystemExit(3)")
    with pytest.raises(ModelError, match="ended with status 3 as it started; see what .* says$"):
        TemplateProcess(LIMITS).render("", chat())


STOPS_SHORT = """
import os, struct, time
from multiprocessing.connection import Connection
theirs = Connection(0)
theirs.send_bytes(b"!")
theirs.recv_bytes()
os.write(0, struct.pack("!i", 8) + b"+123")
time.sleep(600)
"""
DEAF = """
import time
from multiprocessing.connection import Connection
theirs = Connection(0)
theirs.send_bytes(b"!")
time.sleep(600)
"""


@pytest.mark.nightly
@pytest.mark.parametrize("program", [STOPS_SHORT, DEAF], ids=["stops short", "deaf"])
def test_a_process_that_stops_in_the_middle_of_an_answer_or_does_not_read_a_question_is_ended(
    program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one may that a template has taken over."""
    monkeypatch.setattr(templates, "START", program)
    monkeypatch.setattr(templates, "WAITING", paced(5.0))  # in which it also starts
    process = TemplateProcess(LIMITS)
    with pytest.raises(TemplateCostly, match="^keeps the process that renders it from answering for "):
        process.render("x" * 2**24, chat())
    assert process._running is None
