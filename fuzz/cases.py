"""What hypothesis draws: a command, and edits of the files that it reads, at three depths: bytes, trees, meaning."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import attrs
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from corerl.config.schema import Config
from corerl.config.toml_text import class_fields
from fuzz.case import SECRET, Case
from fuzz.edits import ODD, places, read_tree

HERE = ("reward.processes=0", "rollout.engine=fake")  # of what runs in this process


# ---- values ----------------------------------------------------------------------------------------------------------

# Else each would have a line of its own.
# fmt: off
PATHS = [
    "", ".", "..", "/", "~", "/dev/null", "/dev/stdin", "/proc/self/mem", "odd", "odd/empty", "odd/loop",
    "odd/dangling", "odd/up", "odd/blank", "odd/holes", "odd/up/odd/up/texts.jsonl", "texts.jsonl", "chats.parquet",
    "texts.toml", "model", "model/../run", "saved", "run", "run/checkpoints", "run/checkpoints/step-00000008",
    "sort-digits", "exact-match", "a:b", ":", "os:getcwd", "rewards:score", "rewards:none", "characters:",
    "characters:aa", "characters:\u0301\U0001f600", "a\nb", "\x1b[31mred", "x" * 300, "x/" * 3000, "\u202eabc",
]
TEXTS = [
    "x", " ", "\n", "\x1b[31mred\x07", "é", "\u202e", "\U0001f600", "a" * 5000, "<eos>", "null", "NaN", "{{ 1 }}",
    "%s",
]
NUMBERS = [
    0, 1, 2, 3, -1, -2, 7, 104, 10**6, 2**31, 2**53 + 1, 2**63 - 1, 2**63, -(2**63) - 1, 0.5, -0.0, 1e-300, 1e308,
]
OVERRIDDEN = [
    "1", "-1", "nan", "''", "[", "{a=1}", "[]", "true", "1979-05-27", "9" * 5000, "[" * 5000, '"\\u0000"',
    "x" * 5000,
]
BROKEN = [
    "=", "a", "a.b", ".=1", "a..b=1", "run.steps", "run.steps=", "a=b=c", "'a'.b=1", "[a]=1", "a=1\nb=2", "\udc80=1",
    "run.dir=\udcff", "run=1", "run.dir.x=1", "x" * 5000 + "=1", "a." * 500 + "a=1", "\x1b[31m=1", "extensions=x",
    f"cluster.environment.KEY {SECRET}", f"cluster.environment.KEY:{SECRET}", f"cluster.environment={SECRET}",
    f"cluster.environment.KEY={SECRET}", f'cluster."environment".KEY={SECRET}', f"cluster={{e='{SECRET}'}}",
    f"cluster.environment.'A=B'='{SECRET}'", f"cluster.'environment'.KEY {SECRET}",
    f"cluster.environment.K=['{SECRET}']", f"cluster.enviroment.KEY={SECRET}", f"environment.KEY={SECRET}",
    f"cluster.secret.K={SECRET}",
]
# fmt: on
RAW = [
    {"raw": "9", "times": 4299},
    {"raw": "9", "times": 5000},
    {"raw": "1e999"},
    {"raw": "-1e999"},
    {"raw": "[", "times": 40, "close": "]"},
    {"raw": "[", "times": 900, "close": "]"},
    {"raw": "[", "times": 100_000, "close": "]"},
    {"raw": '{"a":', "times": 100_000},
]
JSON_RAW = [
    {"raw": '{"a":1,"a":2}'},
    {"raw": "NaN"},
    {"raw": "-Infinity"},
    {"raw": '"\\ud800"'},
    {"raw": '"\\u0000"'},
    {"raw": '"' + "long " * 40_000 + '"'},
    {"raw": "null"},
    {"raw": "tru"},
    {"raw": '{"__class__":', "times": 60, "close": "}"},
]
TOML_RAW = [
    {"raw": "nan"},
    {"raw": "-inf"},
    {"raw": "1979-05-27T07:32:00Z"},
    {"raw": "07:32:00"},
    {"raw": '"\\u0000"'},
    {"raw": "'''a\nb\x1b'''"},
    {"raw": "{ a = 1, a = 2 }"},
    {"raw": "{ a = ", "times": 60, "close": "}"},
]

common = st.sampled_from([*NUMBERS, *TEXTS, *PATHS, *RAW, True, False, [], {}, [[]], {"a": 1}, [1, "a"], ["a", "a"]])
json_values = common | st.sampled_from(JSON_RAW) | st.text(max_size=8) | st.integers() | st.floats(width=32)
toml_values = common | st.sampled_from(TOML_RAW) | st.text(alphabet=st.characters(codec="utf-8"), max_size=8)


def near(name: str) -> SearchStrategy[str]:
    """Names that a slip of the hand makes of this one."""
    return st.sampled_from([name[:-1], name + "s", name.upper(), name[::-1], f" {name}", f"{name}\n", "", "a.b", "é"])


# ---- edits -----------------------------------------------------------------------------------------------------------


def byte_edits(file: str) -> SearchStrategy[Any]:
    place = st.integers(0, 200) | st.integers(0, 2**17)
    junk = st.sampled_from(
        ["\0", "\0" * 64, "\xef\xbb\xbf", "\xff", "\x1b[31m", "\r", "\n", "[", '"', "{" * 2000, "x" * 10**6]
    )

    def of(operation: str, argument: SearchStrategy[Any]) -> SearchStrategy[Any]:
        return st.tuples(st.just("bytes"), st.just(file), st.just(operation), place, argument)

    lengths = [0, 1, 8, 2**20, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1]
    return st.one_of(
        of("flip", st.integers(1, 255)),
        of("cut", st.none()),
        of("insert", junk),
        of("zeros", st.integers(1, 4096)),
        of("repeat", st.sampled_from([2, 100, 10**5])),
        of("encode", st.sampled_from(["utf-16", "utf-8-sig", "utf-32", "latin-1", "cp037"])),
        *([of("length", st.sampled_from(lengths))] if file.endswith(".safetensors") else []),
    )


def tree_edits(file: str, tree: Any) -> SearchStrategy[Any]:
    """Of a known tree; `places` come in its order, so that shrinking leads to the first ones."""
    all_keys = [list(keys) for keys in places(tree)]
    inner = [keys for keys in all_keys if keys]
    values = toml_values if file.endswith(".toml") else json_values
    if not inner:
        return st.tuples(st.just("tree"), st.just(file), st.just([]), st.just("set"), values)

    def of(operation: str, argument: SearchStrategy[Any], among: list[Any] = inner) -> SearchStrategy[Any]:
        return st.tuples(st.just("tree"), st.just(file), st.sampled_from(among), st.just(operation), argument)

    renamed = st.sampled_from(inner).flatmap(
        lambda keys: st.tuples(st.just("tree"), st.just(file), st.just(keys), st.just("rename"), near(str(keys[-1])))
    )
    nudges = st.sampled_from([1, -1, 2, 3, 16, 1000, 2**31, -(2**31), 2**62, 0.5])
    return st.one_of(
        of("set", values),
        of("set", values, all_keys[:3]),
        of("set", values),
        of("delete", st.none()),
        of("add", st.sampled_from(["x", "type", "\x1b", "a" * 300])),
        of("double", st.none()),
        of("nudge", nudges),
        of("nudge", nudges),
        of("copy", st.sampled_from(inner)),
        renamed,
    )


def file_edits(file: str) -> SearchStrategy[Any]:
    """Any edit of a file of the inputs, which are in the working directory."""
    tree: Any = None
    if Path(file).suffix in (".json", ".toml", ".jsonl", ".safetensors", ".parquet"):
        tree = read_tree(Path(file))
    become = st.tuples(st.just("become"), st.just(file), st.sampled_from(ODD))
    if tree is None:
        return byte_edits(file) | become
    trees = tree_edits(file, tree)
    return st.one_of(trees, trees, trees, trees, byte_edits(file), become)


# ---- settings that are valid by themselves ---------------------------------------------------------------------------


def valid(kind: Any) -> SearchStrategy[Any]:
    """Values of a setting's type."""
    origin = get_origin(kind)
    if origin is Literal:
        return st.sampled_from(list(get_args(kind)))
    if origin in (Union, types.UnionType):
        return st.one_of([valid(arm) for arm in get_args(kind) if arm is not type(None)])
    if attrs.has(kind):
        fields = {name: valid(field.type) for name, field in class_fields(kind).items()}
        return st.fixed_dictionaries({}, optional=fields)
    if kind is bool:
        return st.booleans()
    if kind is int:
        return st.sampled_from([0, 1, 2, 3, 4, 5, 8, 64, 256, 10**6])
    if kind is float:
        return st.sampled_from([0, 0.0, 0.1, 0.5, 0.99, 1.0, 2.0, 1e-9, 1e9, 1e308])
    if kind is str:
        return st.sampled_from(
            [*PATHS, *TEXTS, "plain", "fake", "transformers", "clipped", "ipc", "disk", "auto", "never"]
        )
    if origin is tuple:
        inner = get_args(kind)
        return st.lists(valid(inner[0]), max_size=3)
    return st.dictionaries(
        st.sampled_from(["a", "plain", "fake", "CUDA_VISIBLE_DEVICES", "", "a=b"]), common, max_size=2
    )


