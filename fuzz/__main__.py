"""`python -m fuzz --minutes 60 --seed 0 [--only KIND]`: try random cases until the time is up; keep what is found.

Cases run in a forked child, some dozens in each, so that one that ends its process, or leaves something behind, is seen
and costs the others nothing. A finding's smallest case is written to `fuzz/corpus/`, which tests/test_fuzz.py replays.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import gc
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
import zlib
from importlib import import_module
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Flaky

from fuzz.case import KINDS, Case
from fuzz.cases import STRATEGIES
from fuzz.doors import WAITING, Finding, surroundings, try_case
from fuzz.inputs import write_inputs

CORPUS = Path(__file__).parent / "corpus"
INPUTS_OF_A_CHILD = 40
STUCK = 2 * WAITING + 60  # seconds after which a case that does not react to its alarm is ended from outside
SHRINKING = 50  # cases that are tried to make a finding smaller


class Found(Exception):
    """A finding of a kind that is not known yet."""


class Enough(BaseException):
    """A finding has been made smaller for long enough."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description="Look for inputs that are answered badly.")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=KINDS, default="")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="corerl-inputs-") as directory:
        inputs = Path(directory)
        write_inputs(inputs)
        import_module("corerl.plan.models")  # here, instead of in every child
        from corerl.cli.main import main as command

        with contextlib.redirect_stdout(sys.stderr):
            command(["config", "check", "texts.toml"])
        gc.collect()
        gc.freeze()  # children neither walk nor copy what is there by now
        return search(args.minutes, args.seed, [args.only] if args.only else list(KINDS), inputs)


def search(minutes: float, first_seed: int, kinds: list[str], inputs: Path) -> int:
    started = time.monotonic()
    tried: collections.Counter[str] = collections.Counter()
    known: dict[str, str] = {}
    number, reported_at = 0, started
    while time.monotonic() - started < 60 * minutes:
        kind = kinds[number % len(kinds)]
        for reported in child(kind, first_seed, number, set(known), inputs):
            tried[kind] += reported.get("tried", 0)
            if "key" in reported and reported["key"] not in known:
                known[reported["key"]] = kind
                keep(reported, first_seed, number)
        number += 1
        if time.monotonic() > reported_at + 60:
            reported_at = time.monotonic()
            print(f"{(time.monotonic() - started) / 60:.1f} min: {dict(tried)}, {len(known)} findings", flush=True)
    found = collections.Counter(known.values())
    print(f"{sum(tried.values())} inputs in {minutes:g} minutes from seed {first_seed}: {dict(tried)}")
    print(f"{sum(found.values())} kinds of findings: {dict(found)}")
    for key, kind in known.items():
        print(f"  {kind}: {key}")
    return 1 if known else 0


def keep(reported: dict[str, Any], first_seed: int, number: int) -> None:
    name = f"{reported['case']['kind']}-{zlib.crc32(reported['key'].encode()):08x}.json"
    content = {"found": reported["key"], "seed": [first_seed, number], "case": reported["case"]}
    CORPUS.mkdir(exist_ok=True)
    (CORPUS / name).write_text(json.dumps(content, indent=1) + "\n")
    print(f"{name}: {reported['key']}\n    {reported['text'][-700:]}", flush=True)


# ---- a child ---------------------------------------------------------------------------------------------------------


def child(kind: str, first_seed: int, number: int, known: set[str], inputs: Path) -> list[dict[str, Any]]:
    """What a forked child reports of its cases; of one that dies or hangs, its last case."""
    scratch = Path(tempfile.mkdtemp(prefix="corerl-child-"))
    now, reported = scratch / "now", scratch / "reported"
    pid = os.fork()
    if not pid:
        status = 1
        try:
            os.setsid()
            with (scratch / "streams").open("wb") as streams:
                for descriptor in (1, 2):
                    os.dup2(streams.fileno(), descriptor)
            _cases(kind, (first_seed, number), known, inputs, now, reported)
            status = 0
        except BaseException:
            (scratch / "died").write_text(traceback.format_exc())
        finally:
            os._exit(status)
    ended = _wait(pid, now)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # what its cases started
    lines = [json.loads(line) for line in reported.read_text().splitlines()] if reported.exists() else []
    if ended and (scratch / "died").exists():
        print(f"the fuzzer itself failed: {(scratch / 'died').read_text()[-1500:]}", flush=True)
    elif ended and not now.exists():
        print(f"a child {ended} before its first case: the machine may lack memory", flush=True)
    elif ended:
        case = json.loads(now.read_text())
        key = f"{ended} in {' '.join(case['command'][:2])}"
        shown = (scratch / "streams").read_bytes()[:1500].decode("utf-8", "replace")
        lines.append({"key": key, "text": shown, "case": case})
    shutil.rmtree(scratch)
    return lines


def _wait(pid: int, now: Path) -> str:
    """Why the child ended early; "" if it did not."""
    started = time.time()
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            return f"status {code}" if code else ""
        begun = now.stat().st_mtime if now.exists() else started
        if time.time() - begun > STUCK:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return "hang that ignores its alarm"
        time.sleep(0.02)


def _cases(kind: str, seeds: tuple[int, int], known: set[str], inputs: Path, now: Path, reported: Path) -> None:
    left, round_ = INPUTS_OF_A_CHILD, 0
    strategy = STRATEGIES[kind]()

    def report(**what: Any) -> None:
        with reported.open("a") as file:
            file.write(json.dumps(what) + "\n")

    newest: list[tuple[Finding, Case]] = []
    with surroundings():
        while left > 0:
            newest.clear()
            count = since = 0

            @seed(f"{seeds} {round_}")
            @settings(
                max_examples=left,
                database=None,
                deadline=None,
                suppress_health_check=list(HealthCheck),
                phases=[Phase.generate, Phase.shrink],
                report_multiple_bugs=False,
            )
            @given(strategy)
            def one(case: Case) -> None:
                nonlocal count, since
                now.write_text(json.dumps(case.to_json()))
                count += 1
                since += bool(newest)
                if since > SHRINKING:
                    raise Enough
                finding = try_case(case, inputs)
                if finding is None or finding.key in known or (newest and newest[0][0].key != finding.key):
                    return
                newest.append((finding, case))
                if finding.key.startswith(("Hang", "slow", "ok, then Hang")):  # too slow to be made smaller
                    report(key=finding.key, text=finding.text, case=case.to_json())
                    known.add(finding.key)
                    newest.clear()
                    return
                raise Found(finding.key)

            try:
                one()
                left = 0
            except (Found, Enough, Flaky):  # what is found does not always come again
                finding, case = min(newest, key=lambda each: len(json.dumps(each[1].to_json())))
                known.add(finding.key)
                report(key=finding.key, text=finding.text, case=case.to_json())
                left -= 10
            finally:
                report(tried=count)
            round_ += 1


if __name__ == "__main__":
    sys.exit(main())
