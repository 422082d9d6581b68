"""Weight updates: an engine gets every tensor once, as trained."""

from __future__ import annotations

import math
import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from corerl.config import WeightsConfig
from corerl.models import stored_buffers
from corerl.plugin import Capability
from corerl_testing.causes import Mismatch
from corerl_testing.compare import (
    assert_follows,
    different,
    files_of,
    require_same_state,
    whole,
)
from corerl_testing.marks import check
from corerl_testing.models import BUFFERS
from corerl_testing.require import require, require_equal
from corerl_testing.scenarios import updates
from corerl_testing.subject import PLAIN, Subject
from corerl_testing.suite.test_errors import require_error

SENT = ("sent",)


def require_sent(names: Sequence[str], wanted: Iterable[str]) -> None:
    """Each of the model's weights arrived once."""
    times = Counter(names)
    require_equal("the number of times that an engine got each weight", dict(times), dict.fromkeys(sorted(wanted), 1))


@check("C21", level=1, builds_on=["C12"], variants={"kind": "qwen3-tied"})
@pytest.mark.parametrize("kind", ["qwen3", "qwen3-tied", "qwen3-moe"])
def test_an_update_delivers_every_tensor_once_and_bit_for_bit(subject: Subject, kind: str, tmp_path: Path) -> None:
    ranks = subject.run(updates.push_weights, subject.setup(kind), False)
    trained = whole([rank.state for rank in ranks])["master"]
    root, *others = ranks
    require_sent(root.names, files_of(subject.model(kind)))
    if not different({"sent": root.tensors_then}, {"sent": trained}, SENT):
        raise Mismatch(
            "the second update, after another step, sends the weights of before that step: gather them in each update, "
            "from what the optimizer has stepped or a copy that is made after each step"
        )
    require_same_state("weights as an engine gets them and as trained", {"sent": root.tensors}, {"sent": trained}, SENT)
    then, sent = whole([rank.state_then for rank in ranks])["master"], {"sent": root.tensors_then}
    require_same_state("weights of the second update, after another step, and as trained", sent, {"sent": then}, SENT)
    require_equal("UpdateResult.engines", root.result.engines, {"engine-0": ""})
    number = sum(4 * tensor.size for tensor in trained.values())
    require_equal("UpdateResult.bytes of the rank that sends", root.result.bytes, number)
    for other in others:
        require_equal("the list of weights that a rank sends that is not asked to", other.names, [])
        require_equal("UpdateResult.bytes of that rank", other.result.bytes, 0)

    shutil.copy(subject.model(kind) / "config.json", tmp_path)
    save_file({name: torch.tensor(value) for name, value in root.tensors.items()}, tmp_path / "model.safetensors")
    from_pretrained: Any = AutoModelForCausalLM.from_pretrained
    model, found = from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        require_equal(f"the list of {problem} as transformers loads what was sent", sorted(found[problem]), [])
    loaded = {name: param.detach().numpy() for name, param in model.named_parameters() if name in trained}
    wanted = {"sent": {name: trained[name] for name in loaded}}
    require_same_state("weights as transformers loads what was sent, and as trained", {"sent": loaded}, wanted, SENT)


@check("C21", level=1, builds_on=["C12"])
@pytest.mark.parametrize("kind", ["qwen3-tied", "qwen3-moe"])
def test_an_update_can_reach_every_rank_in_bfloat16(subject: Subject, kind: str) -> None:
    setup = evolve(subject.setup(kind), weights=WeightsConfig(bucket_bytes=2**14, dtype="bfloat16"))
    ranks = subject.run(updates.push_weights, setup, True)
    trained = whole([rank.state for rank in ranks])["master"]
    rounded = {name: torch.tensor(value).bfloat16().float().numpy() for name, value in trained.items()}
    for rank in ranks:
        require_sent(rank.names, trained)
        what = "weights as sent in bfloat16, and as trained and rounded,"
        require_same_state(what, {"sent": rank.tensors}, {"sent": rounded}, SENT)


