"""`corerl verify NAME`: run the conformance suite on a training backend, and report results by level."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from typing import Any

LEVELS = range(5)
TIMEOUT_SECONDS = 300  # for one check


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("verify", help="check that a training backend meets the contract")
    parser.add_argument("name", metavar="NAME", help="its name, distribution:name, or package.module:SPEC")
    parser.add_argument(
        "--level",
        type=int,
        choices=LEVELS,
        default=2,
        help="0 spec only, 1 one process, 2 two ranks (the default), 3 GPUs, 4 under Ray; includes all lower levels",
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

    from corerl.cli.trial import require_plugins
    from corerl.errors import UserError
    from corerl.plugin.registry import Kind, load

    if find_spec("pytest") is None:
        raise UserError("verify needs pytest, which is not installed; pip install 'corerl[test]'")
    require_plugins([(Kind.BACKENDS, args.name)])
    load(Kind.BACKENDS, args.name)  # reports a wrong name as everywhere else
    if args.level == 3:
        import torch

        if not torch.cuda.is_available():
            raise UserError("level 3 needs a GPU, but torch sees none here; use --level 2, or 4 to skip level 3")
    command = [sys.executable, "-m", "pytest", "--pyargs", "corerl.testing.suite", "-p", "corerl.testing.plugin"]
    # Neither the current directory nor other pytest plugins may influence how the suite runs.
    command += ["-c", os.devnull, "--rootdir", ".", "--import-mode=importlib", "-p", "no:cacheprovider", "--tb=short"]
    command += ["--corerl-backend", args.name, "--corerl-level", str(args.level)]
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
