from __future__ import annotations

from typing import Any

import pytest
import torch

from corerl.weights.chunks import Chunk
from corerl.weights.gather import GatherPlan, first_of_stages
from corerl.weights.manifest import build_manifest
from corerl_testing.pool import RankPool
from tests.weights import ranks
from tests.weights.ranks import CPU


@pytest.fixture(scope="module")
def reports(rank_pool: RankPool) -> list[dict[str, Any]]:
    return rank_pool.run(ranks.report)


@pytest.mark.parametrize(
    ("scenario", "receivers"),
    [
        ("sharded to root 0", [0]),
        ("sharded to root 1", [1]),
        ("sharded to all", [0, 1]),
        ("staged to root 0", [0]),
        ("staged to all", [0, 1]),
        ("copied to root 1", [1]),
        ("copied to all", [0, 1]),
        ("experts to root 0", [0]),
        ("experts to root 1", [1]),
        ("experts to all", [0, 1]),
    ],
)
def test_receivers_get_every_bucket_bit_for_bit(
    reports: list[dict[str, Any]], scenario: str, receivers: list[int]
) -> None:
    for rank, report in enumerate(reports):
        seen = report[scenario]
        assert seen["buckets"] >= 2
        expected = 2 * seen["buckets"] if rank in receivers else 0
        assert (seen["received"], seen["right"]) == (expected, expected)


def test_all_ranks_order_tensors_by_first_appearance(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert report["sharded to all"]["order"] == ["embed", "norm", "q", "head", "scale"]
        assert report["staged to all"]["order"] == ["embed", "q", "head", "norm", "scale"]


def test_a_pipeline_stage_has_a_sender_of_its_own(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert report["staged to all"]["stage_ranks"] == {"embed": 0, "q": 0, "head": 0, "norm": 1, "scale": 1}
        for scenario in ("sharded to all", "copied to all"):
            assert set(report[scenario]["stage_ranks"].values()) == {0}


@pytest.mark.parametrize(
    ("held", "stage_ranks"),
    [
        ([{"a"}, {"a"}, {"b"}, {"b"}], {"a": 0, "b": 2}),  # two stages, split over two ranks each
        ([{"n", "x"}, {"n", "y"}, {"m", "z"}], {"n": 0, "x": 0, "y": 0, "m": 2, "z": 2}),  # experts x, y and z
        ([{"a"}, {"b"}, {"c", "a"}], {"a": 0, "b": 1, "c": 0}),  # tied embeddings on the first stage and the last
        ([{"a"}, {"b"}, {"a", "b"}, {"c"}], {"a": 0, "b": 0, "c": 3}),
        ([set(), {"a"}, {"b"}], {"a": 0, "b": 2}),
        ([{"a"}, {"a"}], {"a": 0}),
        ([set()], {}),
    ],
)
def test_ranks_that_share_a_tensor_are_of_one_stage(held: list[set[str]], stage_ranks: dict[str, int]) -> None:
    assert first_of_stages(held) == stage_ranks


def test_no_allocation_is_larger_than_two_buckets(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        for scenario in ("sharded to root 0", "sharded to all", "staged to root 0"):
            assert report[scenario]["largest"] <= 2 * report[scenario]["bucket"]


def test_what_lies_whole_on_every_rank_is_sent_nowhere(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert report["sent of copies"] == []


def test_wrong_chunks_are_refused_on_all_ranks(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert "the chunks of rank(s) 0 omit 768 elements of 'head', [64, 32]" in report["dropped"]
        assert "the chunks of rank(s) 0, 1 have 32 elements too many of 'norm', [32]" in report["doubled"]
        assert "rank 1 declares 'head' as part of [24, 32], but rank 0 as part of [64, 32]" in report["misshapen"]
        assert (
            "the chunks of rank 1 are wrong: 'head' has a view of shape [40, 32], but a box of [24, 32]"
            in report["wrong view"]
        )


@pytest.mark.parametrize(("held", "copies"), [("stacked", 3), ("apart", 18), ("large", 18)])
def test_experts_of_one_weight_are_copied_at_once(monkeypatch: pytest.MonkeyPatch, held: str, copies: int) -> None:
    if held == "large":
        monkeypatch.setattr("corerl.weights.gather.SMALL", 1)
    whole = ranks.matrices(ranks.stacks())
    # Apart they have other storages, though at offsets that grow as in one.
    views = {
        name: torch.cat([torch.zeros(number, *view.shape), view[None]])[number] if held == "apart" else view
        for number, (name, view) in enumerate(whole.items())
    }
    chunks = [Chunk(name, tuple(view.shape), (0, 0), tuple(view.shape), view) for name, view in views.items()]
    plan = GatherPlan.build(chunks, None)
    (bucket,) = build_manifest(plan.shapes, dtype="float32", bucket_bytes=1 << 20).buckets
    with ranks.Largest() as seen:
        out = plan.gather(bucket, chunks=chunks, root=None, dtype=torch.float32, device=CPU)
    assert out is not None
    assert all(torch.equal(view, whole[name]) for name, view in bucket.views(out).items())
    assert seen.copies == copies


def test_a_rank_that_receives_experts_copies_them_at_once(reports: list[dict[str, Any]]) -> None:
    # Of experts 0 to 2: rank 0's gate, up and down, and rank 1's down; of the others: both ranks' gate, up and down.
    # They are 24 boxes. Twice, since both buckets are gathered twice.
    assert reports[0]["experts to root 0"]["copies"] == 2 * (4 + 6)


def test_a_single_process_gathers_without_torch_distributed() -> None:
    whole = torch.randn(6, 4)
    chunks = [
        Chunk("w", (6, 4), (0, 0), (6, 1), whole[:, :1]),
        Chunk("w", (6, 4), (0, 1), (6, 3), whole[:, 1:]),
        Chunk("b", (), (), (), torch.tensor(3.0)),
    ]
    plan = GatherPlan.build(chunks, None)
    (bucket,) = build_manifest(plan.shapes, dtype="bfloat16", bucket_bytes=1000).buckets
    out = torch.empty(25, dtype=torch.bfloat16)
    for root in (0, None):
        got = plan.gather(bucket, out.zero_(), chunks=chunks, root=root, dtype=torch.bfloat16, device=CPU)
        assert got is out
        assert torch.equal(out, torch.cat([whole.reshape(-1), torch.tensor([3.0])]).to(torch.bfloat16))


def test_fresh_chunks_of_the_same_boxes_are_what_is_sent() -> None:
    def chunks(value: float) -> list[Chunk]:
        return [Chunk("w", (3,), (0,), (3,), torch.full((3,), value))]

    plan = GatherPlan.build(chunks(1.0), None)
    (bucket,) = build_manifest(plan.shapes, dtype="float32", bucket_bytes=1000).buckets
    got = plan.gather(bucket, chunks=chunks(2.0), root=None, dtype=torch.float32, device=CPU)
    assert got is not None and got.tolist() == [2.0, 2.0, 2.0]
