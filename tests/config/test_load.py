"""From file and overrides to a Config and back, and every way in which that fails."""

from pathlib import Path

import pytest

from corerl.config.load import as_config, config_of, dump_toml, load_config
from corerl.config.schema import (
    BackendChoice,
    Config,
    ExtensionChoice,
    ModelConfig,
    OptimizerConfig,
    RoleChoice,
    RolesConfig,
    RolloutConfig,
    TrainConfig,
)
from corerl.errors import ConfigError

SMALLEST = '[backend]\nname = "plain"\n'


def write(directory: Path, text: str) -> Path:
    path = directory / "run.toml"
    path.write_text(text)
    return path


def problems_of(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return caught.value.message.splitlines()


def test_as_config_takes_a_path_a_mapping_or_a_config(tmp_path: Path) -> None:
    data = {"backend": {"name": "plain"}, "run": {"steps": 7}}
    file = tmp_path / "run.toml"
    file.write_text(dump_toml(config_of(data)))
    config = config_of(data)
    for source in (file, str(file), data, config):
        assert as_config(source) == config
        assert as_config(source, ["run.steps=3"]) == config_of({**data, "run": {"steps": 3}})
    assert as_config(config) is config
    with pytest.raises(ConfigError, match="^got a int, wanted a corerl.Config, a mapping, or a TOML file's path$"):
        as_config(7)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="^overrides: got the text 'run.steps=3', wanted a list of texts$"):
        as_config(data, "run.steps=3")


def test_tables_become_classes_with_the_fields_types(tmp_path: Path) -> None:
    text = (
        SMALLEST
        + """
        [model.config]
        model_type = "qwen3"
        hidden_size = 64
        [train.optimizer]
        lr = 1
        betas = [0, 0.5]
        [rollout]
        stop = ["a", "b"]
        [roles.actor.train]
        epochs = 3
        [[extensions]]
        name = "profiler"
        options = { every = 50 }
        """
    )
    config = load_config(write(tmp_path, text))
    assert config == Config(
        backend=BackendChoice(name="plain"),
        model=ModelConfig(config={"model_type": "qwen3", "hidden_size": 64}),
        train=TrainConfig(optimizer=OptimizerConfig(lr=1.0, betas=(0.0, 0.5))),
        rollout=RolloutConfig(stop=("a", "b")),
        roles=RolesConfig(actor=RoleChoice(train=TrainConfig(epochs=3))),
        extensions=(ExtensionChoice(name="profiler", options={"every": 50}),),
    )
    assert type(config.train.optimizer.lr) is float and type(config.train.optimizer.betas) is tuple


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("algorithm.entropy_coef=0.28", ("algorithm", "entropy_coef"), 0.28),
        ("checkpoint.background=false", ("checkpoint", "background"), False),
        ("rollout.stop=['x', 'y']", ("rollout", "stop"), ("x", "y")),
        ("run.dir=runs/a b", ("run", "dir"), "runs/a b"),
        ("run.dir='quoted'", ("run", "dir"), "quoted"),
        ("run.dir=2024-05-01", ("run", "dir"), "2024-05-01"),
        ("cluster.address=", ("cluster", "address"), ""),
        ("run.dir=a=b", ("run", "dir"), "a=b"),
        ("backends.mine.x=1", ("backends",), {"mine": {"x": 1}}),
        ('backends."my.own".x=1', ("backends",), {"my.own": {"x": 1}}),
        ("model.config={model_type='llama'}", ("model", "config"), {"model_type": "llama"}),
        ("extensions=[]", ("extensions",), ()),
        ("backend.name=other", ("backend", "name"), "other"),
    ],
)
def test_an_override_sets_one_value(tmp_path: Path, override: str, path: tuple[str, ...], value: object) -> None:
    changed: object = load_config(write(tmp_path, SMALLEST), [override])
    for name in path:
        changed = getattr(changed, name)
    assert changed == value and type(changed) is type(value)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "bogus = 1",
            (
                "bogus: unknown key; known: run, cluster, model, backend, backends, engines, samplers, pictures, "
                "algorithms, transports, roles, train, lora, algorithm, data, reward, rollout, weights, eval, "
                "checkpoint, extensions"
            ),
        ),
        ("[trian]", "trian: unknown key; did you mean 'train'?"),
        (
            "[checkpoint]\nbackend.name = 'x'",
            (
                "checkpoint.backend: unknown key; did you mean 'background'? backend is a table of its own, outside of "
                "checkpoint"
            ),
        ),
        ("[train]\nlr = 1e-3", "train.lr: unknown key; did you mean 'optimizer.lr'?"),
        ("temperature = 0.7", "temperature: unknown key; did you mean 'rollout.temperature'?"),
        ("[run]\nseed = -1", "run.seed: must be >= 0, got -1"),
        ("[run]\ndir = ''", "run.dir: its length must be >= 1, got 0"),
        (
            "[model]\npath = 'a\\u0000b'".replace("'", '"'),
            "model.path: expected string without NUL characters, got 'a\\x00b'",
        ),
        ("[run]\ndir = 2024-05-01", "run.dir: expected string, got date 2024-05-01; put it in quotes"),
        (
            "[train.optimizer]\nbetas = [0.9, 1]",
            "train.optimizer.betas: must be < 1, got 1.0",
        ),
        ("[rollout]\ntop_k = 1", "rollout.top_k: must be 0 or at least 2, got 1"),
        ("[rollout]\ntop_p = 0.0", "rollout.top_p: must be > 0, got 0.0"),
        ("[cluster]\ntimeout = inf", "cluster.timeout: must be finite, got inf"),
        (
            "[cluster]\nenvironment = {'A=B' = 'c'}",
            "cluster.environment: must be valid environment variables, got the name 'A=B'",
        ),
        ("[cluster]\ntimeout = 0", "cluster.timeout: must be > 0, got 0.0"),
        ("[algorithm]\nkl_coef = -0.1", "algorithm.kl_coef: must be >= 0, got -0.1"),
        (
            "[algorithm]\nkl_estimator = 'k4'",
            "algorithm.kl_estimator: expected one of 'k1', 'k2', 'k3', 'k3-differentiated', got string 'k4'",
        ),
        ("[[extensions]]\nname = 'a'\noption = {}", "extensions[0].option: unknown key; did you mean 'options'?"),
        (
            "[[extensions]]\noptions = {}",
            "extensions[0].name: required but missing; set string: an installed extension",
        ),
    ],
)
def test_each_kind_of_mistake_has_its_line(tmp_path: Path, text: str, line: str) -> None:
    path = write(tmp_path, text + "\n")
    assert problems_of(path, "backend.name=plain") == [line]


