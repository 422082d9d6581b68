"""Load and check what a run samples and how it is scored: prompts, sampler, rewards, and the sets of an evaluation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from attrs import evolve, fields, frozen
from transformers import PreTrainedTokenizerBase

from corerl.config.functions import imported
from corerl.config.problems import Problems
from corerl.config.schema import Config, DataConfig, EvalSampling, EvalSource
from corerl.data.files import GivenRows, Rows
from corerl.data.load import load_prompts
from corerl.data.mixture import HeldOut
from corerl.data.prompts import PromptSource
from corerl.engines.base import UNLIMITED, SamplingParams
from corerl.errors import CorerlError, PluginBroken, UserError
from corerl.messages import note, one_line
from corerl.models.tokenizer import end_tokens
from corerl.plan.resolve import check_spec
from corerl.plugin.registry import Kind, Loaded, load_implementation, options_of
from corerl.plugin.spec import SamplerRun
from corerl.rollout.encoding import PromptCheck, Rejected, check_first, require_encodable
from corerl.rollout.evaluation import EvalSet
from corerl.rollout.reasoning import Openings, generation_prompt, left_open
from corerl.rollout.recorded import SavedRollouts
from corerl.rollout.rewards import Reward, reward_of
from corerl.rollout.sampler import Sampler, SamplerContext, sampling_params
from corerl.rollout.scored import ScoredRollout

MakeSampler = Callable[[SamplerContext], Sampler]


@frozen(kw_only=True)
class Sampled:
    """What a run samples from, and how; None for what is wrong."""

    tokenizer: PreTrainedTokenizerBase | None
    prompts: PromptSource | None
    reward: Reward | None
    params: SamplingParams | None
    postprocess: Callable[[ScoredRollout], Any] | None


def load_sampled(
    config: Config, tokenizer: PreTrainedTokenizerBase | None, sampler: Loaded | None, problems: Problems
) -> Sampled:
    params: SamplingParams | None = None
    prompts: PromptSource | None = None
    reward: Reward | None = None
    postprocess: Callable[[ScoredRollout], Any] | None = None
    data, rollout = config.data, config.rollout
    if tokenizer is not None:
        with problems.stage("rollout.stop"):
            replays = config.algorithm.routing_replay == "engine"
            ends = end_tokens(tokenizer, config.model)
            params = evolve(sampling_params(rollout, tokenizer, ends), routed_experts=replays)
    # Those of a sampler that cannot be loaded are not known.
    if not config.run.samples or sampler is not None or names_prompts(data):
        with problems.stage("data", path="data.source"):
            given = _rows_of(sampler, config) if sampler is not None and not names_prompts(data) else None
            prompts = load_prompts(data, seed=config.run.seed, notify=note, given=given)
            if tokenizer is not None:
                require_encodable(prompts, tokenizer, data.chat_template_options)
    with problems.stage("reward", path="reward.name"):
        reward = reward_of(config.reward)
    if rollout.postprocess:
        with problems.stage("rollout.postprocess"):
            postprocess = imported(rollout.postprocess, setting="rollout.postprocess")
    if rollout.saved and config.run.mode == "train-only":
        with problems.stage("rollout.saved"):
            SavedRollouts(rollout.saved, steps=config.run.steps, vocab_size=0)  # raises if there are too few
    return Sampled(tokenizer=tokenizer, prompts=prompts, reward=reward, params=params, postprocess=postprocess)


# ---- the sampler -----------------------------------------------------------------------------------------------------


def names_prompts(data: DataConfig) -> bool:
    """Whether `[data]` names a source, other than the default one."""
    return bool(data.sources) or data.source not in ("", fields(DataConfig).source.default)


def _rows_of(sampler: Loaded, config: Config) -> Rows | None:
    """The rows that a sampler brings, if it does. Raises ConfigError for wrong options, PluginBroken if the sampler
    fails with an error that is none of CoreRL's."""
    if sampler.spec.prompts is None:
        return None
    options = options_of(sampler, config.samplers.get(sampler.name, {}), path=f"samplers.{sampler.name}")
    try:
        rows = sampler.spec.prompts(options)
        count = len(rows)
    except CorerlError:
        raise
    except Exception as error:
        raise PluginBroken(f"sampler {sampler} has no prompts: {one_line(error)}") from error
    if not count:
        raise PluginBroken(f"sampler {sampler} has no prompts: with these options it returned no row")
    return GivenRows(rows, name=f"sampler {sampler.name!r}")


