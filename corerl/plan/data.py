"""Load and check what a run samples and how it is scored: prompts, sampler, rewards, and the sets of an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from attrs import evolve, fields, frozen
from transformers import PreTrainedTokenizerBase

from corerl.config.functions import imported
from corerl.config.schema import Config, DataConfig, EvalSampling, EvalSource, ModelConfig, RewardConfig, RolloutConfig
from corerl.data.files import GivenRows, Rows
from corerl.data.prompts import HeldOut, PromptSource
from corerl.data.rows import load_prompts
from corerl.engines.base import UNLIMITED, SamplingParams
from corerl.errors import CorerlError, PluginBroken, UserError
from corerl.messages import note, one_line
from corerl.models.tokenizer import end_tokens
from corerl.pictures import PictureReader
from corerl.plan.check import Problems
from corerl.plan.resolve import Plugins, check_spec
from corerl.plugin.registry import Kind, Loaded, load_implementation
from corerl.plugin.spec import EngineSpec, SamplerRun
from corerl.rollout.encoding import PromptCheck, check_first, require_encodable
from corerl.rollout.evaluation import EvalSet
from corerl.rollout.recorded import SavedRollouts
from corerl.rollout.rewards import Reward, require_part, reward_of
from corerl.rollout.sampler import Sampler, SamplerContext, sampling_params
from corerl.rollout.scored import ScoredRollout

MakeSampler = Callable[[SamplerContext], Sampler]


@frozen(kw_only=True)
class RolloutPlan:
    """What a run samples from, and how samples are generated and scored."""

    settings: RolloutConfig
    rewarding: RewardConfig
    seed: int
    tokenizer: PreTrainedTokenizerBase
    prompts: PromptSource
    template_options: Mapping[str, Any]  # of the tokenizer's chat template
    check: PromptCheck | None  # of each prompt that is sampled; None if the run samples none
    context_length: int  # maximum tokens of a sample, prompt and response; 0: unlimited
    reward: Reward
    params: SamplingParams
    max_replacements: int  # of a whole step, to replace groups of equal rewards; 0: these are kept
    spread_on: str  # the part of the reward that decides which are equal; "": the reward itself
    make_sampler: MakeSampler | None  # None if the run samples none
    postprocess: Callable[[ScoredRollout], Any] | None
    vocab_size: int  # of the actor's model
    pictures: PictureReader | None  # None if rows have none


def plan_rollout(
    config: Config, plugins: Plugins, tokenizer: PreTrainedTokenizerBase, *, context: int, vocab_size: int
) -> RolloutPlan:
    """What a run samples from, and how; prompts are loaded and not checked yet (see `with_prompt_check`). `context` is
    the most tokens of a sample (0: unlimited). Raises all problems together."""
    samples, rollout, sampler = config.run.has_engines, config.rollout, plugins.sampler
    data = config.data if samples else DataConfig()  # what is not sampled is not read, and need not be here
    postprocess: Callable[[ScoredRollout], Any] | None = None
    make_sampler: MakeSampler | None = None
    problems = Problems()
    with problems.stage("model.pictures"):
        used, pictures = plugins.pictures, None
        if used is not None:
            reader = load_implementation(Kind.PICTURES, used, base=PictureReader)
            pictures = reader(config.pictures[used.name], config.model, tokenizer)
    problems.raise_all()
    with problems.stage():
        params = sampling_params(rollout, tokenizer, ends_of(tokenizer, config.model, pictures))
        params = evolve(params, routed_experts=config.algorithm.routing_replay == "engine")
    if plugins.engine is not None:
        with problems.stage():
            make_sampler = plan_sampler(config, sampler, plugins.engine.spec)
    if sampler.spec.prompts is not None:
        problems.raise_all()  # options that cannot be used give no prompts
    with problems.stage("data.source"):
        given = _rows_of(sampler, config) if samples and not names_prompts(data) else None
        prompts = load_prompts(data, seed=config.run.seed, notify=note, given=given, pictures=pictures)
        require_encodable(prompts, tokenizer, data.chat_template_options)
    with problems.stage("reward.name"):
        reward = reward_of(config.reward)
        _require_part(config, reward, config.algorithm.dynamic_sampling_on, "algorithm.dynamic_sampling_on")
    if rollout.postprocess:
        with problems.stage():
            postprocess = imported(rollout.postprocess, setting="rollout.postprocess")
    if rollout.saved and config.run.mode == "train-only":
        with problems.stage("rollout.saved"):
            SavedRollouts(rollout.saved, steps=config.run.steps, vocab_size=0)  # raises if there are too few
    if samples and context and context <= rollout.max_tokens:
        problems.add(
            f"rollout.max_tokens: {rollout.max_tokens} leaves no room for a prompt, {_context_is(config, context)}; "
            "lower it"
        )
    problems.raise_all()
    return RolloutPlan(
        settings=rollout,
        rewarding=config.reward,
        seed=config.run.seed,
        tokenizer=tokenizer,
        prompts=prompts,
        template_options=data.chat_template_options,
        check=None,
        context_length=context,
        reward=reward,
        params=params,
        max_replacements=config.algorithm.dynamic_sampling or 0,
        spread_on=config.algorithm.dynamic_sampling_on,
        make_sampler=make_sampler,
        postprocess=postprocess,
        vocab_size=vocab_size,
        pictures=pictures,
    )


def ends_of(tokenizer: PreTrainedTokenizerBase, model: ModelConfig, pictures: PictureReader | None) -> list[int]:
    """The model's own stop tokens. Where it reads pictures, the token that stands for one is among them: sampled, it
    stands for none, and nothing sensible follows."""
    return [*end_tokens(tokenizer, model), *([pictures.placeholder] if pictures is not None else ())]


def _require_part(config: Config, reward: Reward, part: str, setting: str) -> None:
    if config.rollout.sampler == fields(RolloutConfig).sampler.default:  # others may bring rewards of their own
        require_part(reward, part, setting=setting)


# ---- the sampler -----------------------------------------------------------------------------------------------------


def names_prompts(data: DataConfig) -> bool:
    """Whether `[data]` names a source, other than the default one."""
    return bool(data.sources) or data.source not in ("", fields(DataConfig).source.default)


def _rows_of(sampler: Loaded, config: Config) -> Rows | None:
    """The rows that a sampler brings, if it does. Raises PluginBroken if it fails with an error other than
    CoreRL's."""
    if sampler.spec.prompts is None:
        return None
    try:
        rows = sampler.spec.prompts(config.samplers[sampler.name])
        count = len(rows)
    except CorerlError:
        raise
    except Exception as error:
        raise PluginBroken(f"sampler {sampler} has no prompts: {one_line(error)}") from error
    if not count:
        raise PluginBroken(f"sampler {sampler} has no prompts: with these options it returned no row")
    return GivenRows(rows, name=f"sampler {sampler.name!r}")


