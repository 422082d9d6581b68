"""Contradictions between settings, each with one line that says what to do."""

from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from corerl.config.load import config_of
from corerl.config.schema import (
    AlgorithmConfig,
    BackendChoice,
    CheckpointConfig,
    ClusterConfig,
    Config,
    DataConfig,
    DataSource,
    EvalConfig,
    EvalSource,
    ExtensionChoice,
    ModelConfig,
    RewardConfig,
    RoleChoice,
    RolesConfig,
    RolloutConfig,
    RunConfig,
    SideRoleChoice,
    TrainConfig,
    WeightsConfig,
)
from corerl.errors import ConfigError
from corerl.plan.check import contradictions, contradictions_of_a_group, uneven
from corerl.plan.resolve import settle_algorithm

MODEL = ModelConfig(config={"model_type": "qwen3"}, tokenizer="characters:0123")
VALID = Config(backend=BackendChoice(name="plain"), model=MODEL)


def actor(ranks: int, train: TrainConfig | None = None) -> RolesConfig:
    return RolesConfig(actor=RoleChoice(ranks=ranks, train=train))


def test_a_sound_configuration_has_no_problems(tmp_path: Path) -> None:
    assert contradictions(VALID) == []
    from_disk = evolve(
        VALID,
        model=ModelConfig(path=str(tmp_path)),
        backend=BackendChoice(name="my-dist:mine"),
        reward=RewardConfig(name="my.module:score"),
        checkpoint=CheckpointConfig(resume=str(tmp_path)),
    )
    assert contradictions(from_disk) == []


@pytest.mark.parametrize(
    ("model", "line"),
    [
        (
            ModelConfig(),
            (
                "model.path: neither model.path nor model.config is set; set model.path to a Hugging Face directory, "
                "or model.config to start from random weights"
            ),
        ),
        (
            ModelConfig(path=".", config={"model_type": "qwen3"}),
            (
                "model.config: set together with model.path='.'; keep model.path to train its weights, or "
                "model.config to start from random weights"
            ),
        ),
        (
            ModelConfig(config={"hidden_size": 8}, tokenizer="characters:ab"),
            "model.config.model_type: missing; set it to the architecture, such as 'qwen3'",
        ),
        (
            ModelConfig(config={"model_type": "qwen3"}),
            (
                "model.tokenizer: empty, but model.config has no tokenizer; set a tokenizer directory, or "
                "'characters:ABC' for one token per character"
            ),
        ),
        (
            ModelConfig(config={"model_type": "qwen3"}, tokenizer="characters:"),
            "model.tokenizer: 'characters:' lists no characters; append them, as in 'characters:ABC'",
        ),
        (
            ModelConfig(path="/no/such/model"),
            "model.path: no directory '/no/such/model'; set it to a downloaded Hugging Face model directory",
        ),
    ],
)
def test_a_model_is_either_read_or_described(model: ModelConfig, line: str) -> None:
    assert contradictions(evolve(VALID, model=model)) == [line]


def test_nothing_is_downloaded_which_a_name_of_the_hub_is_answered_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    start = "model.path: no directory 'Qwen/Qwen3-0.6B'; set it to a downloaded Hugging Face model directory"
    config = evolve(VALID, model=ModelConfig(path="Qwen/Qwen3-0.6B"))
    assert contradictions(config) == [
        f"{start}; if that is a name of the Hugging Face Hub: hf download Qwen/Qwen3-0.6B --local-dir Qwen/Qwen3-0.6B"
    ]
    beside = evolve(VALID, model=ModelConfig(path="models/Qwen3-0.6B"))  # where the examples have theirs
    assert contradictions(beside) == [start.replace("Qwen/", "models/")]
    (tmp_path / "Qwen" / "Qwen3-06B").mkdir(parents=True)
    assert contradictions(config) == [f"{start}; did you mean 'Qwen/Qwen3-06B'?"]


def batch(prompts: int, samples: int, mini_batches: int, ranks: int) -> Config:
    return evolve(
        VALID,
        rollout=RolloutConfig(prompts=prompts, samples=samples),
        train=TrainConfig(mini_batches=mini_batches),
        roles=actor(ranks),
    )


def test_prompts_make_equal_optimizer_steps() -> None:
    (line,) = contradictions(batch(10, 4, 4, 1))
    assert line == (
        "rollout.prompts: 10 does not split evenly into train.mini_batches=4 optimizer steps; use a multiple of 4, "
        "such as 12"
    )
    assert contradictions(batch(12, 4, 4, 1)) == []
    assert uneven("actor", batch(10, 4, 4, 3), data_parallel=3) == ""  # it is said already


