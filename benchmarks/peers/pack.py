"""Pack the wheels of verl.txt for a machine without a network, in parts that are small enough to be sent.

python -m benchmarks.peers.pack --output .gpu/verl         # on a machine with a package index
bash .gpu/verl/00/install /opt/site                        # there, each part in turn: the last one installs all

The wheels are for CPython 3.12 on x86-64 Linux.
"""

from __future__ import annotations

import argparse
import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PINS = Path(__file__).with_name("verl.txt")
PART_BYTES = 56_000_000
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 26, 24, 17, 12, 5)]
# Source releases alone, of pure Python.
SOURCES = ("antlr4-python3-runtime",)
INSTALL = """#!/bin/bash
# Run with the directory to install into, once a part; the one that completes the parts installs them all.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
kept=${TMPDIR:-/tmp}/peers-verl
mkdir -p "$kept"
mv "$here/part" "$kept/$(basename "$here")"
parts=("$kept"/[0-9][0-9])
echo "part $(basename "$here"): ${#parts[@]} of $(cat "$here/of")"
[ "${#parts[@]}" -eq "$(cat "$here/of")" ] || exit 0
mkdir -p "$kept/wheels"
cat "${parts[@]}" | tar x -C "$kept/wheels"
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$1" "$kept"/wheels/*.whl
rm -rf "$kept"
"""


def fetch(requirement: str, folder: Path) -> None:
    """One wheel, without what it depends on."""
    pip = [sys.executable, "-m", "pip"]
    if requirement.startswith(SOURCES):
        command = [*pip, "wheel", "-q", "--no-deps", "-w", str(folder), requirement]
    else:
        platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
        wanted = ["--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp", *platforms]
        command = [*pip, "download", "-q", "--no-deps", *wanted, "-d", str(folder), requirement]
    subprocess.run(command, check=True)


def main() -> None:
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("--output", type=Path, default=Path(".gpu/verl"))
    args = command.parse_args()
    packed = io.BytesIO()
    with tempfile.TemporaryDirectory(prefix="wheels-") as name:
        folder = Path(name)
        for line in PINS.read_text().splitlines():
            if requirement := line.partition("#")[0].strip():
                fetch(requirement, folder)
        with tarfile.open(fileobj=packed, mode="w") as tar:
            for wheel in sorted(folder.glob("*.whl")):
                print(wheel.name, wheel.stat().st_size)
                tar.add(wheel, arcname=wheel.name)
    shutil.rmtree(args.output, ignore_errors=True)
    whole = packed.getvalue()
    starts = range(0, len(whole), PART_BYTES)
    for number, start in enumerate(starts):
        part = args.output / f"{number:02d}"
        part.mkdir(parents=True)
        (part / "part").write_bytes(whole[start : start + PART_BYTES])
        (part / "install").write_text(INSTALL)
        (part / "of").write_text(f"{len(starts)}\n")
    print(f"{len(whole) / 1e6:.0f} MB in {len(starts)} parts under {args.output}")


if __name__ == "__main__":
    main()
