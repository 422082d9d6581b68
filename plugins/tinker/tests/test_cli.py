"""`corerl serve`: configs that are wrong, keys, addresses, and what is printed."""

from __future__ import annotations

import gc
import os
import signal
import socket
from pathlib import Path

import pytest
import tinker
import tomli_w
from tinker import types

from corerl.errors import ConfigError, UserError
from corerl_testing import main
from corerl_tinker.cli import KEY_VARIABLE, check, key_of, listener, read_config, url_of
from corerl_tinker.options import ServeOptions
from plugins.tinker.tests.recipes.conftest import printed
from plugins.tinker.tests.served import ADAM, CONFIG, LORA, MODEL
from tests.end_to_end.command import Command

# The SDK never closes the connections by which it asks for its own configuration.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")

TOML = """
[backend]
name = "plain"

[model]
path = "somewhere/Qwen3-8B"

[serve]
aliases = ["Qwen/Qwen3-8B"]
port = 0
"""
KEY = "tml-0123456789abcdef"
EXAMPLE = str(Path(__file__).parents[3] / "examples" / "serve.toml")


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "server.toml"
    path.write_text(TOML)
    return str(path)


def test_a_table_and_overrides_become_a_config_and_options(file: str) -> None:
    config, options = read_config(file, ["serve.port=7", "model.tower=trained", 'serve.hosts=["a"]'])
    assert (config.model.path, config.model.tower) == ("somewhere/Qwen3-8B", "trained")
    assert options == ServeOptions(name="somewhere/Qwen3-8B", aliases=("Qwen/Qwen3-8B",), port=7, hosts=("a",))


def test_engines_hold_several_versions_of_adapters(file: str) -> None:
    adapters = ["lora.rank=8", "weights.lora=adapter"]
    for overrides, versions in ((adapters[:1], 1), (adapters, 4), ([*adapters, "weights.versions=2"], 2)):
        assert read_config(file, overrides)[0].weights.versions == versions


def test_the_example_is_read() -> None:
    config, options = read_config(EXAMPLE, [])
    assert (config.backend.name, config.roles.actor.ranks, config.lora and config.lora.rank) == ("fsdp", 2, 32)
    assert (options.name, options.directory) == ("small", "runs/served")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[backend]\nname = 'plain'", "serve.name is empty, and there is no model.path"),
        ("backend.name = 'plain'\n[serve]\nname = 'small'", "model.tokenizer is empty, and there is no model"),
    ],
)
def test_what_is_missing_is_one_line(tmp_path: Path, text: str, line: str) -> None:
    path = tmp_path / "server.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as wrong:
        read_config(str(path), [])
    assert line in wrong.value.message and "\n" not in wrong.value.message


def test_a_servers_config_is_refused_by_train(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", EXAMPLE]) == 2
    wanted = f"{EXAMPLE}: the table [serve] makes it a config of another command; run: corerl serve {EXAMPLE}"
    assert capsys.readouterr().err == f"corerl: error: {wanted}\n"


def test_config_check_says_what_serve_would() -> None:
    plain = ["backend.name=plain", "roles.actor.ranks=1"]
    assert check(EXAMPLE, plain) == ()
    for override, said in (
        ("serve.port=many", r"serve.port: expected integer, got string 'many' \(override serve.port\)"),
        ("model.config.num_key_value_heads=3", "num_key_value_heads"),
        ("algorithm.aggregation=sequence-mean", "algorithm.aggregation: the losses of this server are plain sums"),
        ('serve.teachers={a="b"}', r"serve.teachers: with a table \[lora\], ranks hold"),
    ):
        with pytest.raises(UserError, match=said):
            check(EXAMPLE, [*plain, override])


def test_other_machines_need_a_key_that_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    with listener(ServeOptions(port=0)) as here, listener(ServeOptions(address="0.0.0.0", port=0)) as everywhere:
        assert key_of(here).startswith("tml-") and len(key_of(here)) > 30 and key_of(here) != key_of(here)
        with pytest.raises(ConfigError, match="serve.address=0.0.0.0: TINKER_API_KEY is no key; set it to 'tml-'"):
            key_of(everywhere)
        monkeypatch.setenv(KEY_VARIABLE, KEY)
        assert key_of(everywhere) == key_of(here) == KEY
        for wrong in ("tml-short", "secret-0123456789abcdef", "tml-0123456789abcd\u00e9"):
            monkeypatch.setenv(KEY_VARIABLE, wrong)
            with pytest.raises(ConfigError, match="TINKER_API_KEY is no key") as refused:
                key_of(here)
            assert wrong not in refused.value.message


HOSTS = {"127.0.0.1": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::1": "[::1]", "::": "[::1]"}


@pytest.mark.parametrize(("address", "host"), HOSTS.items())
def test_the_url_leads_to_the_server(address: str, host: str) -> None:
    with listener(ServeOptions(address=address, port=0)) as listening:
        port = listening.getsockname()[1]
        assert url_of(listening) == f"http://{host}:{port}"
        socket.create_connection((host.strip("[]"), port)).close()
        with pytest.raises(ConfigError, match=f"serve.port={port}: .*Address already in use"):
            listener(ServeOptions(address=address, port=port))
        with pytest.raises(ConfigError, match="serve.address=nowhere.invalid, .*; choose an address"):
            listener(ServeOptions(address="nowhere.invalid", port=0))


@pytest.mark.processes
def test_the_command_serves_until_it_is_stopped(tmp_path: Path) -> None:
    serve = {"name": MODEL, "port": 0, "directory": "checkpoints"}
    (tmp_path / "server.toml").write_text(tomli_w.dumps({**CONFIG, **LORA, "serve": serve}))
    with Command("serve", "server.toml", logs=tmp_path, directory=tmp_path) as command:
        given = command.until(lambda: printed(command.out), "serving")
        assert command.out.splitlines()[0] == f"serving tiny at {given['TINKER_BASE_URL']}"
        client = tinker.ServiceClient(base_url=given["TINKER_BASE_URL"], api_key=given["TINKER_API_KEY"])
        training = client.create_lora_training_client(MODEL, rank=4).result()
        inputs = {"target_tokens": [7, 8, 9], "weights": [1.0, 1.0, 1.0]}
        row = types.Datum(model_input=types.ModelInput.from_ints([1, 7, 8]), loss_fn_inputs=inputs)
        losses = []
        for _ in range(3):
            passed, stepped = training.forward_backward([row], "cross_entropy"), training.optim_step(ADAM)
            losses.append(passed.result().metrics["loss:sum"])
            assert stepped.result().metrics["applied"] == 1.0
        assert losses[0] > losses[1] > losses[2]
        sampler = training.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=4, stop=[])
        found = sampler.sample(types.ModelInput.from_ints([1, 2]), 2, params).result()
        assert [len(sequence.tokens) for sequence in found.sequences] == [4, 4]
        client.close("success").result()
        del client, training, sampler
        gc.collect()
        os.kill(command.process.pid, signal.SIGTERM)
        assert (command.finish(), command.err) == (0, "")
