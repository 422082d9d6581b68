"""Files as `pyarrow` and `datasets` write them; splits and subsets are compared with what `datasets` reads."""

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from corerl.config import config_of
from corerl.data import load_prompts
from corerl.errors import ConfigError, DataError, PluginBroken
from corerl.plugin import Kind
from tests.data.files import load, write

CARD = """---
configs:
- config_name: easy
  data_files:
  - {split: train, path: [one/b-*, one/a-*]}
  - {split: test, path: one/t-*}
- config_name: hard
  data_dir: two
---
"""


def put(directory: Path, *names: str, suffix: str = "parquet", rows: int = 3) -> Path:
    for name in names:
        file = directory / f"{name}.{suffix}"
        file.parent.mkdir(parents=True, exist_ok=True)
        table = [{"prompt": f"{name} {number}", "answer": str(number)} for number in range(rows)]
        if suffix == "parquet":
            datasets.Dataset.from_list(table).to_parquet(file)
        else:
            write(file, *map(json.dumps, table))
    return directory


def texts(source: Any) -> list[str]:
    return [source.prompt(index).text for index in range(len(source))]


def mixed(*sources: dict[str, Any], **settings: Any) -> Any:
    """The prompts of several sources."""
    data = {"sources": list(sources), "held_out": 1, **settings}
    return load_prompts(config_of({"backend": {"name": "plain"}, "data": data}).data, seed=0)


def reference(directory: Path, subset: str | None = None, split: str = "train") -> list[str]:
    return list(datasets.load_dataset(str(directory), subset, split=split)["prompt"])


def test_prompts_and_answers_of_a_csv_file_stay_text(tmp_path: Path) -> None:
    path = write(tmp_path / "p.csv", "prompt,answer,level", "1+6,007,3", "0.5,0.50,", "x,None,4", "y,,5")
    source = load(path, held_out=0)
    prompts = [source.prompt(index) for index in range(4)]
    assert [(each.text, each.answer) for each in prompts] == [("1+6", "007"), ("0.5", "0.50"), ("x", "None"), ("y", "")]
    assert [each.fields["level"] for each in prompts] == [3, None, 4, 5]


def test_an_unreadable_row_of_arrow_is_refused_alone(tmp_path: Path) -> None:
    prompts = pa.array([b"one", b"\xff", b"three"]).view(pa.string())
    path = tmp_path / "p.parquet"
    pq.write_table(pa.table({"prompt": prompts}), path)
    with pytest.raises(DataError, match=r"p.parquet, row 1: cannot be read: .*utf-8.*; data.refused='skip' leaves"):
        load(path)
    source = load(path, refused="skip", held_out=0)
    assert texts(source) == ["one", "three"]
    assert "1 of 3 rows of" in source.notices[0] and "row 1: cannot be read" in source.notices[0]


@pytest.mark.parametrize(
    ("names", "suffix"),
    [
        (("train", "test", "validation"), "jsonl"),
        (("data/train-00000-of-00002", "data/train-00001-of-00002", "data/test-00000-of-00001"), "parquet"),
        (("train/1", "train/0", "test/0"), "jsonl"),
        (("b", "a"), "parquet"),
    ],
)
def test_a_directory_is_read_as_datasets_reads_its_splits(tmp_path: Path, names: tuple[str, ...], suffix: str) -> None:
    directory = put(tmp_path / "set", *names, suffix=suffix)
    assert texts(load(directory)) == reference(directory)
    if "test" in datasets.get_dataset_split_names(str(directory)):
        assert texts(load(directory, split="test")) == reference(directory, split="test")


