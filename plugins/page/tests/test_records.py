"""What is kept of a sample's tokens, compared with the batch's own columns."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

from corerl_page.records import Pieces, chosen, credit_of, rows_by_sample, tokens_record
from plugins.page.tests.batches import END, batch, decode


def records(*, recomputed: bool = True) -> list[dict]:  # type: ignore[type-arg]
    found, pieces = batch(), Pieces(lambda tokens: decode(list(tokens)))
    return [tokens_record(found, rows, pieces, recomputed=recomputed, ends={END}) for rows in rows_by_sample(found)]


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


def test_pieces_have_the_spaces_between_words() -> None:
    """Also of tokenizers that leave out the one at the beginning of a text."""
    core = Tokenizer(models.WordLevel(dict(zip(["?", "\u2581The", "\u2581cat", "s"], range(4), strict=True)), "?"))
    core.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    assert core.decode([1, 2, 3]) == "The cats"
    assert Pieces(core.decode).of(np.array([1, 2, 3, 2])) == [" The", " cat", "s", " cat"]


def test_a_branch_says_where_it_begins() -> None:
    episode = records()[2]
    assert [row["shared"] for row in episode["rows"]] == [0, 3]
    assert [row["final"] for row in episode["rows"]] == [False, True]


def test_engines_are_those_of_the_tokens() -> None:
    found = records()
    assert [each["engines"] for each in found] == [[0], [1], [0, 1], [1]]
    assert [row["engines"] for row in found[2]["rows"]] == [[[3, 0]], [[3, 1]]]


def test_a_sample_stands_beside_those_of_prompt_and_role() -> None:
    found = credit_of(batch())
    assert [each["shaped"] for each in found] == [1.0, 0.0, 0.5, 0.25]
    assert found[0]["peers"] == found[1]["peers"] == [2, 0.5, pytest.approx(np.std([1.0, 0.0], ddof=1), rel=1e-5)]
    assert found[2]["peers"] == found[3]["peers"] == [2, 0.375, pytest.approx(np.std([0.5, 0.25], ddof=1), rel=1e-5)]
    roles = batch().with_row_columns(role=np.array(["white", "black", "white", "white", "white"]))
    assert [each["peers"][:2] for each in credit_of(roles)] == [[1, 1.0], [1, 0.0], [2, 0.375], [2, 0.375]]


def test_what_is_left_out_of_training_keeps_its_text() -> None:
    whole = batch()
    left = np.arange(5, 10)  # the sample that is cut off
    columns = {name: column.copy() for name, column in whole.columns.items()}
    for name in ("loss_mask", "rollout_logprobs", "old_logprobs", "versions", "engines", "advantages"):
        columns[name][left] = 0
    masked = whole.with_columns(**columns)
    pieces = Pieces(lambda tokens: decode(list(tokens)))
    found = tokens_record(masked, np.array([1]), pieces, recomputed=True, ends={END})
    assert (found["masked"], found["truncated"], found["ended"], found["tokens"]) == (True, True, False, 3)
    assert found["rows"][0]["spans"] == [[2, 5]] and found["rows"][0]["engine"] == []
    assert not {"engines", "diff", "advantage"} & found.keys() and found["versions"] == []
    assert "masked" not in tokens_record(masked, np.array([0]), pieces, recomputed=True, ends={END})


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
