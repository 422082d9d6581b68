"""Run the benchmarks one after the other, each in its own process, and write one markdown file.

python -m benchmarks.run --output benchmarks/results/two-cores.md
python -m benchmarks.run --only dispatch train_step --rounds 3 --trial
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.report import ROOT, Report, document, environment, load

# Command -> arguments of a trial, which only shows that the benchmark runs.
BENCHMARKS = {
    "dispatch": ["--size", "64", "--calls", "20"],
    "plugins": ["--size", "2", "--calls", "100", "--starts", "1"],
    "packing": ["--size", "500"],
    "episodes": ["--size", "16"],
    "train_step fsdp-cpu fsdp-cpu-4m": ["--tiny"],
    "weight_update collective-cpu delta-cpu": ["--tiny"],
    "quickstart": ["--size", "5"],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [name.split()[0] for name in BENCHMARKS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--rounds", type=int, help="of every benchmark, instead of each one's own")
    parser.add_argument("--trial", action="store_true", help="small sizes, to see that everything runs")
    parser.add_argument("--output", type=Path, help="the markdown file; without it, it is printed")
    args = parser.parse_args()
    load_before = os.getloadavg()[0]
    reports: list[Report] = []
    failures: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="corerl-benchmarks-") as scratch:
        for words, trial in BENCHMARKS.items():
            name, *cases = words.split()
            if name not in args.only:
                continue
            print(f"{name} ...", file=sys.stderr, flush=True)
            found = Path(scratch) / f"{name}.json"
            command = [sys.executable, "-m", f"benchmarks.{name}", *cases, "--output", str(found)]
            if args.rounds:
                command += ["--rounds", str(args.rounds)]
            if args.trial:
                command += trial
            code = subprocess.run(command, cwd=ROOT, env=environment()).returncode
            if code == 0:
                reports.append(load(found))
            else:
                failures[name] = f"`{shlex.join(command)}` ended with {code}"
    command_line = shlex.join(["python", "-m", "benchmarks.run", *sys.argv[1:]])
    text = document(reports, command=command_line, failures=failures, load_before=load_before)
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(text)
    else:
        print(text)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
