"""Settings in words."""

import tomllib

from attrs import Factory, evolve, field, frozen

from corerl.config.describe import FieldHelp, annotate, describe
from corerl.config.load import dump_toml, to_plain
from corerl.config.options import option
from corerl.config.schema import BackendChoice, Config, ExtensionChoice

CONFIG = Config(backend=BackendChoice(name="plain"))


@frozen(kw_only=True)
class Inner:
    share: float = option("a part", default=0.5)


@frozen(kw_only=True)
class Other:
    name: str = option("whom")


@frozen(kw_only=True)
class Options:
    name: str = option("who")
    limit: int | None = option("at most", default=None)
    inner: Inner = option("more", factory=Inner)
    many: tuple[Inner, ...] = option("each", default=(Inner(share=1.0),))
    twice: int = field(default=Factory(lambda self: 2 * len(self.name), takes_self=True))


def test_every_field_has_its_path_type_default_and_help() -> None:
    assert describe(Options) == [
        FieldHelp(path="name", type="string", default="required", help="who"),
        FieldHelp(path="limit", type="integer", default="unset", help="at most"),
        FieldHelp(path="inner.share", type="number", default="0.5", help="a part"),
        FieldHelp(path="many", type="array of tables", default="[{share = 1.0}]", help="each"),
        FieldHelp(path="many[].share", type="number", default="0.5", help="a part"),
        FieldHelp(path="twice", type="integer", default="computed", help=""),
    ]


def test_every_setting_of_a_run_has_help_and_a_default_that_is_toml() -> None:
    entries = describe(Config)
    assert [entry.path for entry in entries if not entry.help] == []
    assert [entry.path for entry in entries if entry.default == "required"] == [
        "backend.name",
        "data.sources[].source",
        "reward.functions[].name",
        "eval.sets[].source",
        "eval.sets[].reward.functions[].name",
        "extensions[].name",
    ]
    plain = to_plain(CONFIG)
    unset = tuple(f"{entry.path}." for entry in entries if entry.default == "unset")  # tables that may be left out
    for entry in entries:
        if entry.default in ("required", "unset") or entry.path.startswith(unset) or "[]" in entry.path:
            continue
        value = plain
        for name in entry.path.split("."):
            value = value[name]
        assert tomllib.loads(f"x = {entry.default}")["x"] == value, entry.path


def test_annotated_toml_says_the_same_with_help_above_each_setting() -> None:
    resolved = evolve(CONFIG, backends={"mine": Options(name="a"), "other": {"name": "raw"}})
    resolved = evolve(resolved, data=evolve(resolved.data, system="one\u2028line\x85still"))
    toml = dump_toml(resolved)
    annotated = annotate(toml, resolved)
    assert tomllib.loads(annotated) == tomllib.loads(toml)
    lines = annotated.split("\n")
    assert lines[lines.index("steps = 250") - 1] == "# rollout steps to train for"
    assert lines[lines.index("lr = 1e-06") - 1] == "# peak learning rate"
    assert lines[lines.index('name = "a"') - 1] == "# who"
    assert lines[lines.index("share = 0.5") - 1] == "# a part"
    assert lines[lines.index('name = "raw"') - 1] == "[backends.other]"


def test_options_of_algorithms_and_extensions_are_annotated_too() -> None:
    extensions = (ExtensionChoice(name="a"), ExtensionChoice(name="b", options=Other(name="c")))
    unknown = ExtensionChoice(name="d", options={"name": "raw"})
    extensions = (*extensions, unknown, ExtensionChoice(name="d", options=Options(name="e")))
    resolved = evolve(CONFIG, algorithms={"mine": Options(name="f")}, extensions=extensions)
    lines = annotate(dump_toml(resolved), resolved).split("\n")
    assert lines[lines.index('name = "raw"') - 1] == "[extensions.options]"
    above = {line: lines[at - 1] for at, line in enumerate(lines) if line in ('name = "c"', 'name = "e"', 'name = "f"')}
    assert above == {'name = "c"': "# whom", 'name = "e"': "# who", 'name = "f"': "# who"}