def plan_sampler(config: Config, sampler: Loaded, engine: EngineSpec) -> MakeSampler:
    """What makes the sampler of a config whose plugins' tables are resolved. Raises ConfigError for options that cannot
    be used, PluginBroken if its class is no Sampler."""
    options = config.samplers[sampler.name]
    run = SamplerRun(rollout=config.rollout, reward=config.reward, engine=engine, cluster=config.cluster)
    check_spec(sampler, options, run, config=config)
    return partial(load_implementation(Kind.SAMPLERS, sampler, base=Sampler), options)


# ---- lengths ---------------------------------------------------------------------------------------------------------


def _context_is(config: Config, context: int) -> str:
    of_model = f"the model's config allows {context} tokens"
    return f"rollout.context_length={context}" if config.rollout.context_length else of_model


def with_prompt_check(plan: RolloutPlan, config: Config) -> RolloutPlan:
    """The plan with the check of each prompt that is taken, which the first ones have passed (that takes seconds).
    Prompts that leave no room for a response are left out. Raises UserError."""
    if not config.run.has_engines:
        return plan
    context, most = plan.context_length, config.rollout.max_tokens
    limit = f"rollout.max_tokens={most} ({_context_is(config, context)})"
    check = _prompt_check(plan, config, longest=context - most if context else UNLIMITED, limit=limit)
    problems = Problems()
    with problems.stage("data.source"):
        check_first(plan.prompts, check, seed=plan.seed)
    problems.raise_all()
    return evolve(plan, check=check)