@pytest.mark.parametrize(
    ("prompts", "samples", "mini_batches", "ranks", "data_parallel", "line"),
    [
        (
            # 5 prompts x 3 samples = 15 rows a step over 2 ranks: 2 x 3 x 3 = 18 would do, so prompts in steps of 2
            5,
            3,
            1,
            2,
            2,
            (
                "rollout.prompts: 5 x rollout.samples=3 / train.mini_batches=1 makes 15 samples per optimizer step, "
                "which do not divide evenly over roles.actor.ranks=2; use a multiple of 2, such as 6, or a number of "
                "ranks that divides 15"
            ),
        ),
        (
            # 6 x 4 / 2 = 12 rows over 8 ranks: a step needs an even number of prompts, so a batch a multiple of 4
            6,
            4,
            2,
            8,
            8,
            (
                "rollout.prompts: 6 x rollout.samples=4 / train.mini_batches=2 makes 12 samples per optimizer step, "
                "which do not divide evenly over roles.actor.ranks=8; use a multiple of 4, such as 8, or a number of "
                "ranks that divides 12"
            ),
        ),
        (
            # The same rows over 8 groups of 2 ranks each
            6,
            4,
            2,
            16,
            8,
            (
                "rollout.prompts: 6 x rollout.samples=4 / train.mini_batches=2 makes 12 samples per optimizer step, "
                "which do not divide evenly over the 8 data-parallel groups of roles.actor.ranks=16; use a multiple "
                "of 4, such as 8, or ranks and parallelism such that the number of groups divides 12"
            ),
        ),
    ],
)
def test_samples_that_do_not_divide_are_answered_with_a_multiple_that_does(
    prompts: int, samples: int, mini_batches: int, ranks: int, data_parallel: int, line: str
) -> None:
    config = batch(prompts, samples, mini_batches, ranks)
    assert uneven("actor", config, data_parallel=data_parallel) == line
    assert contradictions(config) == []  # how many groups there are is the backend's to say
    advised = int(line.split("such as ")[1].split(",")[0])
    assert uneven("actor", batch(advised, samples, mini_batches, ranks), data_parallel=data_parallel) == ""


def test_ranks_that_share_their_samples_need_no_more_of_them() -> None:
    config = batch(6, 4, 2, 8)
    assert uneven("actor", config, data_parallel=8) != ""
    assert [uneven("actor", config, data_parallel=groups) for groups in (1, 2, 4)] == ["", "", ""]


def test_a_roles_own_train_table_is_the_one_that_counts() -> None:
    config = evolve(VALID, train=TrainConfig(mini_batches=7), roles=actor(1, TrainConfig(mini_batches=3)))
    assert contradictions(config) == [
        (
            "rollout.prompts: 64 does not split evenly into roles.actor.train.mini_batches=3 optimizer steps; use a "
            "multiple of 3, such as 66"
        )
    ]


def test_all_contradictions_are_found_together() -> None:
    config = evolve(
        VALID,
        model=ModelConfig(),
        rollout=RolloutConfig(max_staleness=2),
        extensions=(ExtensionChoice(name="jsonl"), ExtensionChoice(name="jsonl")),
        checkpoint=CheckpointConfig(resume="nver"),
    )
    assert contradictions(config) == [
        *contradictions(evolve(VALID, rollout=RolloutConfig(max_staleness=2))),
        *contradictions(evolve(VALID, model=ModelConfig())),
        "extensions: 'jsonl' is listed 2 times; keep one",
        (
            "checkpoint.resume: no directory 'nver'; set 'never', 'auto', or a checkpoint's or a run's directory; did "
            "you mean 'never'?"
        ),
    ]


def test_offload_kinds_are_refused_where_no_rank_sleeps() -> None:
    def lines(**how: Any) -> list[str]:
        cluster = ClusterConfig(offload_kinds=("grad",), **how)
        assert contradictions_of_a_group(evolve(VALID, cluster=cluster)) == []  # which its loop lets sleep
        return contradictions(evolve(VALID, cluster=cluster))

    assert lines(offload="auto") == lines(offload="always") == []
    for name, value in {"offload": "never", "placement": "disaggregated"}.items():
        assert lines(**{name: value}) == [
            f"cluster.offload_kinds: set, but with cluster.{name}={value!r} no rank sleeps; remove one of the two"
        ]


# ---- algorithms ------------------------------------------------------------------------------------------------------


