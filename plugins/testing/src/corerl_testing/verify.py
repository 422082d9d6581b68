"""`corerl verify NAME` and `corerl verify --algorithm NAME`: run the conformance suite on a training backend or on an
algorithm, and report results by level."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys

LEVELS = range(5)
DEFAULT_LEVEL = 2
TIMEOUT_SECONDS = 300  # for one check


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "names",
        metavar="NAME",
        nargs="*",
        help="the backend's name, distribution:name, or package.module:SPEC; with --algorithm only settings, each "
        "KEY=VALUE, as `corerl train` takes them",
    )
    parser.add_argument("--algorithm", metavar="NAME", help="check this algorithm; it takes seconds and starts no rank")
    parser.add_argument(
        "--option",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="an option of the backend's own to check it with, instead of the defaults and the variants of its spec; "
        "may be given several times",
    )
    parser.add_argument(
        "--level",
        type=int,
        choices=LEVELS,
        help="0 spec only, 1 one process, 2 two ranks and the spec's variants (the default), 3 GPUs, 4 under Ray; "
        "includes all lower levels; of an algorithm 0 and 1",
    )
    parser.add_argument(
        "--check",
        metavar="ID",
        action="append",
        default=[],
        help="only this check, such as C15, with all that it builds on; may be given several times",
    )
    parser.add_argument(
        "--expected-failures",
        metavar="FILE",
        help="TOML file with one line per check that may fail: C20 = 'reason, link'",
    )
    parser.add_argument("--report", metavar="FILE", help="write the result of each check as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Exit status: 0 it conforms, 1 it does not, 2 it could not be checked."""
    from importlib.util import find_spec

    asked = _backend(args) if args.algorithm is None else _algorithm(args)
    suite = "corerl_testing.suite" if args.algorithm is None else "corerl_testing.algorithm_suite"
    command = [sys.executable, "-m", "pytest", "--pyargs", suite, "-p", "corerl_testing.plugin"]
    # Neither the current directory, nor the conftest.py of a checkout above the suite, nor other pytest plugins may
    # influence how the suite runs.
    command += ["-c", os.devnull, "--rootdir", ".", "--noconftest", "--import-mode=importlib"]
    command += ["-p", "no:cacheprovider", "--tb=short"]
    command += asked
    for check in args.check:
        command += ["--corerl-check", check]
    if find_spec("pytest_timeout") is not None:  # against backends that hang; pool ranks have their own limit
        command += ["-p", "pytest_timeout", "--timeout", str(TIMEOUT_SECONDS)]
    if args.expected_failures:
        command += ["--corerl-expected-failures", args.expected_failures]
    if args.report:
        command += ["--corerl-report", args.report]
    path = [os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        "OMP_NUM_THREADS": "1",  # ranks share the cores
        **os.environ,
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONPATH": os.pathsep.join(path),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    environment.pop("PYTEST_ADDOPTS", None)
    status = subprocess.run(command, env=environment, check=False).returncode
    return status if status in (0, 1) else 2


def _backend(args: argparse.Namespace) -> list[str]:
    """The arguments of pytest for the backend. Raises CorerlError for an unknown name."""
    from corerl.config import config_of
    from corerl.errors import UserError
    from corerl.plan.resolve import resolve_tables
    from corerl.plugin import Kind, load

    if options := [each for each in args.names if "=" in each]:
        raise UserError(
            f"{options[0]}: options of a backend are given as --option KEY=VALUE; try models and training settings in "
            "a run"
        )
    if len(args.names) != 1:
        got = f"got {len(args.names)} names" if args.names else "got none"
        raise UserError(f"verify takes the name of one backend, {got}; write corerl verify NAME, or --algorithm NAME")
    if bare := [each for each in args.option if "=" not in each]:
        raise UserError(f"--option {bare[0]}: expected KEY=VALUE")
    (name,) = args.names
    loaded = load(Kind.BACKENDS, name)  # reports a wrong name as everywhere else
    overrides = [f"backends.{json.dumps(loaded.name)}.{option}" for option in args.option]
    resolve_tables(config_of({"backend": {"name": name}, "rollout": {"engine": "fake"}}, overrides))
    if args.level == 3:
        import torch

        if not torch.cuda.is_available():
            raise UserError("level 3 needs a GPU, but torch sees none here; use --level 2, or 4 to skip level 3")
    level = DEFAULT_LEVEL if args.level is None else args.level
    given = [f"--corerl-override={each}" for each in overrides]
    return ["--corerl-backend", name, *given, "--corerl-level", str(level)]


def _algorithm(args: argparse.Namespace) -> list[str]:
    """The arguments of pytest for the algorithm. Raises CorerlError if its name is unknown, or a setting is wrong or a
    backend's."""
    from corerl.config import config_of
    from corerl.errors import UserError
    from corerl.plan.resolve import resolve_tables
    from corerl.plugin import Kind, load

    if args.option:
        raise UserError(f"--option {args.option[0]}: is of a backend; write the settings of an algorithm without it")
    load(Kind.ALGORITHMS, args.algorithm)
    given = {"backend": {"name": "plain"}, "rollout": {"engine": "fake"}, "algorithm": {"name": args.algorithm}}
    resolve_tables(config_of(given, args.names))
    level = 1 if args.level is None else min(args.level, 1)
    overrides = [f"--corerl-override={each}" for each in args.names]
    return ["--corerl-algorithm", args.algorithm, *overrides, "--corerl-level", str(level)]
