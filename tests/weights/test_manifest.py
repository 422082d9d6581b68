from __future__ import annotations

from corerl.weights.manifest import build_manifest

SHAPES: list[tuple[str, tuple[int, ...]]] = [("a", (2, 3)), ("b", ()), ("huge", (5, 5)), ("c", (3,)), ("d", (3,))]


def test_a_bucket_has_one_sender_and_senders_take_turns() -> None:
    stage_ranks = {"a": 0, "b": 4, "huge": 0, "c": 4, "d": 0}
    manifest = build_manifest(SHAPES, dtype="float32", bucket_bytes=28, stage_ranks=stage_ranks)
    assert [(bucket.stage_rank, [entry.name for entry in bucket.entries]) for bucket in manifest.buckets] == [
        (0, ["a"]),
        (4, ["b", "c"]),
        (0, ["huge"]),
        (0, ["d"]),
    ]
    assert [entry.start for entry in manifest.buckets[1].entries] == [0, 1]
    assert [bucket.index for bucket in manifest.buckets] == [0, 1, 2, 3] and manifest.stage_ranks == (0, 4)


def test_equal_manifests_alone_have_equal_digests() -> None:
    def digest(shapes: list[tuple[str, tuple[int, ...]]], dtype: str = "float32", limit: int = 28) -> str:
        return build_manifest(shapes, dtype=dtype, bucket_bytes=limit).digest

    assert digest(SHAPES) == digest(list(SHAPES))
    others = {digest(SHAPES[::-1]), digest(SHAPES, "bfloat16"), digest(SHAPES, limit=1000), digest(SHAPES[1:])}
    assert len(others | {digest(SHAPES)}) == 5

    def of_last(sender: int) -> str:
        stage_ranks = {name: 0 for name, _ in SHAPES} | {SHAPES[-1][0]: sender}
        return build_manifest(SHAPES, dtype="float32", bucket_bytes=28, stage_ranks=stage_ranks).digest

    assert digest(SHAPES) == of_last(0) != of_last(1)