def plan_sampler(config: Config, sampler: Loaded) -> MakeSampler:
    """What makes the sampler of a config whose plugins' tables are resolved. Raises ConfigError for options that cannot
    be used, PluginBroken if its class is none."""
    options = config.samplers[sampler.name]
    check_spec(sampler, options, SamplerRun(rollout=config.rollout, reward=config.reward), config=config)
    implementation = load_implementation(Kind.SAMPLERS, sampler)
    if not (isinstance(implementation, type) and issubclass(implementation, Sampler)):
        raise PluginBroken(
            f"sampler {sampler}: {sampler.spec.implementation} is {implementation!r}, wanted a subclass of "
            "corerl.rollout.Sampler"
        )
    return partial(implementation, options)


# ---- lengths ---------------------------------------------------------------------------------------------------------


def against_lengths(config: Config, context: int) -> Iterator[str]:
    rollout = config.rollout
    if config.run.samples and context and context <= rollout.max_tokens:
        yield (
            f"rollout.max_tokens: {rollout.max_tokens} leaves no room for a prompt, {_context_is(config, context)}; "
            "lower it"
        )


def _context_is(config: Config, context: int) -> str:
    of_model = f"the model's config allows {context} tokens"
    return f"rollout.context_length={context}" if config.rollout.context_length else of_model


def prompt_check(
    config: Config, context: int, tokenizer: PreTrainedTokenizerBase, prompts: PromptSource, problems: Problems
) -> PromptCheck | None:
    """The check of each prompt that is taken, which the first ones have passed; None if the run takes none. Prompts
    that leave no room for a response are left out."""
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


# ---- evaluation ------------------------------------------------------------------------------------------------------


def load_eval_sets(
    config: Config, sampled: Sampled, context: int, problems: Problems
) -> tuple[list[EvalSet], list[str]]:
    """The sets, with `data.held_out` first if there is one, and notices about their prompts. What is wrong with a set
    goes to `problems`."""
    found: list[EvalSet] = []
    notices: list[str] = []
    if not config.run.samples or None in (sampled.prompts, sampled.reward, sampled.tokenizer):
        return [], []
    for table, own in config.eval.tables.items():
        if own is config.eval and not config.data.held_out:
            continue
        with problems.stage(table):
            try:
                each = _eval_set(config, table, own, sampled)
                notices += [f"{table}: {line}" for line in _checked(config, table, each, sampled, context)]
            except UserError as error:
                lines = [line if line.startswith(table) else f"{table}: {line}" for line in error.message.splitlines()]
                raise type(error)("\n".join(lines)) from error
            found.append(each)
    return found, notices


def _eval_set(config: Config, table: str, own: EvalSampling, sampled: Sampled) -> EvalSet:
    tokenizer, prompts, reward = sampled.tokenizer, sampled.prompts, sampled.reward
    assert tokenizer is not None and prompts is not None and reward is not None
    settings = own.settled(config.eval, config.rollout)
    like = {name: getattr(settings, name) for name in ("top_p", "top_k", "max_tokens", "stop")}
    rollout = evolve(config.rollout, **like, temperature=settings.temperature or config.rollout.temperature)
    params = sampling_params(rollout, tokenizer, end_tokens(tokenizer, config.model), setting=f"{table}.stop")
    held_out, rewarding = HeldOut(prompts, prompts.held_out), None
    if isinstance(own, EvalSource):
        data = evolve(config.data, source=DataConfig().source, sources=(own,), held_out=0)
        source = load_prompts(data, seed=config.run.seed, notify=note, whole=False)
        held_out, rewarding = HeldOut(source, source.train), own.reward
    own_reward = reward_of(rewarding, table=f"{table}.reward") if rewarding else None
    every = own.every if isinstance(own, EvalSource) else None
    return EvalSet(
        name=own.called if isinstance(own, EvalSource) else "",
        every=config.eval.every if every is None else every,
        source=held_out,
        params=evolve(params, greedy=not settings.temperature),
        samples=settings.samples or 1,
        correct_on=settings.correct_on or "",
        correct_from=settings.correct_from,
        answer=imported(settings.answer, setting=f"{table}.answer") if settings.answer else None,
        reward=own_reward,
        rewarding=rewarding or config.reward,
    )


