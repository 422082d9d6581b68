"""Shares are compared with the weights, order and position with the sources by themselves."""

import json
from fractions import Fraction
from pathlib import Path

import pytest

from corerl.config.schema import DataConfig, DataSource
from corerl.data.prompts import PromptSource, PromptStream
from corerl.data.rows import load_prompts
from corerl.errors import ConfigError
from tests.data.files import numbered

WEIGHTS = {"math": 3.0, "code": 1.5, "chat": 0.5}


def mixed(directory: Path, *, seed: int = 0, **weights: float) -> PromptSource:
    sizes = {"math": 23, "code": 9, "chat": 40}
    sources = tuple(
        DataSource(source=str(numbered(directory / f"{name}.jsonl", sizes[name], prefix=name)), weight=weight)
        for name, weight in {**WEIGHTS, **weights}.items()
    )
    return load_prompts(DataConfig(sources=sources, held_out=2), seed=seed)


def test_every_prompt_is_from_the_source_that_lags_most(tmp_path: Path) -> None:
    stream = PromptStream(mixed(tmp_path), seed=1)
    names = [prompt.source for n in (1, 7, 64, 128) for prompt in stream.take(n)]
    shares = {"math": Fraction(6, 10), "code": Fraction(3, 10), "chat": Fraction(1, 10)}
    counts = dict.fromkeys(shares, 0)
    for n, name in enumerate(names, start=1):
        lag = {each: share * n - counts[each] for each, share in shares.items()}
        assert lag[name] == max(lag.values())
        counts[name] += 1
        assert all(abs(share * n - counts[each]) < 1 for each, share in shares.items())
    assert counts == {"math": 120, "code": 60, "chat": 20}
    assert names[:10] == ["math", "code", "math", "math", "code", "math", "chat", "math", "code", "math"]


def test_a_restored_mix_goes_on_with_the_very_same_prompts(tmp_path: Path) -> None:
    whole, begun, resumed = (PromptStream(mixed(tmp_path), seed=1) for _ in range(3))
    begun.take(77)
    resumed.restore(json.loads(json.dumps(begun.position)))
    assert resumed.take(90) == begun.take(90) == whole.take(77 + 90)[77:]
    assert resumed.position == begun.position == whole.position


def test_a_returned_prompt_comes_again_from_its_own_source(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": [{"role": "user", "content": "2+2"}], "answer": "4"}\n')
    sources = tuple(DataSource(name=name, source=str(path), system=f"Be {name}.") for name in ("brief", "kind"))
    begun, resumed = (
        PromptStream(load_prompts(DataConfig(sources=sources, held_out=0), seed=0), seed=1) for _ in range(2)
    )
    first, second = begun.take(2)
    begun.give_back(second)
    begun.give_back(first)
    resumed.restore(json.loads(json.dumps(begun.position)))
    assert [prompt.source for prompt in (first, second)] == ["brief", "kind"]
    assert resumed.take(2) == [second, first]


@pytest.mark.parametrize(
    ("source", "sources", "said"),
    [
        ("x.jsonl", [{}], "data.sources: cannot be combined with data.source='x.jsonl'; remove one of the two"),
        ("", [{}, {}], "data.sources: two sources are named 'p'; give each a different name"),
        ("", [{"name": "reward"}], "data.sources: eval/reward has the parts of rewards; give source 'reward' an"),
        ("", [{}, {"name": "own", "system": "Be brief."}], "data.sources[1].system: used only for chats, and no promp"),
    ],
)
def test_contradictions_are_named(tmp_path: Path, source: str, sources: list[dict[str, str]], said: str) -> None:
    path = str(numbered(tmp_path / "p.jsonl", 3))
    given = tuple(DataSource(source=path, **each) for each in sources)
    with pytest.raises(ConfigError) as caught:
        load_prompts(DataConfig(source=source, sources=given, held_out=0), seed=0)
    assert caught.value.message.startswith(said)
