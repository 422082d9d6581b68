"""`corerl serve CONFIG.toml [KEY=VALUE ...]`: starts ranks and engines, prints where clients find them, and serves
until it is interrupted."""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import os
import secrets
import signal
import socket
from collections.abc import Sequence
from pathlib import Path

from attrs import evolve

from corerl.algorithms import ACTOR
from corerl.config import Config, load_with_table
from corerl.errors import ConfigError
from corerl.messages import loading, note
from corerl_tinker.options import ServeOptions

KEY_VARIABLE = "TINKER_API_KEY"  # which clients read too
KEY_START = "tml-"  # without which the SDK refuses a key
WAITING = 2048  # connections that may wait: a client sends a batch's requests at the same moment
VERSIONS = 4  # of adapters that engines hold, unless the config says: the policy, an opponent, and those before


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config", metavar="CONFIG", help="a TOML file, as for training, with a table [serve] (`corerl options serve`)"
    )
    parser.add_argument(
        "overrides", metavar="KEY=VALUE", nargs="*", default=[], help="override of CONFIG, such as serve.port=0"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    config, options = read_config(args.config, args.overrides)
    with listener(options) as listening:  # before ranks start, which takes long
        key = key_of(listening)
        loading()
        import corerl
        from corerl_tinker.app import Server
        from corerl_tinker.training import ServedPolicy

        with corerl.Engines.start(config, notify=note) as engines:
            policy = ServedPolicy(engines, options, config)
            server = Server(policy, options, key=key, listening=listening, notify=note)
            signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
            url = url_of(listening)
            print(f"serving {options.name} at {url}", flush=True)
            print(f"export TINKER_BASE_URL={url}\nexport TINKER_API_KEY={key}", flush=True)
            with contextlib.suppress(KeyboardInterrupt):  # as every server ends
                server.run()
    return 0


# ---- before anything starts ------------------------------------------------------------------------------------------


def check(file: str, overrides: Sequence[str]) -> Sequence[str]:
    """What `corerl config check` says of a file that has the table `[serve]`. Raises UserError as `corerl serve` would
    before it starts anything."""
    from corerl.plan import plan_group
    from corerl_tinker.training import require_servable

    config, options = read_config(file, overrides)
    plan = plan_group(config, ACTOR, resume="", engines_in=Path.cwd())
    require_servable(options, lora=config.lora, objective=plan.role.objective)
    return plan.notices


def read_config(file: str, overrides: Sequence[str]) -> tuple[Config, ServeOptions]:
    """What ranks and engines are, and how they are served. Raises ConfigError with one line for each problem."""
    config, options = load_with_table(file, overrides, table="serve", options=ServeOptions)
    name = options.name or config.model.path
    if not name:
        raise ConfigError("serve.name is empty, and there is no model.path; set it to what clients call the model")
    if not config.model.tokenizer and not config.model.path:
        raise ConfigError(
            "model.tokenizer is empty, and there is no model.path; set it: which tokens end an answer, and what texts "
            "of clients stop one, follow from the tokenizer"
        )
    if config.weights.lora == "adapter" and config.weights.versions == 1:
        config = evolve(config, weights=evolve(config.weights, versions=VERSIONS))
    return config, evolve(options, name=name)


def key_of(listening: socket.socket) -> str:
    """The key of clients. Raises ConfigError, which does not show it, if there must be one, and is none."""
    key, address = os.environ.get(KEY_VARIABLE, ""), listening.getsockname()[0]
    if not key and ipaddress.ip_address(address).is_loopback:
        return KEY_START + secrets.token_urlsafe(24)
    if not (key.startswith(KEY_START) and len(key) >= 16 and key.isascii() and key.isprintable()):
        raise ConfigError(
            f"serve.address={address}: {KEY_VARIABLE} is no key; set it to {KEY_START!r}, as clients demand, "
            "and at least 12 random characters of ASCII; other machines reach a server only by a key that was chosen, "
            "and a proxy should add TLS"
        )
    return key


def listener(options: ServeOptions) -> socket.socket:
    """Raises ConfigError if the address cannot be listened on."""
    family = socket.AF_INET6 if ":" in options.address else socket.AF_INET
    try:
        return socket.create_server((options.address, options.port), family=family, backlog=WAITING)
    except OSError as error:
        raise ConfigError(
            f"serve.address={options.address}, serve.port={options.port}: {error}; choose an address of this machine, "
            "and another port, or 0 for any that is free"
        ) from error


def url_of(listening: socket.socket) -> str:
    """For clients on this machine."""
    address, port = listening.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
