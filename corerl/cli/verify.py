"""`corerl verify NAME`: run the conformance suite against a training backend, and say by level what holds."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from typing import Any

LEVELS = range(5)
TIMEOUT_SECONDS = 300  # for one check


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("verify", help="check that a training backend keeps the contract")
    parser.add_argument("name", metavar="NAME", help="its name, distribution:name, or package.module:SPEC")
    parser.add_argument(
        "--level",
        type=int,
        choices=LEVELS,
        default=2,
        help="0 its spec alone, 1 one process, 2 two ranks (the default), 3 GPUs, 4 under Ray; with all below",
    )
    parser.add_argument(
        "--expected-failures",
        metavar="FILE",
        help="TOML with a line for each check that may fail: C20 = 'reason, link'",
    )
    parser.add_argument("--report", metavar="FILE", help="write what each check found as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Exit status: 0 it conforms, 1 it does not, 2 it could not be checked."""
    from importlib.util import find_spec

    from corerl.errors import UserError
    from corerl.plugin.registry import Kind, load

    if find_spec("pytest") is None:
        raise UserError("verify needs pytest, which is not installed; pip install 'corerl[test]'")
    load(Kind.BACKENDS, args.name)  # so that what is wrong with a name is told as everywhere
    if args.level == 3:
        import torch

        if not torch.cuda.is_available():
            raise UserError("level 3 needs a GPU, and torch sees none here; take --level 2, or 4 to leave level 3 out")
    command = [sys.executable, "-m", "pytest", "--pyargs", "corerl.testing.suite", "-p", "corerl.testing.plugin"]
    # Nothing of the directory that it is called in, nor other plugins of pytest, decides how the suite runs.
    command += ["-c", os.devnull, "--rootdir", ".", "--import-mode=importlib", "-p", "no:cacheprovider", "--tb=short"]
    command += ["--corerl-backend", args.name, "--corerl-level", str(args.level)]
    if find_spec("pytest_timeout") is not None:  # against backends that hang; ranks of a pool have a limit of their own
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
