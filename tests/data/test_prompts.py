import json
from pathlib import Path

import pytest

from corerl.data.prompts import PromptStream, SortDigits
from corerl.errors import CheckpointError, DataError
from tests.data.files import load, numbered


def test_held_out_prompts_follow_from_the_seed() -> None:
    source, again, other = (
        SortDigits(held_out=256, seed=1),
        SortDigits(held_out=256, seed=1),
        SortDigits(held_out=256, seed=2),
    )
    held_out = [prompt.index for prompt in source.held_out_prompts()]
    assert len(set(held_out)) == 256
    assert held_out == [prompt.index for prompt in again.held_out_prompts()]
    assert held_out != [prompt.index for prompt in other.held_out_prompts()]
    trained = {prompt.index for prompt in PromptStream(source, seed=1).take(100_000 - 256)}
    assert trained == set(range(100_000)) - set(held_out)


def test_a_position_of_other_data_or_seed_is_refused(tmp_path: Path) -> None:
    position = PromptStream(load(numbered(tmp_path / "p.jsonl", 21)), seed=5).position
    with pytest.raises(CheckpointError, match="has data=[0-9a-f]{16}, but this run has data=[0-9a-f]{16}; resume"):
        PromptStream(load(numbered(tmp_path / "q.jsonl", 11)), seed=5).restore(position)
    with pytest.raises(CheckpointError, match="has seed=5, but this run has seed=6"):
        PromptStream(load(tmp_path / "p.jsonl"), seed=6).restore(position)


# ---- prompts that are left out ---------------------------------------------------------------------------------------


def test_a_stream_is_resumed_where_others_are_left_out_now(tmp_path: Path) -> None:
    path = numbered(tmp_path / "p.jsonl", 21)
    source = load(path)
    source.leave_out({*source.train[:4].tolist()})
    stream = PromptStream(source, seed=5)
    stream.give_back(stream.take(20)[0])
    position = json.loads(json.dumps(stream.position))
    again = PromptStream(source, seed=5)
    again.restore(position)
    assert again.position == position
    following = stream.take(12)
    assert again.take(12) == following

    fewer = load(path)
    fewer.leave_out(source.left_out | {following[0].index, following[2].index})  # the first was given back
    later = PromptStream(fewer, seed=5)
    later.restore(position)
    kept = [prompt for prompt in following if prompt.index not in fewer.left_out]
    assert later.take(len(kept)) == kept


def test_leaving_out_all_training_prompts_is_refused(tmp_path: Path) -> None:
    source = load(numbered(tmp_path / "p.jsonl", 4))
    with pytest.raises(DataError, match="all 3 training prompts are skipped"):
        source.leave_out({*range(4)})
