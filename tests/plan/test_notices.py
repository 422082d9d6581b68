"""The slow paths that a run takes on GPUs are among its first lines, each with its price and what avoids it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from attrs import evolve

from corerl.config import ClusterInfo
from corerl.data.chat import ChatPrompts
from corerl.data.prompts import SortDigits
from corerl.kinds import InPieces, ModelSize
from corerl.plan import make, roles
from corerl.plan.make import make_plan
from corerl.plan.notices import opened_reasoning
from corerl.plan.plan import Plan
from corerl.plugin import SlowPath
from corerl.plugin.registry import Kind, Loaded, load
from corerl.plugin.slow import FLOAT32, IN_PIECES, slow_attention
from corerl_agents.script import byte_tokenizer
from tests.driver.saved import CRITIC, DATA, config_in, make_config, make_model
from tests.plan.test_forecast import LARGE
from tests.plan.test_settle import planned_on

GEMMA2 = {"model_type": "gemma2", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 32}
GEMMA2 |= {"num_key_value_heads": 1, "intermediate_size": 64, "vocab_size": 97}


def told(plan: Plan) -> list[str]:
    """Without what was settled."""
    return [line for line in plan.notices if "'auto' is" not in line]


def planned(tmp_path: Path, *, backend: str = "deepspeed", model: dict[str, Any] | None = None, **tables: Any) -> Plan:
    """A run on GPUs of this machine, which are large."""
    table = {**DATA["model"], "config": model or LARGE}
    config = config_in(tmp_path / "run", backend={"name": backend}, **{"model": table, **tables})
    config = evolve(config, cluster=evolve(config.cluster, device="cuda"))
    with (
        mock.patch.object(make, "resolve_device", return_value="cuda"),
        mock.patch.object(make, "has_bfloat16", return_value=True),
        mock.patch.object(make, "device_memory", return_value=2**40),
    ):
        return make_plan(config)


def test_a_fast_run_says_nothing(tmp_path: Path) -> None:
    assert told(planned(tmp_path)) == []


def test_float32_is_told_with_its_price_where_it_was_asked_for_and_where_there_is_nothing_better(
    tmp_path: Path,
) -> None:
    what = (
        "train.precision: float32 has neither a kernel for packed attention nor the fast matrix products of half "
        f"precision; {FLOAT32}; "
    )
    assert told(planned(tmp_path, train={"precision": "float32"})) == [f"{what}set it to 'bfloat16'"]
    with mock.patch.object(make, "has_bfloat16", return_value=False):
        plan = planned_on(0, tmp_path, backend="deepspeed")
    assert told(plan) == [f"{what}bfloat16, which the GPU or the backend lacks, would avoid it"]


def test_on_a_cpu_nothing_is_told(tmp_path: Path) -> None:
    model = {**DATA["model"], "config": GEMMA2}
    plan = make_plan(config_in(tmp_path / "run", model=model, train={"precision": "float32"}))
    assert plan.notices == ()


@pytest.mark.parametrize(
    ("settings", "rollout", "told"),
    [
        ({"repetition_penalty": 1.05, "top_k": 20, "eos_token_id": 2, "do_sample": True}, {}, "top_k=20"),
        ({"suppress_tokens": [7], "min_new_tokens": 0, "repetition_penalty": 1.0}, {}, "suppress_tokens=[7]"),
        ({"temperature": 0.6, "top_p": 0.9, "top_k": 9}, {"temperature": 0.6, "top_p": 0.9, "top_k": 9}, ""),
        ({"temperature": 1.0, "top_p": 1.0, "top_k": None}, {"temperature": 0.7}, ""),
    ],
)
def test_sampling_that_the_models_authors_ask_for_is_told_where_it_is_not_done(
    tmp_path: Path, settings: dict[str, Any], rollout: dict[str, Any], told: str
) -> None:
    make_model(make_config(), seed=0).save_pretrained(tmp_path / "model")
    (tmp_path / "model/generation_config.json").write_text(json.dumps(settings))
    model = {"path": str(tmp_path / "model"), "tokenizer": DATA["model"]["tokenizer"]}
    plan = make_plan(config_in(tmp_path / "run", model=model, rollout={**DATA["rollout"], **rollout}))
    found = [line for line in plan.notices if "generation_config.json" in line]
    assert len(found) == bool(told)
    assert all(told in line and line.endswith("not done: samples are drawn as [rollout] says") for line in found)
    assert ("repetition_penalty=1.05" in "".join(found)) == (settings.get("repetition_penalty") == 1.05)


def test_attention_that_no_kernel_fits_is_told_of_the_model(tmp_path: Path) -> None:
    (line,) = told(planned(tmp_path, model=GEMMA2))
    assert line == (
        "model.config: attention runs on padded rows instead of one kernel over packed tokens, because it caps its "
        f"scores; {IN_PIECES[InPieces.CAPS]}; no setting avoids it, only another model"
    )


def test_roles_of_one_table_are_told_once_and_a_role_with_its_own_under_its_own(tmp_path: Path) -> None:
    slow = {"precision": "float32"}
    assert len(told(planned(tmp_path, train=slow, **CRITIC))) == 1
    own = {"critic": {"ranks": 1, "train": slow}}
    (line,) = told(planned(tmp_path, **{**CRITIC, "roles": own}))
    assert line.startswith("roles.critic.train.precision: float32 ")


def test_what_a_backends_spec_tells_is_placed_in_its_table_and_the_spec_knows_where_ranks_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[ClusterInfo, ModelSize]] = []

    def slow(config: Any, cluster: ClusterInfo, size: ModelSize) -> Iterable[SlowPath]:
        seen.append((cluster, size))
        yield SlowPath(path="speed", text="it is low", price="a step takes 3 times as long", instead="raise it")

    def slower(kind: Kind, name: str) -> Loaded:
        loaded = load(kind, name)
        return evolve(loaded, spec=evolve(loaded.spec, slow=slow))

    monkeypatch.setattr(roles, "load", slower)
    line = "backends.deepspeed.speed: it is low; a step takes 3 times as long; raise it"
    assert told(planned(tmp_path)) == told(planned_on(2**40, tmp_path, backend="deepspeed")) == [line]
    assert [cluster.elsewhere for cluster, _ in seen] == [False, True]
    assert {cluster.device for cluster, _ in seen} == {"cuda"} and all(size.in_pieces is None for _, size in seen)


@pytest.mark.parametrize("why", list(InPieces))
def test_only_packed_attention_is_told_and_every_reason_has_a_price(why: InPieces) -> None:
    size = ModelSize(layers=(1,), experts=(0,), embedding=1, head=1, rest=1, hidden=1, in_pieces=why)
    found = list(slow_attention(ClusterInfo(device="cuda", ranks=1), size))
    assert [each.price for each in found] == ([] if why is InPieces.OWN else [IN_PIECES[why]])


@pytest.mark.parametrize(
    ("source", "tables", "wanted"),
    [
        ("streamed", {"algorithm": {"kl_coef": 0.1}}, ["algorithm.kl_coef = 0.1 (its reference is a snapshot)"]),
        ("streamed", {"algorithm": {"kl_coef": 0.1}, "roles": {"reference": {}}}, []),
        ("streamed", {"algorithm": {}}, []),
        ("synchronous", {"algorithm": {"kl_coef": 0.1}}, []),
    ],
)
def test_a_snapshot_that_a_streamed_batch_swaps_in_for_each_of_its_parts_is_told(
    tmp_path: Path, source: str, tables: dict[str, Any], wanted: list[str]
) -> None:
    rollout = {**DATA["rollout"], "source": source}
    lines = told(planned(tmp_path, rollout=rollout, cluster={"offload": "never"}, **tables))
    assert [line.partition(": with rollout.source='streamed'")[0] for line in lines] == wanted
    assert all("[roles.reference]" in line for line in lines)


@pytest.mark.parametrize(
    ("place", "estimator", "gradient"),
    [
        (
            "loss",
            "k3-differentiated",
            "KL(reference || policy), and after the first optimizer step on a batch of neither",
        ),
        ("reward", "k2", "the mean of k2 - KL(policy || reference), which can lead away from the reference"),
        ("reward", "k3", "KL(policy || reference) - KL(reference || policy), which can lead away from the reference"),
        *(("loss", estimator, "") for estimator in ("k1", "k2", "k3", "")),
        *(("reward", estimator, "") for estimator in ("k1", "")),
    ],
)
def test_a_penalty_with_another_gradient_than_the_kls_is_named(
    tmp_path: Path, place: str, estimator: str, gradient: str
) -> None:
    given = {"kl_coef": 0.1, "kl_in": place, **({"kl_estimator": estimator} if estimator else {})}
    lines = make_plan(config_in(tmp_path / "run", algorithm=given)).notices
    assert [line for line in lines if line.startswith("algorithm.")] == [
        f"algorithm.kl_estimator: {estimator!r} with algorithm.kl_in={place!r}: the penalty's gradient is that of "
        f"{each}; remove it for that of KL(policy || reference)"
        for each in [gradient]
        if each
    ]


def test_a_reasoning_tag_that_the_chat_template_opens_is_told() -> None:
    ours, prompts = byte_tokenizer(), ChatPrompts(SortDigits(held_out=1, seed=0), system="")
    for special, more, line in (
        (False, {}, "rewards and samples.jsonl see that before the sampled text; it is not trained on"),
        (True, {}, "a special token, which rewards see with reward.special_tokens=true; it is not trained on"),
        (True, {"reward": {"special_tokens": True}}, "rewards and samples.jsonl see that before the sampled text; it "),
    ):
        ours.chat_template = "{{ messages[0].content }}{% if add_generation_prompt %}a: <think>{% endif %}"
        if special:
            ours.add_special_tokens({"additional_special_tokens": ["<think>"]})
        (told,) = opened_reasoning(make_config(**more), prompts, ours)
        assert told.startswith(f"data: the chat template begins each answer with '<think>': {line}")
        ours.chat_template = ours.chat_template.replace("<think>", "<think></think>")
        assert opened_reasoning(make_config(**more), prompts, ours) == []
    texts = SortDigits(held_out=1, seed=0)
    assert opened_reasoning(make_config(), texts, ours) == []