def _checked(config: Config, table: str, held_out: EvalSet, sampled: Sampled, context: int) -> Iterator[str]:
    """Leave out the prompts that cannot be used; yields notices. The run's own check covers `data.held_out`, unless
    evaluation may sample longer answers."""
    options, tokens, tokenizer = config.data.chat_template_options, held_out.params.max_tokens, sampled.tokenizer
    assert tokenizer is not None
    if held_out.name:
        require_encodable(held_out.source, tokenizer, options)
        yield from held_out.source.notices
        yield from unanswered(config.data.answer_key, held_out.source)
    elif tokens <= config.rollout.max_tokens:
        return
    known = len(held_out.source.notices)
    check = PromptCheck(
        tokenizer=tokenizer,
        options=options,
        skip=config.data.refused == "skip",
        longest=max(0, context - tokens) if context else UNLIMITED,
        limit=f"{table}.max_tokens={tokens} in a context of {context}",
    )
    check_first(held_out.source, check)
    yield from held_out.source.notices[known:]


# ---- notices ---------------------------------------------------------------------------------------------------------


def notices_of_data(
    config: Config, sampled: Sampled, eval_sets: Sequence[EvalSet], about_sets: Sequence[str]
) -> Iterator[str]:
    """Lines about the prompts of a run that samples, and how they are sampled; `about_sets` are those of its sets."""
    prompts, tokenizer = sampled.prompts, sampled.tokenizer
    assert prompts is not None and tokenizer is not None
    yield from prompts.notices
    yield from unanswered(config.data.answer_key, prompts)
    yield from about_sets
    yield from held_out_and_trained_on(prompts, eval_sets)
    options, special = config.data.chat_template_options, config.reward.special_tokens
    yield from opened_reasoning(prompts, tokenizer, options, special_tokens=special)


def unanswered(answer_key: str, prompts: PromptSource) -> Iterator[str]:
    """A line if prompts have no answers: rewards that compare with the answer would fail or be 0."""
    if prompts.unanswered and prompts.unanswered < len(prompts):
        where = prompts.where(prompts.first_unanswered)
        yield f"data: {prompts.unanswered} of {len(prompts)} prompts have no answer; the first: {where}"
    elif prompts.unanswered:
        has = ", ".join(prompts.prompt(0).fields) or "nothing"
        line = f"data.answer_key: none of the {len(prompts)} prompts has an answer under {answer_key!r}"
        yield f"{line}; the first one has: {has}"


def held_out_and_trained_on(prompts: PromptSource, eval_sets: Sequence[EvalSet]) -> Iterator[str]:
    """A line if copies of held-out rows are not trained on, and one for each set with prompts of training rows."""
    if prompts.copies:
        yield f"data.held_out: {prompts.copies} copies of held-out rows are not trained on"
    for each in eval_sets:
        asked = each.source.asked[each.source.held_out]
        if both := int(np.isin(asked, prompts.asked[prompts.train]).sum()):
            where = f"eval.sets: {each.name!r}" if each.name else "data.held_out"
            yield f"{where}: {both} of {len(asked)} held-out prompts are prompts of training rows too"


def opened_reasoning(
    prompts: PromptSource, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any], *, special_tokens: bool
) -> Iterator[str]:
    """A line if the chat template begins the answer to the first prompt with a reasoning tag."""
    if not len(prompts.train):
        return
    first, opened = prompts.prompt(int(prompts.train[0])), ""
    options = {**options, **first.template_options}
    with contextlib.suppress(Rejected):  # the check of all prompts reports it
        opened = left_open(generation_prompt(tokenizer, first.messages, tools=first.tools, options=options))
    if opened:
        if Openings(tokenizer).seen(opened, special_tokens=special_tokens):
            what = "rewards and samples.jsonl see that before the sampled text"
        else:
            what = "a special token, which rewards see with reward.special_tokens=true"
        yield f"data: the chat template begins each answer with {opened!r}: {what}; it is not trained on"
