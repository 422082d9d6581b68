"""`corerl new-backend NAME [DIR]`: write a package with a working training backend, as a starting point."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

TEMPLATE = Path(__file__).parent / "backend_template"  # a complete package for the name "mine"
LONGEST = 24  # characters, so that no line of the template exceeds the line length


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", metavar="NAME", help="the backend's name, for backend.name of a run: a-z, 0-9 and hyphens"
    )
    parser.add_argument("directory", metavar="DIR", nargs="?", help="a new or empty directory; default: NAME")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Exit status: 0 on success."""
    check_name(args.name)
    directory = Path(args.directory or args.name)
    written = generate(args.name, directory)
    print(f"wrote the backend {args.name!r} to {directory}: {len(written)} files (README.md comes first); now:")
    where = directory if directory.is_absolute() else f"./{directory}"  # pip takes a bare word for a package name
    print(f"  pip install -e {shlex.quote(f'{where}[test]')}")
    print(f"  corerl verify {args.name}")
    print(f"  corerl train {shlex.quote(str(directory / 'quickstart.toml'))}")
    return 0


def check_name(name: str) -> None:
    """Raise UserError if the name is invalid or already taken."""
    from corerl.errors import UserError
    from corerl.plugin import EXTRAS, Kind, installed_names, scan

    if not re.fullmatch("[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        raise UserError(
            f"invalid backend name {name!r}; use lower-case letters, digits and single hyphens, a letter first"
        )
    if len(name) > LONGEST:
        raise UserError(f"the name {name!r} is {len(name)} characters long; use {LONGEST} at most")
    for entry in scan(Kind.BACKENDS):
        if entry.name == name:
            raise UserError(
                f"a backend {name!r} already exists, in {entry.distribution} {entry.version}; choose another name"
            )
    if name in (*installed_names(Kind.BACKENDS), *EXTRAS[Kind.BACKENDS]):
        raise UserError(
            f"{name!r} is the name of one of CoreRL's own backends, not installed here; choose another name"
        )


def generate(name: str, directory: Path) -> list[Path]:
    """Write the template's files, renamed, to `directory`. Raises UserError unless that is new or empty."""
    from corerl.errors import UserError

    try:
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise UserError(f"{directory} exists and is not an empty directory; choose another one")
        written = []
        for source in sorted(TEMPLATE.rglob("*")):
            if source.is_dir() or "__pycache__" in source.parts:  # pip compiles the template too
                continue
            target = directory / renamed(str(source.relative_to(TEMPLATE)), name)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(renamed(source.read_text(encoding="utf-8"), name), encoding="utf-8")
            written.append(target)
    except OSError as error:
        raise UserError(f"cannot write to {directory}: {error.strerror}; choose another directory") from error
    return written


def renamed(text: str, name: str) -> str:
    """`text` with the template's name replaced by `name`: in mine, the module corerl_mine, the class MineBackend."""
    words = {"corerl_mine": f"corerl_{name.replace('-', '_')}", "Mine": name.title().replace("-", ""), "mine": name}
    return re.sub("|".join(words), lambda word: words[word[0]], text)