def test_a_critics_batch_is_its_own() -> None:
    critic = SideRoleChoice(ranks=2, train=TrainConfig(mini_batches=3))
    (line,) = contradictions(evolve(VALID, roles=RolesConfig(critic=critic)))
    assert line.startswith("rollout.prompts: 64 does not split evenly into roles.critic.train.mini_batches=3 ")


def test_a_critics_own_model_is_one_and_has_no_tokens_of_its_own(tmp_path: Path) -> None:
    def lines(**model: Any) -> list[str]:
        return contradictions(evolve(VALID, roles=RolesConfig(critic=SideRoleChoice(model=ModelConfig(**model)))))

    assert lines(path=str(tmp_path)) == []
    assert lines() == [
        "roles.critic.model: needs exactly one of path and config; set one, or remove the table to use [model]"
    ]
    assert lines(path=str(tmp_path), tokenizer="characters:ab") == [
        "roles.critic.model.tokenizer: the critic reads the actor's tokens; remove it"
    ]
    assert lines(path="/none") == [
        "roles.critic.model.path: no directory '/none'; set it to a downloaded Hugging Face model directory"
    ]


@pytest.mark.parametrize(
    ("algorithm", "start"),
    [
        ({"kl_target": 0.1}, "algorithm.kl_target: adapts algorithm.kl_coef, which is 0"),
        ({"reference_every": 10}, "algorithm.reference_every: set, but algorithm.kl_coef=0 keeps no reference policy"),
        ({"kl_coef": 0.1, "reference": "/none"}, "algorithm.reference: no directory '/none'; set it to a Hugging"),
        (
            {"kl_coef": 0.1, "reference_every": 20},
            "checkpoint.every: 50 is not a multiple of algorithm.reference_every=20; a resumed run starts",
        ),
        ({"kl_in": "reward"}, "algorithm.kl_in: 'reward', but algorithm.kl_coef is 0"),
        (
            {"kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "k3-differentiated"},
            "algorithm.kl_estimator: 'k3-differentiated', but algorithm.kl_in='reward' differentiates no estimator",
        ),
        ({"correction": "token"}, "algorithm.correction: 'token' compares the engine's log-probs"),
        (
            {"correction_floor": 2.5, "correction": "token", "old_logprobs": "recompute"},
            "algorithm.correction_floor: 2.5, above algorithm.correction_cap=2.0; set it to at",
        ),
        ({"correction_floor": 0.5}, "algorithm.correction_floor: 0.5, but algorithm.correction is 'none'"),
        ({"correction_cap": 3.0}, "algorithm.correction_cap: 3.0, but algorithm.correction is 'none'"),
        ({"old_weights": "old"}, "algorithm.old_weights: 'old' says what recomputes old_logprobs"),
        ({"correction_beyond": "mask"}, "algorithm.correction_beyond: 'mask', but algorithm.correction is 'none'"),
        ({"routing_replay": "recompute"}, "algorithm.routing_replay: 'recompute' replays the experts chosen when"),
        ({"overlong": "penalty"}, "algorithm.overlong_buffer: 0 with algorithm.overlong='penalty'"),
        ({"overlong": "penalty", "overlong_buffer": 257}, "algorithm.overlong_buffer: 257 with"),
        ({"overlong": "keep", "overlong_buffer": 5}, "algorithm.overlong_buffer: 5 with algorithm.overlong='keep'"),
    ],
)
def test_settings_that_would_do_nothing_are_told(algorithm: dict[str, Any], start: str) -> None:
    (line,) = contradictions(evolve(VALID, algorithm=AlgorithmConfig(**algorithm)))
    assert line.startswith(start)


@pytest.mark.parametrize(("horizon", "wrong"), [(10, True), (11, False)])  # 50 samples move it by 5 and by 4.5 fifths
def test_a_kl_coefficient_that_one_step_could_turn_negative_is_told(horizon: int, wrong: bool) -> None:
    adapted = evolve(
        VALID,
        rollout=evolve(VALID.rollout, prompts=10, samples=5),
        algorithm=AlgorithmConfig(kl_coef=0.1, kl_target=0.1, kl_horizon=horizon),
    )
    line = (
        "algorithm.kl_horizon: 10, but a rollout step has 50 samples, so one step could make kl_coef negative; "
        "set it to more than a fifth of that"
    )
    assert contradictions(adapted) == [line] * wrong


def test_the_overlong_buffer_may_be_as_long_as_the_longest_response() -> None:
    assert contradictions(evolve(VALID, algorithm=AlgorithmConfig(overlong="penalty", overlong_buffer=256))) == []


def test_a_run_that_only_scores_asks_nothing_of_what_the_algorithm_leaves_unset() -> None:
    for algorithm in (
        AlgorithmConfig(name="dapo", overlong_buffer=50),
        AlgorithmConfig(name="gspo", correction="sequence"),
        AlgorithmConfig(name="gspo", old_weights="rollout"),
        AlgorithmConfig(name="gspo", routing_replay="recompute"),
    ):
        trains = evolve(VALID, algorithm=algorithm)
        for config in (trains, evolve(trains, run=RunConfig(mode="eval"), data=DataConfig(held_out=8))):
            assert contradictions(settle_algorithm(config)) == []


def test_experts_can_be_replayed_from_where_they_are_recorded() -> None:
    for algorithm in (
        AlgorithmConfig(routing_replay="recompute", old_logprobs="recompute"),
        AlgorithmConfig(routing_replay="engine", old_logprobs="recompute"),
        AlgorithmConfig(routing_replay="engine"),
    ):
        assert contradictions(evolve(VALID, algorithm=algorithm)) == []


@pytest.mark.parametrize(
    ("table", "given"),
    [
        ({"samples": 8, "temperature": 0.0}, "samples"),
        ({"top_p": 0.9}, "top_p"),
        ({"top_k": 20, "samples": 1}, "top_k"),
        ({"samples": 8}, ""),
        ({"samples": 8, "temperature": 0.5, "top_p": 0.9}, ""),
        ({"temperature": 0.5, "top_k": 20}, ""),
        ({"samples": 1, "temperature": 0.0}, ""),
    ],
)
def test_greedy_samples_are_all_the_same(table: dict[str, Any], given: str) -> None:
    own = EvalConfig(sets=(EvalSource(source="sort-digits", **table),))
    for path, evaluated in (("eval", EvalConfig(**table)), ("eval.sets[0]", own)):
        lines = contradictions(evolve(VALID, eval=evaluated))
        assert [line.partition(":")[0] for line in lines] == [f"{path}.temperature"] * bool(given)
        assert all(line.endswith(f"set it above 0, or remove {path}.{given}") for line in lines)
    common = EvalConfig(top_p=0.9, sets=(EvalSource(source="sort-digits", samples=8),))  # which is for the set
    assert contradictions(evolve(VALID, eval=common)) == []


def test_a_majority_needs_three_samples() -> None:
    for samples, wrong in ((None, True), (2, True), (3, False)):
        lines = contradictions(evolve(VALID, eval=EvalConfig(samples=samples, answer="mine:read")))
        assert [line.partition(":")[0] for line in lines] == ["eval.answer"] * wrong


def test_sets_and_sources_have_names_of_their_own() -> None:
    def wrong(*names: str, sources: tuple[str, ...] = ()) -> list[str]:
        sets = tuple(EvalSource(source="sort-digits", name=name) for name in names)
        data = DataConfig(sources=tuple(DataSource(source="sort-digits", name=name) for name in sources))
        return [line.partition(":")[0] for line in contradictions(evolve(VALID, data=data, eval=EvalConfig(sets=sets)))]

    assert wrong("a", "b", sources=("c",)) == []
    assert wrong("a", "a", "b/c") == [f"eval.sets[{number}].name" for number in range(3)]
    assert wrong("a", "", sources=("sort-digits",)) == ["eval.sets[1].name"]  # the file's name


def test_samples_of_an_evaluation_of_nothing_are_refused() -> None:
    (line,) = contradictions(evolve(VALID, data=DataConfig(held_out=0), eval=EvalConfig(samples=8)))
    assert line.startswith("eval.samples: set, but nothing is evaluated; set data.held_out")


def test_a_mode_that_could_do_nothing_is_refused() -> None:
    nothing_held_out = evolve(VALID, run=RunConfig(mode="eval"), data=DataConfig(held_out=0))
    assert contradictions(nothing_held_out) == [
        (
            "data.held_out: 0, but run.mode='eval' scores held-out prompts; set it to at least 1, or add a table "
            "[[eval.sets]]"
        )
    ]
    other = EvalConfig(sets=(EvalSource(source="sort-digits"),))
    assert contradictions(evolve(nothing_held_out, eval=other)) == []
    (line,) = contradictions(evolve(VALID, run=RunConfig(mode="train-only")))
    assert line.startswith("rollout.saved: empty, but run.mode='train-only'")
    (line,) = contradictions(evolve(VALID, rollout=RolloutConfig(saved="runs/a/rollouts")))
    assert line.startswith("rollout.saved: set, but run.mode='train' does not read saved batches")


def test_in_memory_checkpoints_are_of_ranks_on_this_machine() -> None:
    kept = evolve(VALID, checkpoint=CheckpointConfig(memory=True))
    assert contradictions(kept) == []
    (line,) = contradictions(evolve(kept, cluster=ClusterConfig(address="head:6379")))
    assert line.startswith("checkpoint.memory: is in this machine's memory, but cluster.address='head:6379'")


def test_checkpoints_are_where_weights_are_new() -> None:
    apart = evolve(VALID, weights=WeightsConfig(every=3))
    assert contradictions(evolve(apart, run=evolve(VALID.run, mode="rollout-only"))) == []  # nothing is sent
    (line,) = contradictions(apart)
    assert line.startswith("checkpoint.every: 50 is not a multiple of weights.every=3")


def test_resources_that_no_machine_of_its_own_has_want_an_address() -> None:
    (line,) = contradictions(evolve(VALID, cluster=ClusterConfig(resources={"h200": 1.0})))
    assert line.startswith("cluster.resources: h200 requested")


def test_more_processes_than_a_machine_can_start_want_a_cluster() -> None:
    many = evolve(VALID, rollout=RolloutConfig(replicas=500), roles=RolesConfig(actor=RoleChoice(ranks=20)))
    (line,) = [each for each in contradictions(many) if "processes on this machine" in each]
    assert line == (
        "rollout.replicas: 500, which makes 520 processes on this machine, at most 512; use fewer, or set "
        "cluster.address"
    )
    for fine in (
        evolve(many, cluster=evolve(many.cluster, address="10.0.0.1:6379")),
        evolve(many, rollout=RolloutConfig(replicas=492)),
    ):
        assert not any("processes on this machine" in each for each in contradictions(fine))


@pytest.mark.parametrize("setting", ["roles.actor.ranks", "rollout.replicas", "reward.processes"])
@pytest.mark.parametrize("number", ["1000000000", "9223372036854775807"])
def test_an_absurd_number_of_processes_is_refused_before_anything_is_planned(setting: str, number: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{setting}: must be between [01] and \d+, got {number} "):
        config_of({"backend": {"name": "plain"}}, [f"{setting}={number}"])


def test_a_step_of_absurdly_many_samples_is_refused() -> None:
    for setting in ("rollout.prompts", "rollout.samples"):
        with pytest.raises(ConfigError, match=rf"^{setting}: must be between 1 and 1048576, got 1000000000 "):
            config_of({"backend": {"name": "plain"}}, [f"{setting}=1000000000"])
    assert contradictions(batch(2**17, 8, 1, 1)) == []
    assert contradictions(batch(2**17, 9, 1, 1)) == [
        (
            "rollout.prompts: 131072 x rollout.samples=9 makes 1,179,648 samples per step, wanted at most 1,048,576, "
            "which are held in memory together; lower one of the two"
        )
    ]


def test_a_source_that_overlaps_with_training_wants_training_and_fresh_weights() -> None:
    def of(**tables: Any) -> list[str]:
        return contradictions(evolve(VALID, **tables))

    ahead, racing = RolloutConfig(source="one-step-off"), RolloutConfig(source="asynchronous", max_staleness=4)
    assert of(rollout=ahead) == of(rollout=racing) == of(rollout=racing, run=RunConfig(mode="eval")) == []
    assert of(rollout=RolloutConfig(max_staleness=2)) == [
        (
            "rollout.max_staleness: 2, but rollout.source='synchronous' has no staleness; remove it, or set "
            "rollout.source='asynchronous'"
        )
    ]
    assert of(rollout=evolve(ahead, max_staleness=3)) == [
        (
            "rollout.max_staleness: 3, but rollout.source='one-step-off' is always one update behind; remove it, or "
            "set rollout.source='asynchronous'"
        )
    ]
    assert of(rollout=ahead, run=RunConfig(mode="rollout-only")) == [
        (
            "rollout.source: 'one-step-off' samples while the model trains, but run.mode='rollout-only' only samples; "
            "set it to 'synchronous'"
        )
    ]
    assert of(rollout=racing, weights=WeightsConfig(every=2), checkpoint=CheckpointConfig(every=4)) == [
        ("weights.every: 2, but rollout.source='asynchronous' counts staleness in updates, one per step; set it to 1")
    ]