def test_a_missing_backend_is_asked_for_by_its_full_path(tmp_path: Path) -> None:
    assert problems_of(write(tmp_path, "")) == [
        (
            "backend.name: required but missing; set string: an installed training backend, 'distribution:name', or "
            "'package.module:SPEC'"
        )
    ]


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("", "override '': expected KEY=VALUE with a dotted key, such as run.steps=10"),
        ("run..steps=3", "override 'run..steps': expected KEY=VALUE with a dotted key, such as run.steps=10"),
        ("backend.name.x=3", "override 'backend.name.x': backend.name is not a table; override it as a whole"),
        ("run.dir.x=3", "run.dir: expected string, got a table (override run.dir.x)"),
        ("rollout=3", "rollout: expected table, got integer 3 (override rollout)"),
        ("backends.absent=x", "backends.absent: expected table, got string 'x' (override backends.absent)"),
        ("engines.sglang=8", "engines.sglang: expected table, got integer 8 (override engines.sglang)"),
        ("lr=1e-6", "lr: unknown key; did you mean 'train.optimizer.lr'? (override lr)"),  # not 'lora'
        ("rollout={prompt=1}", "rollout.prompt: unknown key; did you mean 'prompts'? (override rollout)"),
    ],
)
def test_a_wrong_override_is_named(tmp_path: Path, override: str, line: str) -> None:
    assert problems_of(write(tmp_path, SMALLEST), override) == [line]


@pytest.mark.parametrize(
    ("content", "place", "advice"),
    [
        ("[backend]\nname = plain", "line 2", "put text in quotes"),
        ("[run]\ndir = 'a'\n[checkpoint]\nbackground = True", "line 4", "true and false in lower case"),
        ('{"run": {"steps": 3}}', "line 1", "wanted tables such as [run], and below them keys such as steps = 10"),
        ("run:\n  steps: 3", "line 1", "wanted tables such as [run], and below them keys such as steps = 10"),
    ],
)
def test_invalid_toml_is_answered_with_advice(tmp_path: Path, content: str, place: str, advice: str) -> None:
    (line,) = problems_of(write(tmp_path, content))
    assert line.startswith(f"{tmp_path}/run.toml: is not valid TOML: ")
    assert place in line.partition("; ")[0] and advice in line.partition("; ")[2]


def test_an_unknown_key_is_answered_with_its_place_elsewhere(tmp_path: Path) -> None:
    keys = ["train.seed", "backend.shards", "algorithm.clip_high", "rollout.memory", "model.config.x", "data.zzz"]
    told = problems_of(write(tmp_path, SMALLEST), *[f"{key}=1" for key in (*keys, "model.lora")])
    ends = {
        line.partition(":")[0]: line.partition("; known: ")[2].partition("; ")[2].partition(" (")[0] for line in told
    }
    assert ends == {
        "train.seed": "there is run.seed",
        "backend.shards": "what only one backend knows is in a table of its own, backends.NAME",
        "algorithm.clip_high": "what only one algorithm knows is in a table of its own, algorithms.NAME",
        "rollout.memory": (
            "there is checkpoint.memory; what only one engine knows is in a table of its own, engines.NAME; what only "
            "one sampler knows is in a table of its own, samplers.NAME"
        ),
        "model.lora": (
            "lora is a table of its own, outside of model; what only one reader of pictures knows is in a table of its "
            "own, pictures.NAME"
        ),
        "data.zzz": "",
    }


def test_an_unreadable_file_is_named_with_its_reason(tmp_path: Path) -> None:
    assert problems_of(tmp_path / "no.toml") == [f"{tmp_path}/no.toml: no such file; pass the path of a TOML file"]
    (tmp_path / "now.toml").touch()
    assert problems_of(tmp_path / "no.toml")[0].endswith(f"; did you mean '{tmp_path}/now.toml'?")
    assert problems_of(tmp_path) == [f"{tmp_path}: cannot be read (Is a directory); pass the path of a TOML file"]
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"a = '\xff'")
    (unreadable,) = problems_of(binary, "nonsense")[:1]
    assert unreadable.startswith(f"{binary}: cannot be read ('utf-8' codec can't decode byte ")


# ---- files that are made to hurt -------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["\x1b[31mred", "a\rb", "\u202egnp.exe", "\x9b2J", "z" * 100_000])
def test_keys_and_values_are_shown_escaped_and_cut(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of({"backend": {"name": "plain"}, text: 1, "run": {text: 1, "steps": text, "mode": text}})
    lines = caught.value.message.split("\n")
    assert len(lines) == 4 and all(line.isprintable() and len(line) < 600 for line in lines)
