"""Load and check what a run is given: models, tokenizer, prompts, reward and the user's functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import evolve
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from corerl.config.functions import imported
from corerl.config.problems import Problems
from corerl.config.schema import Config, RolloutConfig
from corerl.data.load import load_prompts
from corerl.data.prompts import PromptSource
from corerl.engines.base import UNLIMITED, SamplingParams
from corerl.messages import note
from corerl.models.config import code_not_run, context_length, experts, hf_config, reads_pictures
from corerl.models.tokenizer import end_tokens, load_tokenizer, require_room_for_tokens, require_same_tokens
from corerl.plan.resolve import has_value_head, is_frozen
from corerl.plan.sampler import brings_rewards, prompts_unknown, rows_of_sampler
from corerl.plugin.spec import ACTOR
from corerl.rollout.encoding import PromptCheck, check_first, require_encodable
from corerl.rollout.rewards.base import Reward
from corerl.rollout.rewards.lookup import require_part, reward_of
from corerl.rollout.sampler import sampling_params
from corerl.rollout.scored import ScoredRollout

if TYPE_CHECKING:
    from corerl.models.layouts import Layout


def load_models(
    config: Config, problems: Problems
) -> tuple[dict[str, PreTrainedConfig], PreTrainedTokenizerBase | None]:
    """The valid roles' model configs, and the tokenizer."""
    models: dict[str, PreTrainedConfig] = {}
    for role in config.chosen_roles:
        own, table = config.model_of(role), config.model_table_of(role)
        if own is config.model and ACTOR in models:
            models[role] = models[ACTOR]
        elif problems.none_in(table):
            with problems.stage(f"{table}.config", path=f"{table}.path" if own.path else f"{table}.config"):
                models[role] = hf_config(own)
    tokenizer: PreTrainedTokenizerBase | None = None
    # Where transformers looks for a tokenizer, it reads the config.json beside it, and fails at the same place.
    beside = () if config.model.tokenizer else ("model.config",)
    if problems.none_in("model.path", "model.tokenizer", *beside):
        with problems.stage("model.tokenizer"):
            tokenizer = load_tokenizer(tokenizer=config.model.tokenizer, path=config.model.path)
    for role, hf in models.items():
        own, table = config.model_of(role), config.model_table_of(role)
        if tokenizer is not None:
            with problems.stage(f"{table}.vocabulary"):
                require_room_for_tokens(hf, tokenizer, own, table=table)
                if own is not config.model and problems.none_in("algorithm's spec") and is_frozen(config, role):
                    rows = models[ACTOR].get_text_config().vocab_size if ACTOR in models else None
                    require_same_tokens(hf, tokenizer, own, rows=rows, table=table)
    replay = config.algorithm.routing_replay
    if replay != "none" and ACTOR in models and experts(models[ACTOR]) == 1:
        problems.add(f"algorithm.routing_replay: {replay!r}, but the model has no experts; set it to 'none'")
    return models, tokenizer


def load_sampled(
    config: Config, tokenizer: PreTrainedTokenizerBase | None, problems: Problems
) -> tuple[PromptSource | None, Reward | None, SamplingParams | None]:
    """The prompts, and how they are sampled and scored; None for what is wrong."""
    params: SamplingParams | None = None
    if tokenizer is not None:
        with problems.stage("rollout.stop"):
            replays = config.algorithm.routing_replay == "engine"
            ends = end_tokens(tokenizer, config.model)
            params = evolve(sampling_params(config.rollout, tokenizer, ends), routed_experts=replays)
    prompts: PromptSource | None = None
    if not prompts_unknown(config):
        with problems.stage("data", path="data.source"):
            given = rows_of_sampler(config)
            prompts = load_prompts(config.data, seed=config.run.seed, notify=note, given=given)
            if tokenizer is not None:
                require_encodable(prompts, tokenizer, config.data.chat_template_options)
    reward: Reward | None = None
    with problems.stage("reward", path="reward.name"):
        reward = reward_of(config.reward)
    if reward is not None and not brings_rewards(config):
        with problems.stage("algorithm.dynamic_sampling_on"):
            require_part(reward, config.algorithm.dynamic_sampling_on, setting="algorithm.dynamic_sampling_on")
    return prompts, reward, params


def load_postprocess(rollout: RolloutConfig, problems: Problems) -> Callable[[ScoredRollout], Any] | None:
    """The user's function that processes samples; None if it is not set, or wrong."""
    if rollout.postprocess:
        with problems.stage("rollout.postprocess"):
            return imported(rollout.postprocess, setting="rollout.postprocess")
    return None


def longest_sample(config: Config, models: Mapping[str, PreTrainedConfig]) -> int:
    """Maximum tokens of a sample; 0 if neither the config nor the model sets a limit."""
    own = context_length(models[ACTOR]) if ACTOR in models else None
    return config.rollout.context_length or own or 0


def require_room_for_prompts(config: Config, context: int, problems: Problems) -> None:
    rollout = config.rollout
    if config.run.samples and context and context <= rollout.max_tokens:
        problems.add(
            f"rollout.max_tokens: {rollout.max_tokens} leaves no room for a prompt, {_context_is(config, context)}; "
            "lower it"
        )


def _context_is(config: Config, context: int) -> str:
    of_model = f"the model's config allows {context} tokens"
    return f"rollout.context_length={context}" if config.rollout.context_length else of_model