def test_a_card_names_subsets_and_their_splits(tmp_path: Path) -> None:
    directory = put(tmp_path / "set", "one/a-0", "one/b-0", "one/b-1", "one/t-0", "two/train", "two/test", "extra/x")
    write(directory / "README.md", CARD)
    with pytest.raises(ConfigError, match=r"data.subset: '', but .*set has the subsets easy, hard; set it to one"):
        load(directory)
    easy, hard = load(directory, subset="easy"), load(directory, subset="hard")
    assert (
        texts(easy) == reference(directory, "easy") == [f"one/{n} {i}" for n in ("b-0", "b-1", "a-0") for i in range(3)]
    )
    assert texts(hard) == reference(directory, "hard")
    mix = mixed(
        {"source": str(directory), "subset": "easy", "name": "e"},
        {"source": str(directory), "subset": "hard", "split": "test", "name": "h"},
    )
    assert texts(mix) == texts(easy) + reference(directory, "hard", split="test")
    write(directory / "README.md", CARD.replace("config_name: easy", "config_name: easy\n  default: true"))
    assert texts(load(directory)) == texts(easy)


def test_splits_that_are_not_read_are_said(tmp_path: Path) -> None:
    directory = put(tmp_path / "set", "train-0", "train-1", "test", suffix="jsonl")
    line = f"data.source: of {directory}, the split train is read; not read: test"
    assert load(directory).notices == (line,)
    assert load(put(tmp_path / "alone", "train-0", "train-1")).notices == ()


def test_a_choice_that_a_source_does_not_have_is_named(tmp_path: Path) -> None:
    directory = put(tmp_path / "set", "validation", "test")
    with pytest.raises(ConfigError, match=r"data.split: 'train', but .*set has the splits validation, test; set it"):
        load(directory)
    with pytest.raises(ConfigError, match=r"data.split: 'tset', .* did you mean 'test'\?"):
        load(directory, split="tset")
    with pytest.raises(ConfigError, match=r"data.split: 'test', but .*test.parquet has no splits; remove it"):
        load(directory / "test.parquet", split="test")
    with pytest.raises(ConfigError, match=r"data.subset: 'en', but .*set has no subsets; remove it"):
        load(directory, subset="en", split="test")


def test_a_common_choice_is_for_sources_that_have_several(tmp_path: Path) -> None:
    several, one = put(tmp_path / "several", "train", "test"), put(tmp_path / "one", "file") / "file.parquet"
    sources = [{"source": str(source)} for source in (several, one)]
    source = mixed(*sources, split="test", held_out=0)
    assert texts(source) == [*texts(load(several, split="test")), *texts(load(one))]
    with pytest.raises(ConfigError, match=r"data.split: 'dev', but .*several has the splits train, test"):
        mixed(*sources, split="dev", held_out=0)


def test_splits_that_were_saved_together_are_chosen_by_name(tmp_path: Path) -> None:
    splits = {
        name: datasets.Dataset.from_dict({"prompt": [f"{name} {i}" for i in range(2)]}) for name in ("train", "test")
    }
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "both")
    assert texts(load(tmp_path / "both")) == ["train 0", "train 1"]
    assert (
        texts(load(tmp_path / "both", split="test")) == texts(load(tmp_path / "both" / "test")) == ["test 0", "test 1"]
    )


def test_the_cache_of_hugging_face_is_read_at_main(tmp_path: Path) -> None:
    cache = tmp_path / "datasets--x--y"
    for revision in ("abc", "def"):
        blobs = put(cache / "blobs" / revision, "file", rows=2 if revision == "abc" else 5)
        link = cache / "snapshots" / revision / "data" / "train-00000-of-00001.parquet"
        link.parent.mkdir(parents=True)
        link.symlink_to(blobs / "file.parquet")
    (cache / "refs").mkdir()
    write(cache / "refs" / "main", "def")
    assert len(load(cache)) == 5


def test_a_wheel_that_cannot_be_used_is_not_called_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(kind: Kind, name: str) -> None:
        raise PluginBroken(f"{name} of {kind.value} is broken")

    monkeypatch.setattr("corerl.data.files.usable", lambda kind: [])
    monkeypatch.setattr("corerl.data.files.load", broken)
    (tmp_path / "rows.csv").write_text("prompt,answer\n1+1,2\n")
    with pytest.raises(PluginBroken, match="datasets of formats is broken"):
        load(tmp_path / "rows.csv")