def settings(cls: type = Config, prefix: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    """The path and the type of every setting, tables included."""
    found: list[tuple[tuple[str, ...], Any]] = []
    for name, field in class_fields(cls).items():
        found.append(((*prefix, name), field.type))
        arms = [field.type, *get_args(field.type)]
        for arm in arms:
            if isinstance(arm, type) and attrs.has(arm):
                found += settings(arm, (*prefix, name))
    return found


def setting_edits(file: str) -> SearchStrategy[Any]:
    def of(setting: tuple[tuple[str, ...], Any]) -> SearchStrategy[Any]:
        keys, kind = setting
        return st.tuples(st.just("setting"), st.just(file), st.just(list(keys)), valid(kind))

    return st.sampled_from(settings()).flatmap(of)


def overrides() -> SearchStrategy[str]:
    paths = st.sampled_from([".".join(keys) for keys, _ in settings()])
    values = st.sampled_from([*OVERRIDDEN, *PATHS, *TEXTS]) | st.text(max_size=5)
    return st.builds("{}={}".format, paths, values) | st.sampled_from(BROKEN)


RARELY = st.integers(0, 9).map(lambda drawn: drawn == 9)
SOURCES: list[tuple[str, tuple[str, ...], str]] = [
    ("texts.jsonl", ("texts.jsonl",), "texts.toml"),
    ("chats.jsonl", ("chats.jsonl",), "chats.toml"),
    ("chats.parquet", ("chats.parquet",), "chats.toml"),
    ("saved", ("saved/state.json", "saved/dataset_info.json", "saved/data-00000-of-00001.arrow"), "texts.toml"),
]


# ---- cases by kind ---------------------------------------------------------------------------------------------------


def _cases(
    kind: str, commands: SearchStrategy[tuple[str, ...]], edits: SearchStrategy[Any], runs: SearchStrategy[bool]
) -> SearchStrategy[Case]:
    return st.builds(
        Case, kind=st.just(kind), command=commands, edits=st.lists(edits, min_size=1, max_size=3).map(tuple), runs=runs
    )


def config_cases() -> SearchStrategy[Case]:
    def of(name: str) -> SearchStrategy[Case]:
        file = f"{name}.toml"
        more = st.lists(overrides(), max_size=2)
        commands = st.one_of(
            st.builds(lambda o: ("config", "check", file, *o), more),
            st.builds(lambda o: ("config", "check", file, *o), more),
            st.builds(lambda o: ("config", "show", file, *o), more),
            st.builds(lambda o: ("eval", file, "--json", *o, *HERE), more),
        )
        edits = st.one_of(setting_edits(file), setting_edits(file), file_edits(file))
        return st.builds(
            Case,
            kind=st.just("config"),
            command=commands,
            edits=st.lists(edits, max_size=4).map(tuple),
            runs=st.just(False),
        )

    return st.sampled_from(["texts", "chats", "mixture", "critic", "experts", "full"]).flatmap(of)


MISBEHAVING = [
    "import os\nos._exit(0)",
    "import sys\nsys.exit(3)",
    "raise KeyboardInterrupt",
    "raise BaseException('a\\nb\\x1b[31m')",
    "class E(Exception):\n def __str__(self): raise ValueError('no')\nraise E",
    "score = 1",
    "def score(*args): return float('nan')",
    "def score(prompt, response, answer, **f): return 'x' * 10**6",
    "def score(prompt, response, answer, **f): raise ValueError('a\\nb\\x1b[31m' * 500)",
    "def score(prompt, response, answer, **f): raise SystemExit(0)",
    "def score(prompt, response, answer, **f): return {'a\\x1b': 1.0, 1: 2}",
    "def score(prompt, response, answer, **f): return 10**400",
    "def score(prompt, response, answer, **f): return True",
    "def score(prompt, response, answer, **f): return {}",
    "def score(): return 1.0",
    "async def score(prompt, response, answer, **f): return 1.0",
    "def score(prompt, response, answer, **f): yield 1.0",
    "import sys\nsys.setrecursionlimit(60)\ndef score(prompt, response, answer, **f): return 1.0",
    "def score(prompt, response, answer, **f): return score(prompt, response, answer)",
    "class Score:\n def __call__(self, *a, **k): return 1.0\n def __signature__(self): pass\nscore = Score()",
    "import signal, os\nos.kill(os.getpid(), signal.SIGSEGV)",
    "print('loaded' * 10)\ndef score(prompt, response, answer, **f): return 1.0",
    "import sys\nsys.stdout.close()\ndef score(prompt, response, answer, **f): return 1.0",
    "def __getattr__(name): raise RuntimeError(name)",
    "\0",
    "\ud800",
    "def score(:",
]
TEMPLATES = [
    "",
    "{{",
    "{% for m in messages %}{{ m.nothing.here }}{% endfor %}",
    "{{ raise_exception('a\nb\x1b[31m' * 300) }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ 'ab' * 10**4 }}",
    "{{ messages.__class__.__mro__ }}",
    "{{ (messages | tojson) * 3 }}{{ tools | tojson(indent=4) }}",
    "{{ strftime_now('%' * 10**5) }}",
    "{% include 'x' %}",
    "{{ messages[0].content[99].x }}",
    "{% generation %}{{ 1 }}{% endgeneration %}",
    "{{ 1 / 0 }}",
    "\u00e9{{ messages[-1].content }}",
    "{{ none }}",
]


def text_edits(file: str, texts: list[str]) -> SearchStrategy[Any]:
    return st.tuples(st.just("text"), st.just(file), st.sampled_from(texts))


def data_cases() -> SearchStrategy[Case]:
    def of(sources: tuple[str, tuple[str, ...], str]) -> SearchStrategy[Case]:
        source, files, config = sources
        keys = st.sampled_from(
            [[], [], ["data.prompt_key=answer"], ["data.answer_key=prompt"], ["data.tools_key=prompt"]]
        )
        chat = st.sampled_from([[], [], ["data.chat=true"], ["data.refused=skip"]])
        command = st.builds(lambda a, b: ("config", "check", config, f"data.source={source}", *a, *b), keys, chat)
        edits = st.one_of(
            *[file_edits(file) for file in files] * 4,
            text_edits("model/chat_template.jinja", TEMPLATES),
        )
        return _cases("data", command, edits, RARELY)

    rewards = _cases(
        "data",
        st.just(("config", "check", "chats.toml", "reward.name=rewards:score")),
        text_edits("rewards.py", MISBEHAVING),
        st.booleans(),
    )
    files = st.sampled_from(SOURCES).flatmap(of)
    return st.integers(0, 30).flatmap(lambda choice: files if choice < 30 else rewards)  # which start a process


def model_cases() -> SearchStrategy[Case]:
    def of(choice: tuple[str, str]) -> SearchStrategy[Case]:
        directory, config = choice
        files = sorted(str(path) for path in Path(directory).iterdir())
        commands: list[tuple[str, ...]] = [("config", "check", config)] * 3
        if directory == "model":
            commands += [("export", "run", "out"), ("export", "run", "out", "--dtype", "bfloat16")]
        small = [file for file in files if file.endswith("config.json") or "index" in file]
        edits = st.one_of(
            *[file_edits(file) for file in [*files, *small]],
            text_edits(f"{directory}/chat_template.jinja", TEMPLATES),
        )
        return _cases("model", st.sampled_from(commands), edits, RARELY)

    return st.sampled_from([("model", "texts.toml"), ("model", "chats.toml"), ("sharded", "experts.toml")]).flatmap(of)


def checkpoint_cases() -> SearchStrategy[Case]:
    def of(run_dir: str) -> SearchStrategy[Case]:
        newest = f"{run_dir}/checkpoints/step-00000008"
        resume = f"config check texts.toml run.steps=9 run.dir={run_dir} checkpoint.resume"
        commands = [
            ("export", newest, "out"),
            ("export", run_dir, "out"),
            ("export", run_dir, "out", "--role", "critic"),
            ("eval", run_dir, "--json", *HERE),
            ("eval", newest, *HERE),
            (*resume.split(), "run.mode=train"),
            tuple(f"{resume}=auto".split()),
            tuple(f"{resume}={newest}".split()),
        ]
        commands = [tuple(word for word in command if word != "checkpoint.resume") for command in commands]
        files = sorted(str(path) for path in Path(newest).rglob("*") if path.is_file())
        known = [file_edits(file) for file in files] + [file_edits(f"{newest}/checkpoint.json")] * 2
        whole = st.tuples(
            st.just("become"),
            st.sampled_from([newest, f"{newest}/actor", f"{run_dir}/checkpoints", f"{run_dir}/config.toml"]),
            st.sampled_from(ODD),
        )
        sizes = st.just(("sizes", f"{newest}/checkpoint.json"))
        edits = st.lists(st.one_of(*known, whole), min_size=1, max_size=2)
        return st.builds(
            lambda command, edits, last: Case(kind="checkpoint", command=command, edits=(*edits, *last)),
            st.sampled_from(commands),
            edits,
            st.lists(sizes, max_size=1),
        )

    return st.sampled_from(["run", "fields"]).flatmap(of)


STRATEGIES = {"config": config_cases, "data": data_cases, "model": model_cases, "checkpoint": checkpoint_cases}
