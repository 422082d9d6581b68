"""What is kept of a sample's tokens, compared with the batch's own columns."""

from __future__ import annotations

import numpy as np
import pytest

from corerl_page.records import Pieces, chosen, rows_by_sample, tokens_record
from plugins.page.tests.batches import END, batch, decode


def records(*, recomputed: bool = True) -> list[dict]:  # type: ignore[type-arg]
    found, pieces = batch(), Pieces(lambda tokens: decode(list(tokens)))
    return [tokens_record(found, rows, pieces, recomputed=recomputed, ends={END}) for rows in rows_by_sample(found)]


def test_every_row_belongs_to_its_sample() -> None:
    assert [rows.tolist() for rows in rows_by_sample(batch())] == [[0], [1], [2, 3], [4]]


def test_tokens_carry_the_numbers_of_their_columns() -> None:
    found, columns = records(), batch().columns
    rows = [row for record in found for row in record["rows"]]
    mask = columns["loss_mask"]
    for name, column in {"engine": "rollout_logprobs", "trainer": "old_logprobs", "advantages": "advantages"}.items():
        kept = np.concatenate([row[name] for row in rows])
        np.testing.assert_allclose(kept, columns[column][mask], rtol=1e-5)
    versions = [version for row in rows for count, version in row["versions"] for _ in range(count)]
    assert versions == columns["versions"][mask].tolist()
    assert ["".join(row["pieces"]) for row in rows] == ["abcdh", "abefg", "bacdefh", "bacabgh", "baaah"]
    assert rows[2]["spans"] == [[2, 3], [5, 7]]
    assert rows[2]["rewards"] == [[2, 0.5]]


def test_a_branch_says_where_it_begins() -> None:
    episode = records()[2]
    assert [row["shared"] for row in episode["rows"]] == [0, 3]
    assert [row["final"] for row in episode["rows"]] == [False, True]


def test_cut_off_and_ended_samples_are_told_apart() -> None:
    assert [(each["truncated"], each["ended"]) for each in records()] == [
        (False, True),
        (True, False),
        (False, True),
        (False, True),
    ]


def test_differences_are_means_over_all_rows_of_a_sample() -> None:
    columns, offsets = batch().columns, batch().offsets
    part = slice(offsets[2], offsets[4])
    sizes = np.abs(columns["old_logprobs"] - columns["rollout_logprobs"])[part][columns["loss_mask"][part]]
    assert records()[2]["diff"] == pytest.approx([sizes.mean(), sizes.max()], rel=1e-5)
    assert all("diff" not in each and "trainer" not in each["rows"][0] for each in records(recomputed=False))


def test_a_character_of_several_tokens_is_shown_once() -> None:
    def bytes_of(tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")

    text = "aß€🙂b"
    pieces = Pieces(lambda tokens: bytes_of(list(tokens))).of(np.array(list(text.encode())))
    assert "".join(pieces) == text
    assert len(pieces) == len(text.encode())


def test_samples_are_spread_over_the_step() -> None:
    assert chosen(10, 0) == list(range(10))
    assert chosen(3, 64) == [0, 1, 2]
    assert chosen(512, 3) == [0, 256, 511]
