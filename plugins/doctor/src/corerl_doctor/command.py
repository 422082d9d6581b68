"""`corerl doctor [NAME | RUN] [--config FILE [--nodes] [--layers]] [--json]`: what is wrong, why, and how to fix it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from corerl.plugin import Finding


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", metavar="NAME", nargs="?", default="", help="a plugin, with everything it needs; or a run's directory"
    )
    parser.add_argument(
        "overrides",
        metavar="KEY=VALUE",
        nargs="*",
        default=[],
        help="override of --config, such as cluster.address=auto",
    )
    parser.add_argument("--config", metavar="FILE", default="", help="a TOML file, with all plugins it selects")
    parser.add_argument("--nodes", action="store_true", help="also ask every node of the config's cluster.address")
    parser.add_argument(
        "--layers",
        action="store_true",
        help="also compare how the config's model is trained with transformers' own code, layer by layer",
    )
    parser.add_argument("--json", action="store_true", help="as a JSON array, for programs")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Exit status: 1 if a finding is an error, else 0."""
    from pathlib import Path

    from corerl.config import CONFIG_FILE
    from corerl.errors import ConfigError
    from corerl.messages import printable
    from corerl.plugin import Level
    from corerl_doctor.examine import examine

    name, overrides, run_dir = args.name, list(args.overrides), ""
    if "=" in name:
        name, overrides = "", [name, *overrides]
    if name and not args.config and (Path(name) / CONFIG_FILE).is_file():
        args.config, run_dir, name = str(Path(name) / CONFIG_FILE), name, ""
    if overrides and not args.config:
        raise ConfigError(f"{overrides[0]!r} is an override, but there is no config; pass --config FILE")
    if args.nodes and not _address(args.config, overrides):
        raise ConfigError("--nodes needs a cluster; pass --config FILE with cluster.address")
    if args.layers and not args.config:
        raise ConfigError("--layers needs a model; pass --config FILE")
    findings = []
    for finding in examine(
        name, file=args.config, overrides=overrides, nodes=args.nodes, layers=args.layers, run_dir=run_dir
    ):
        findings.append(finding)
        if not args.json:
            print("\n".join(_lines(finding)), flush=True)  # as they come, since importing takes a while
    print(_json(findings) if args.json else _summary(findings))
    errors = [finding for finding in findings if finding.level is Level.ERROR]
    if errors:  # also where stdout is read by a program, or by nobody
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        print(f"corerl: error: {printable(errors[0].what)}{more}", file=sys.stderr)
    return 1 if errors else 0


def _address(file: str, overrides: Sequence[str]) -> str:
    from corerl.config import load_config

    return load_config(file, overrides).cluster.address if file else ""


def _lines(finding: Finding) -> list[str]:
    from corerl.messages import printable

    lines = [f"{finding.level:<8} {finding.what}"]
    if finding.why:
        lines.append(f"{'':<8}   why: {finding.why}")
    if finding.fix:
        lines.append(f"{'':<8}   fix: {finding.fix}")
    return [printable(line) for line in lines]


def _summary(findings: Sequence[Finding]) -> str:
    counts = {level: sum(finding.level == level for finding in findings) for level in ("error", "warning")}
    words = [f"{count} {level}{'s' * (count != 1)}" for level, count in counts.items() if count]
    return ", ".join(words) or "no problems found"


def _json(findings: Sequence[Finding]) -> str:
    import json

    from attrs import asdict

    return json.dumps([asdict(finding) for finding in findings], indent=2)