@check("C46", level=1, builds_on=["C21"])
@pytest.mark.parametrize("kind", ["qwen3-tied", "qwen3-moe"])
def test_an_update_holds_a_few_buckets_and_never_the_model(subject: Subject, kind: str) -> None:
    ranks = subject.run(updates.push_watched, subject.setup(kind))
    total = sum(4 * math.prod(shape) for shape in files_of(subject.model(kind)).values())
    # A rank that sends nothing and has only replicas needs no memory.
    require(any(rank.largest for rank in ranks), "no rank allocated a byte during an update, so none was measured")
    for rank in ranks:
        require(
            rank.largest <= 4 * rank.bucket,
            f"an update allocated a tensor of {rank.largest} bytes, expected at most four buckets of {rank.bucket}",
        )
        require(
            rank.peak < total / 2,
            f"an update held {rank.peak} bytes at once, expected less than half of the model's {total}: gather each "
            "bucket by itself",
        )


@check("C47", level=1, builds_on=["C21"])
def test_a_failed_engine_is_reported_and_training_continues(subject: Subject) -> None:
    ranks = subject.run(updates.push_to_a_failing_engine, subject.setup("qwen3"))
    failed, then = ranks[0].result.engines, ranks[0].then.engines
    require_equal("UpdateResult.engines of an update to an engine that fails", failed, {"engine-0": "out of memory"})
    require_equal("UpdateResult.engines of the next update, to one that works,", then, {"engine-0": ""})
    require_sent(ranks[0].names, ranks[0].wanted)


@check("C22", level=1, builds_on=["C21"])
def test_an_update_with_an_old_version_is_refused(subject: Subject) -> None:
    for rank in subject.run(updates.push_weights, subject.setup("qwen3"), False):
        message = "WeightUpdateError: weights version 1 was refused"
        require_error("sending version 1 a second time", rank.refused, message)
        require_equal("the number of tensors that arrived with a refused version", rank.arrived_after, 0)


@check("C22", level=1, builds_on=["C18", "C21"])
def test_a_resumed_run_continues_its_weight_versions(subject: Subject) -> None:
    ranks = subject.run(updates.version_after_resume, subject.setup("qwen3"), str(subject.directory / "actor"))
    for version, refused in ranks:
        require_equal("InitResult.weights_version after a resume from a checkpoint of version 7", version, 7)
        message = "WeightUpdateError: weights version 6 was refused"
        require_error("sending version 6 after a resume at 7", refused, message)


@check(
    "C64",
    level=1,
    needs=[Capability.MOE, Capability.BUFFERS],
    builds_on=["C15", "C18", "C19", "C21", "C27", "C41", "C51"],
)
def test_weights_in_buffers_are_loaded_sent_and_saved_unchanged(subject: Subject) -> None:
    setup, checkpoint = subject.setup(BUFFERS), subject.checkpoint(1)
    model: Any = AutoModelForCausalLM.from_pretrained(subject.model(BUFFERS), dtype=torch.float32)
    held = {name: buffer.numpy() for name, buffer in stored_buffers(model).items()}
    require(held and all(buffer.any() for buffer in held.values()), f"the model's buffers are {held}, expected numbers")
    trained = subject.train(setup, range(2), save_after=1, save_to=checkpoint.role)
    plain = subject.runs.trained_as(1, subject.runs.setup(PLAIN, BUFFERS), 2)
    assert_follows(trained, plain)
    resumed = subject.runs.train(1, subject.runs.setup(PLAIN, BUFFERS), [], resume=checkpoint.complete())
    for when, state in (("loaded", trained.at_start), ("trained", trained.state), ("saved", resumed.state)):
        require_same_state(f"buffers() as {when}, and in the model's files,", state, {"buffer": held}, ["buffer"])
    # Rounded to bfloat16, a router's bias would send tokens to other experts.
    setup = evolve(setup, weights=WeightsConfig(bucket_bytes=2**14, dtype="bfloat16"))
    root, *_ = subject.run(updates.push_weights, setup, False)
    sent = {name: root.tensors[name] for name in held}
    what = "buffers as sent in an update in bfloat16, which must stay float32, and in the model's files,"
    require_same_state(what, {"buffer": sent}, {"buffer": held}, ["buffer"])
    require_sent(root.names, files_of(subject.model(BUFFERS)))
