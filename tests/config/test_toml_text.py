"""Settings as text, with their help."""

import tomllib

from attrs import Factory, evolve, field, frozen

from corerl.config.load import dump_toml
from corerl.config.options import option
from corerl.config.schema import BackendChoice, Config, ExtensionChoice
from corerl.config.toml_text import to_plain
from corerl_doctor.help_texts import settings_with_help
from docs._ext.settings import FieldHelp, describe

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
    assert list(describe(Options)) == [
        FieldHelp(path="name", type="string", default="required", help="who"),
        FieldHelp(path="limit", type="integer", default="unset", help="at most"),
        FieldHelp(path="inner.share", type="number", default="0.5", help="a part"),
        FieldHelp(path="many", type="array of tables", default="[{share = 1.0}]", help="each"),
        FieldHelp(path="many[].share", type="number", default="0.5", help="a part"),
        FieldHelp(path="twice", type="integer", default="computed", help=""),
    ]


def test_every_setting_has_help_and_a_toml_default() -> None:
    entries = list(describe(Config))
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


def test_settings_with_help_load_as_without() -> None:
    extensions = (ExtensionChoice(name="a"), ExtensionChoice(name="b", options=Other(name="c")))
    resolved = evolve(
        CONFIG,
        backends={"mine": Options(name="a"), "other": {"name": "raw"}, "odd": {"a\x7f\u202eb": 1}},
        extensions=extensions,
    )
    resolved = evolve(resolved, data=evolve(resolved.data, system="one\u2028line\x85still"))
    text = "\n".join(settings_with_help(resolved))
    assert tomllib.loads(text) == tomllib.loads(dump_toml(resolved))
    lines = text.split("\n")
    for line, above in {
        "steps = 250": "# rollout steps to train for (integer)",
        "lr = 1e-06": "# peak learning rate (number)",
        'name = "a"': "# who (string)",
        'name = "c"': "# whom (string)",
        "# limit =": "# at most (integer; unset)",
        "share = 0.5": "# a part (number)",
        'other = {name = "raw"}': "",
    }.items():
        if above:
            assert lines[lines.index(line) - 1] == above, line