def _prompt_check(plan: RolloutPlan, config: Config, *, longest: int, limit: str) -> PromptCheck:
    return PromptCheck(
        tokenizer=plan.tokenizer,
        options=plan.template_options,
        skip=config.data.refused == "skip",
        longest=longest,
        limit=limit,
        pictures=plan.pictures,
    )


# ---- evaluation ------------------------------------------------------------------------------------------------------


def load_eval_sets(config: Config, rollout: RolloutPlan) -> tuple[list[EvalSet], list[str]]:
    """The sets, with `data.held_out` first if there is one, and notices about their prompts. Raises all problems
    together."""
    found: list[EvalSet] = []
    notices: list[str] = []
    problems = Problems()
    for table, own in config.eval.tables.items():
        if not config.run.has_engines or (own is config.eval and not config.data.held_out):
            continue
        with problems.stage():
            try:
                each = _eval_set(config, table, own, rollout)
                notices += [f"{table}: {line}" for line in _check_set(config, table, each, rollout)]
            except UserError as error:
                lines = [line if line.startswith(table) else f"{table}: {line}" for line in error.message.splitlines()]
                raise type(error)("\n".join(lines)) from error
            found.append(each)
    problems.raise_all()
    return found, notices


def _eval_set(config: Config, table: str, own: EvalSampling, run: RolloutPlan) -> EvalSet:
    tokenizer = run.tokenizer
    settings = own.settled(config.eval, config.rollout)
    like = {name: getattr(settings, name) for name in ("top_p", "top_k", "max_tokens", "stop")}
    rollout = evolve(config.rollout, **like, temperature=settings.temperature or config.rollout.temperature)
    params = sampling_params(
        rollout, tokenizer, ends_of(tokenizer, config.model, run.pictures), setting=f"{table}.stop"
    )
    held_out, rewarding, name, every = HeldOut(run.prompts, run.prompts.held_out), None, "", None
    if isinstance(own, EvalSource):
        data = evolve(config.data, source=DataConfig().source, sources=(own,), held_out=0)
        source = load_prompts(data, seed=config.run.seed, notify=note, whole=False, pictures=run.pictures)
        held_out, rewarding, name, every = HeldOut(source, source.train), own.reward, own.called, own.every
    own_reward = reward_of(rewarding, table=f"{table}.reward") if rewarding else None
    _require_part(config, own_reward or run.reward, settings.correct_on or "", f"{table}.correct_on")
    return EvalSet(
        name=name,
        every=config.eval.every if every is None else every,
        source=held_out,
        params=evolve(params, greedy=not settings.temperature),
        samples=settings.samples or 1,
        correct_on=settings.correct_on or "",
        correct_from=settings.correct_from,
        extract_answer=imported(settings.answer, setting=f"{table}.answer") if settings.answer else None,
        reward=own_reward,
        rewarding=rewarding or config.reward,
    )


def _check_set(config: Config, table: str, eval_set: EvalSet, rollout: RolloutPlan) -> Iterator[str]:
    """Leave out the prompts that cannot be used; yields notices. The run's own check covers `data.held_out`, unless
    evaluation may sample longer answers."""
    tokens, context = eval_set.params.max_tokens, rollout.context_length
    if eval_set.name:
        require_encodable(eval_set.source, rollout.tokenizer, rollout.template_options)
        yield from eval_set.source.notices
    elif tokens <= config.rollout.max_tokens:
        return
    known = len(eval_set.source.notices)
    limit = f"{table}.max_tokens={tokens} in a context of {context}"
    check = _prompt_check(rollout, config, longest=max(0, context - tokens) if context else UNLIMITED, limit=limit)
    check_first(eval_set.source, check, seed=rollout.seed)
    yield from eval_set.source.notices[known:]
