"""An answer of `/generate` as SGLang 0.5.17 writes it, and what is made of it."""

from __future__ import annotations

import gc

from corerl_sglang.generated import read_samples

ANSWER = (
    b'[{"output_ids":[7,151643],"meta_info":{"id":"6f","finish_reason":{"type":"length","length":2},"prompt_tokens":3,'
    b'"weight_version":"4","num_retractions":0,"input_token_logprobs":[],"output_token_logprobs":'
    b'[[-0.6931471824645996,7,null],[null,151643,null]],"output_token_logprobs_length":2,"routed_experts":"AAECAw==",'
    b'"e2e_latency":0.5,"response_sent_to_client_ts":1763800000.25}},'
    b'{"output_ids":[],"meta_info":{"id":"70","finish_reason":{"type":"abort","message":"Abort in waiting queue",'
    b'"status_code":null},"prompt_tokens":3,"weight_version":"4"}}]'
)


def test_tokens_and_logprobs_are_read_from_answers() -> None:
    drawn, cut = read_samples(ANSWER)
    told = drawn.meta_info
    assert drawn.output_ids == [7, 151643]
    assert [token.id for token in told.output_token_logprobs] == [7, 151643]
    assert [token.logprob for token in told.output_token_logprobs] == [-0.6931471824645996, None]
    assert (told.finish_reason, told.weight_version) == ({"type": "length", "length": 2}, "4")
    assert told.routed_experts == "AAECAw=="
    assert (cut.output_ids, cut.meta_info.output_token_logprobs, cut.meta_info.routed_experts) == ([], [], None)
    assert cut.meta_info.finish_reason["type"] == "abort"


def test_reading_tokens_does_not_run_the_garbage_collector() -> None:
    """It would go through the whole process each time, while a rollout waits."""
    many = ANSWER.replace(b"[null,151643,null]", b",".join([b"[null,151643,null]"] * 50_000))
    collections: list[str] = []

    def noted(phase: str, _: dict[str, int]) -> None:
        collections.append(phase)

    gc.callbacks.append(noted)
    try:
        drawn, _ = read_samples(many)
    finally:
        gc.callbacks.remove(noted)
    assert len(drawn.meta_info.output_token_logprobs) == 50_001
    assert len(collections) <= 2  # one, that was due anyway: its start and its stop; tokens that are seen make dozens
