"""Splits of directories are compared with those that `datasets` reads."""

import json
import sys
from pathlib import Path

import datasets
import pytest

from corerl.config.load import config_of
from corerl.config.schema import DataConfig, DataSource
from corerl.data.load import load_prompts
from corerl.data.prompts import PromptSource
from corerl.errors import ConfigError, DataError
from corerl.plan.settle import with_absolute_paths
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


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


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


def texts(source: PromptSource) -> list[str]:
    return [source.prompt(index).text for index in range(len(source))]


def reference(directory: Path, subset: str | None = None, split: str = "train") -> list[str]:
    return list(datasets.load_dataset(str(directory), subset, split=split)["prompt"])


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
@pytest.mark.parametrize(
    "names",
    [
        ("train", "test", "validation"),
        ("train-00001-of-00002", "train-00000-of-00002", "test-00000-of-00001"),
        ("data/train-00000-of-00002", "data/train-00001-of-00002", "data/test-00000-of-00001"),
        ("train/1", "train/0", "test/0"),
        ("math_train", "math_eval", "math_dev"),
        ("a", "b", "c"),
    ],
)
def test_a_directory_is_read_as_datasets_reads_its_split_train(
    tmp_path: Path, names: tuple[str, ...], suffix: str
) -> None:
    directory = put(tmp_path / "set", *names, suffix=suffix)
    source = load(directory)
    assert texts(source) == reference(directory)
    others = sorted({name for name in datasets.get_dataset_split_names(str(directory)) if name != "train"})
    assert [name for name in others if any(name in notice for notice in source.notices)] == others
    if others:
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
    assert easy.notices == (
        f"data.source: of {directory}, the split train is read; not read: the split test, 3 .parquet files",
    )
    mix = DataConfig(
        sources=(
            DataSource(source=str(directory), subset="easy", name="e"),
            DataSource(source=str(directory), subset="hard", split="test", name="h"),
        ),
        held_out=1,
    )
    assert texts(load_prompts(mix, seed=0)) == texts(easy) + reference(directory, "hard", split="test")
    write(directory / "README.md", CARD.replace("config_name: easy", "config_name: easy\n  default: true"))
    assert texts(load(directory)) == texts(easy)


@pytest.mark.parametrize("outside", ["../other.parquet", "hf://datasets/a/b/c.parquet", "/etc/passwd"])
def test_a_card_names_no_files_outside_of_its_directory(tmp_path: Path, outside: str) -> None:
    put(tmp_path, "other")
    directory = put(tmp_path / "set", "train")
    write(directory / "README.md", f"---\nconfigs:\n- config_name: default\n  data_files: {outside}\n---")
    with pytest.raises(DataError, match=r"README.md of .*set names .*, which is not in this directory"):
        load(directory)


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
    mix = tuple(DataSource(source=str(source)) for source in (several, one))
    source = load_prompts(DataConfig(sources=mix, split="test", held_out=0), seed=0)
    assert texts(source) == [*texts(load(several, split="test")), *texts(load(one))]
    with pytest.raises(ConfigError, match=r"data.split: 'dev', but .*several has the splits train, test"):
        load_prompts(DataConfig(sources=mix, split="dev", held_out=0), seed=0)


def test_splits_that_were_saved_together_are_chosen_by_name(tmp_path: Path) -> None:
    splits = {
        name: datasets.Dataset.from_dict({"prompt": [f"{name} {i}" for i in range(2)]}) for name in ("train", "test")
    }
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "both")
    source = load(tmp_path / "both")
    assert texts(source) == ["train 0", "train 1"] and "not read: the split test" in source.notices[0]
    assert (
        texts(load(tmp_path / "both", split="test")) == texts(load(tmp_path / "both" / "test")) == ["test 0", "test 1"]
    )


def test_a_cache_of_hugging_face_is_read_at_its_main_revision(tmp_path: Path) -> None:
    cache = tmp_path / "datasets--x--y"
    for revision in ("abc", "def"):
        blobs = put(cache / "blobs" / revision, "file", rows=2 if revision == "abc" else 5)
        link = cache / "snapshots" / revision / "data" / "train-00000-of-00001.parquet"
        link.parent.mkdir(parents=True)
        link.symlink_to(blobs / "file.parquet")
    (cache / "refs").mkdir()
    write(cache / "refs" / "main", "def")
    assert len(load(cache)) == 5


def test_a_pattern_is_read_in_order_and_says_which_splits_it_mixes(tmp_path: Path) -> None:
    put(tmp_path / "set" / "deep", "train-b", "train-a", "test", suffix="jsonl")
    source = load(tmp_path / "set" / "**" / "train-*.jsonl")
    assert texts(source) == [f"train-{name} {i}" for name in "ab" for i in range(3)] and source.notices == ()
    assert source.where(4) == f"{tmp_path / 'set' / 'deep' / 'train-b.jsonl'}:2"
    both = load(tmp_path / "set" / "deep" / "t*.jsonl")
    assert len(both) == 9 and "matches files of the splits train, test, which are read as one" in both.notices[0]
    with pytest.raises(DataError, match=r"no file matches '.*/none-\*.jsonl'; correct the pattern"):
        load(tmp_path / "none-*.jsonl")
    put(tmp_path / "set" / "deep", "train-c")
    with pytest.raises(DataError, match=r"has 1 .parquet files and 3 others; list files of different formats as"):
        load(tmp_path / "set" / "deep" / "t*")


def test_files_that_are_not_read_are_counted(tmp_path: Path) -> None:
    directory = put(tmp_path / "set", "en/train", "de/train", "notes")
    write(directory / "en" / "train.csv", "prompt")
    source = load(directory)
    assert len(source) == 6
    (notice,) = source.notices
    assert notice == (
        f"data.source: of {directory}, the split train is read; not read: 1 .parquet file, 1 .csv file; files of "
        "several directories are read as one: de, en"
    )
    only = tmp_path / "only"
    only.mkdir()
    write(only / "train.csv", "prompt")
    with pytest.raises(DataError, match=r"only contains neither .* it has 1 .csv file, which are to be converted"):
        load(only)


def test_directories_without_datasets_name_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = put(tmp_path / "set", "train", suffix="jsonl")
    monkeypatch.setitem(sys.modules, "datasets.data_files", None)
    with pytest.raises(ConfigError, match=r"requires `datasets`, which is not installed; pip install 'corerl\[data\]'"):
        load(directory)
    assert len(load(directory / "train.jsonl")) == 3


def test_a_pattern_is_found_from_another_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, "a", "b", suffix="jsonl")
    monkeypatch.chdir(tmp_path)
    config = with_absolute_paths(config_of({"backend": {"name": "plain"}, "data": {"source": "*.jsonl"}}))
    monkeypatch.chdir("/")
    assert texts(load(config.data.source)) == [f"{name} {i}" for name in "ab" for i in range(3)]