def prompt_check(
    config: Config, context: int, tokenizer: PreTrainedTokenizerBase, prompts: PromptSource, problems: Problems
) -> PromptCheck | None:
    """The check of each prompt that is drawn, which the first ones have passed; None if the run draws none. Those that
    leave no room for a response are left out."""
    rollout, data = config.rollout, config.data
    if not config.run.samples:
        return None
    check = PromptCheck(
        tokenizer=tokenizer,
        options=data.chat_template_options,
        skip=data.refused == "skip",
        longest=context - rollout.max_tokens if context else UNLIMITED,
        limit=f"rollout.max_tokens={rollout.max_tokens} ({_context_is(config, context)})",
    )
    with problems.stage("data", path="data.source"):
        check_first(prompts, check)
    return check


def built_models(
    config: Config, models: Mapping[str, PreTrainedConfig], problems: Problems
) -> dict[str, PreTrainedModel]:
    """The roles' models on meta, of those that can be built, and that this machine can hold."""
    found: dict[str, PreTrainedModel] = {}
    if not problems.none_in("algorithm's spec"):  # which says what the roles are
        return found
    for role, hf in models.items():
        own, table = config.model_of(role), config.model_table_of(role)
        with problems.stage(f"{table}.config", path=f"{table}.path" if own.path else f"{table}.config"):
            found[role] = built_model(config, role, hf)
    return found


def built_model(config: Config, role: str, hf: PreTrainedConfig) -> PreTrainedModel:
    """A role's model on meta. Raises ModelError if it cannot be built, or this machine cannot hold it."""
    from corerl.plan import model_files  # slow to import: takes seconds

    model = model_files.built(hf, value_head=has_value_head(config, role))
    if not config.cluster.address:  # whose machines are not known yet
        model_files.require_memory(model, there=model_files.memory_here())
    return model


def choose_layouts(config: Config, built: Mapping[str, PreTrainedModel], problems: Problems) -> dict[str, Layout]:
    """The ways through the roles' models."""
    from corerl.models.layouts import choose_layout  # slow to import: takes seconds

    found: dict[str, Layout] = {}
    for role, model in built.items():
        asked, table = config.train_of(role).layout, config.train_table_of(role)
        with problems.stage(f"{table}.layout", path=f"{table}.layout"):
            found[role] = choose_layout(model, asked)
    return found


def require_positions(config: Config, built: Mapping[str, PreTrainedModel], problems: Problems) -> None:
    """Check that each model has a position for every token of a sample."""
    from corerl.models.layouts import position_limit  # slow to import: takes seconds

    wanted = config.rollout.context_length
    for role, model in built.items():
        if (positions := position_limit(model, wanted=wanted)) is not None:
            whose = "" if role == ACTOR else f"{role}'s "
            problems.add(f"rollout.context_length: {wanted}, but the {whose}model has {positions} positions; lower it")


def kept_digests(config: Config, models: Mapping[str, PreTrainedConfig]) -> dict[str, str]:
    """The digests of what exports of the roles that are trained copy from their models' directories, if anything."""
    from corerl.models.files import kept_digest  # slow to import: takes seconds

    trained = [role for role in models if config.run.trains and not is_frozen(config, role)]
    paths = {role: path for role in trained if (path := config.model_of(role).path) and reads_pictures(models[role])}
    return {role: kept_digest(path, models[role]) for role, path in paths.items()}


def check_weights(
    config: Config,
    resume: Path | None,
    models: Mapping[str, PreTrainedConfig],
    built: Mapping[str, PreTrainedModel],
    problems: Problems,
) -> tuple[str, ...]:
    """Check that the files that the roles start from hold their models. Returns notices about what else they hold."""
    from corerl.plan.model_files import (  # slow to import: takes seconds
        AS_ACTOR,
        require_same_model,
        require_weights,
        saved_shapes,
        untrained,
    )

    notices: list[str] = []
    for role, model in built.items():
        own, table = config.model_of(role), config.model_table_of(role)
        if own.path and (code := code_not_run(own.path)):
            notices.append(f"{table}.path: {code}")
        frozen, lora = is_frozen(config, role), config.lora_of(role)
        if own.path and not frozen and problems.none_in("model", table):
            with problems.stage(f"{table}.weights", path=f"{table}.path"):
                if kept := untrained(own.path, models[role], model):
                    notices.append(f"{table}.path: {kept}")
        if resume and not frozen and problems.none_in(config.lora_table_of(role)):
            with problems.stage("checkpoint.model", path="checkpoint.resume"):
                value_head = has_value_head(config, role)
                require_same_model(resume, role, saved_shapes(models[role], value_head=value_head, lora=lora))
        # A resume still reads the KL reference from it, if that is a snapshot.
        of_snapshot = config.algorithm.kl_coef and config.roles.reference is None
        refers = of_snapshot and not config.algorithm.reference and not config.algorithm.reference_every
        read = own.path and (not resume or refers or frozen or lora is not None)
        if read and problems.none_in("model", table, "checkpoint"):
            with problems.stage(f"{table}.weights", path=f"{table}.path"):
                if unused := require_weights(own.path, model, models[role]):
                    notices.append(f"{table}.path: {unused}")
    reference = config.algorithm.reference
    if reference and config.run.trains and ACTOR in built and problems.none_in("model", "algorithm"):
        with problems.stage("algorithm.reference", path="algorithm.reference"):
            if unused := require_weights(reference, built[ACTOR], models[ACTOR], needs=AS_ACTOR):
                notices.append(f"algorithm.reference: {unused}")
    return tuple(dict.fromkeys(notices))
