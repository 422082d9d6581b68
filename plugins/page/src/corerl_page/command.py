"""`corerl view RUN [RUN ...]`: a page on one or several runs, finished or going on."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

from corerl.errors import ConfigError
from corerl.messages import did_you_mean_path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", type=Path, nargs="+", help="a run's directory, finished or going on")
    parser.add_argument("--port", type=int, default=0, help="default: one that is free")
    parser.add_argument(
        "--address", default="127.0.0.1", help="IP address to listen on; default: 127.0.0.1, this machine alone"
    )
    parser.add_argument(
        "--host-name", action="append", default=[], help="a name under which browsers reach it, besides localhost"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from corerl_page.runs import FILES
    from corerl_page.server import Server

    for path in args.runs:
        if not path.is_dir():
            raise ConfigError(f"no run at {path}, which does not exist{did_you_mean_path(path)}")
        if not any((path / name).exists() for name in FILES):
            raise ConfigError(f"{path} is not a run's directory: it has none of {', '.join(FILES)}")
    server = Server(args.runs, address=args.address, port=args.port, hosts=args.host_name)
    server.start()
    print(server.url, flush=True)
    with contextlib.suppress(KeyboardInterrupt):  # as every server ends
        server.wait()
    server.stop()
    return 0
