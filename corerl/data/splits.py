"""Find the files that `data.source` names: one file, those of a pattern, or one split of a directory as `datasets`
reads it."""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from corerl.errors import ConfigError, DataError
from corerl.messages import did_you_mean
from corerl.regular import require_all_regular

READ = (".jsonl", ".json", ".parquet")
# What else data sets are published as: such files are counted in a notice, other files of a directory are not.
OTHER = {".csv", ".tsv", ".arrow", ".gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".png", ".jpg", ".wav", ".mp4"}
TRAIN = "train"


@frozen(kw_only=True)
class Found:
    """The files of one data set."""

    paths: Sequence[Path]  # in order; or one directory that `save_to_disk` has written
    notice: str = ""  # one line about files that are not read


def is_pattern(source: str) -> bool:
    return glob.has_magic(source) and not os.path.exists(source)


def find(source: str, *, split: str = "", subset: str = "", common: tuple[str, str] = ("", "")) -> Found:
    """The files of a source; `split` and `subset` choose among those of a directory, '' the `common` ones, if it has
    several, and else those that `datasets` takes by default, of splits `train`. Raises OSError for pipes, DataError if
    there are no such files, ConfigError for a choice that the source does not have."""
    path = Path(source)
    if not os.path.isdir(path):
        _require_no_choice(source, split=split, subset=subset)
        return _matched(source) if is_pattern(source) else Found(paths=[path])
    require_all_regular(path)
    if (path / "refs" / "main").is_file() and (path / "snapshots").is_dir():  # of Hugging Face's cache
        path = path / "snapshots" / (path / "refs" / "main").read_text(errors="replace").strip()
    if (path / "state.json").is_file():
        _require_no_choice(source, split=split, subset=subset)
        return Found(paths=[path])
    if (path / "dataset_dict.json").is_file():
        _require_no_choice(source, subset=subset)
        splits = {entry.name: [entry] for entry in sorted(path.iterdir()) if (entry / "state.json").is_file()}
        others = []
    else:
        data = _data_in(path)
        splits = _splits(path, _subset(path, subset, common[1]))
        used = {file for files in splits.values() for file in files}
        others = [file for file in data if file not in used]
    if (chosen := split or common[0] or TRAIN) not in splits:
        raise ConfigError(
            f"data.split: {chosen!r}, but {source} has the splits {', '.join(splits) or 'none'}; set it to one of them"
            f"{did_you_mean(chosen, splits)}"
        )
    files = splits.pop(chosen)
    paths = [file for file in files if file.suffix not in OTHER]
    if not paths:
        raise DataError(f"data.source: the split {chosen} of {source} is {_counted(files)}; convert it to .jsonl")
    unread = [f"the split {name}" for name in splits]
    if others := [*others, *(file for file in files if file.suffix in OTHER)]:
        unread.append(_counted(others))
    directories = sorted({str(file.parent.relative_to(os.path.abspath(path))) for file in paths if file.is_file()})
    said = [f"not read: {', '.join(unread)}"] * bool(unread)
    said += [f"files of several directories are read as one: {', '.join(directories)}"] * (len(directories) > 1)
    return Found(
        paths=paths, notice=f"data.source: of {source}, the split {chosen} is read; {'; '.join(said)}" if said else ""
    )


def _matched(pattern: str) -> Found:
    files = sorted(Path(each) for each in glob.glob(pattern, recursive=True) if os.path.isfile(each))
    if not files:
        raise DataError(f"data.source: no file matches {pattern!r}; correct the pattern, or name a file or directory")
    absolute = {Path(os.path.abspath(file)) for file in files}
    splits = _splits(Path(os.path.commonpath([file.parent for file in absolute])), {})
    several = [name for name, members in splits.items() if not absolute.isdisjoint(members)]
    read = f"data.source: {pattern} matches files of the splits {', '.join(several)}, which are read as one"
    return Found(paths=files, notice=read if len(several) > 1 else "")


def _data_in(root: Path) -> list[Path]:
    data = [file for file in _resolved("**", root) if file.suffix in (*READ, *OTHER)]
    if any(file.suffix in READ for file in data):
        return data
    there = f"; it has {_counted(data)}, which are to be converted to .jsonl" if data else ""
    raise DataError(
        f"data.source: {root} contains neither .jsonl or .parquet files nor a data set saved by `save_to_disk`{there}"
    )


def _resolved(pattern: str, root: Path) -> list[Path]:
    """The files of a directory that match a pattern as `datasets` reads it."""
    from datasets.data_files import resolve_pattern

    try:
        files = resolve_pattern(pattern, glob.escape(os.path.abspath(root)))
        return [Path(os.path.abspath(file)) for file in sorted(files)]
    except FileNotFoundError:
        return []


def _splits(root: Path, table: Mapping[str, Any]) -> dict[str, list[Path]]:
    """The files of each split of a directory, by the data set's card or by their names."""
    from datasets.data_files import get_data_patterns, sanitize_patterns

    base = root / (table.get("data_dir") or "")
    named = table.get("data_files")
    patterns = sanitize_patterns(named) if named else get_data_patterns(glob.escape(os.path.abspath(base)))
    splits: dict[str, list[Path]] = {}
    for name, each in patterns.items():
        # A card could name any file of the machine, and addresses.
        addresses = [pattern for pattern in each if "://" in pattern]
        found = {} if addresses else dict.fromkeys(file for pattern in each for file in _resolved(pattern, base))
        if outside := [*addresses, *(file for file in found if not file.is_relative_to(os.path.abspath(root)))]:
            raise DataError(f"data.source: README.md of {root} names {outside[0]}, which is not in this directory")
        if files := [file for file in found if file.suffix in (*READ, *OTHER)]:
            splits[str(name)] = files
    return splits


def _subset(root: Path, subset: str, common: str) -> Mapping[str, Any]:
    """What the data set's card says of a subset, else of the `common` one; nothing if it names none."""
    from datasets.utils.metadata import MetadataConfigs
    from huggingface_hub import DatasetCard

    card = root / "README.md"
    try:
        said = DatasetCard.load(card).data if card.is_file() else {}
        tables: Mapping[str, Mapping[str, Any]] = MetadataConfigs.from_dataset_card_data(said)
        chosen = subset or common or MetadataConfigs(tables).get_default_config_name()
    except Exception as error:  # of a parser of YAML, and of what looks into it
        raise DataError(f"data.source: cannot read the header of {card}: {' '.join(str(error).split())}") from error
    if not tables:
        _require_no_choice(str(root), subset=subset)
        return {}
    if chosen in tables:
        return tables[chosen]
    raise ConfigError(
        f"data.subset: {chosen or ''!r}, but {root} has the subsets {', '.join(tables)}; set it to one of them"
        f"{did_you_mean(chosen or '', tables)}"
    )


def _require_no_choice(source: str, **choices: str) -> None:
    for name, chosen in choices.items():
        if chosen:
            raise ConfigError(f"data.{name}: {chosen!r}, but {source} has no {name}s; remove it")


def _counted(files: Sequence[Path]) -> str:
    kinds = Counter(file.suffix for file in files)
    return ", ".join(f"{count} {kind} file{'s' * (count > 1)}" for kind, count in kinds.items())
