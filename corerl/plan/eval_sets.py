"""Load and check the sets of held-out prompts that a run is scored on, and how each is sampled and scored."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import evolve
from transformers import PreTrainedTokenizerBase

from corerl.config.functions import imported
from corerl.config.problems import Problems
from corerl.config.schema import Config, DataConfig, EvalSampling, EvalSource
from corerl.data.load import load_prompts
from corerl.data.mixture import HeldOut
from corerl.data.prompts import PromptSource
from corerl.engines.base import UNLIMITED
from corerl.errors import UserError
from corerl.messages import note
from corerl.models.tokenizer import end_tokens
from corerl.plan.notices import unanswered
from corerl.plan.sampler import brings_rewards
from corerl.rollout.encoding import PromptCheck, check_first, require_encodable
from corerl.rollout.evaluation import EvalSet
from corerl.rollout.rewards.base import Reward
from corerl.rollout.rewards.lookup import require_part, reward_of
from corerl.rollout.sampler import sampling_params


def load_eval_sets(
    config: Config,
    prompts: PromptSource | None,
    reward: Reward | None,
    tokenizer: PreTrainedTokenizerBase | None,
    context: int,
    problems: Problems,
) -> tuple[list[EvalSet], list[str]]:
    """The sets, with `data.held_out` first if there is one, and notices about their prompts. What is wrong with a set
    goes to `problems`."""
    found: list[EvalSet] = []
    notices: list[str] = []
    if not config.run.samples or prompts is None or reward is None or tokenizer is None:
        return [], []
    for table, own in config.eval.tables.items():
        if own is config.eval and not config.data.held_out:
            continue
        with problems.stage(table):
            try:
                each = _load(config, table, own, prompts, reward, tokenizer)
                notices += [f"{table}: {line}" for line in _checked(config, table, each, tokenizer, context)]
            except UserError as error:
                lines = [line if line.startswith(table) else f"{table}: {line}" for line in error.message.splitlines()]
                raise type(error)("\n".join(lines)) from error
            found.append(each)
    return found, notices


def _load(
    config: Config,
    table: str,
    own: EvalSampling,
    prompts: PromptSource,
    reward: Reward,
    tokenizer: PreTrainedTokenizerBase,
) -> EvalSet:
    settings = own.settled(config.eval, config.rollout)
    like = {name: getattr(settings, name) for name in ("top_p", "top_k", "max_tokens", "stop")}
    sampled = evolve(config.rollout, **like, temperature=settings.temperature or config.rollout.temperature)
    params = sampling_params(sampled, tokenizer, end_tokens(tokenizer, config.model), setting=f"{table}.stop")
    held_out = HeldOut(prompts, prompts.held_out)
    own_reward = None
    if isinstance(own, EvalSource):
        data = evolve(config.data, source=DataConfig().source, sources=(own,), held_out=0)
        source = load_prompts(data, seed=config.run.seed, notify=note, whole=False)
        held_out, own_reward = HeldOut(source, source.train), own.reward
    own_scores = reward_of(own_reward, table=f"{table}.reward") if own_reward else None
    if not brings_rewards(config):
        require_part(own_scores or reward, settings.correct_on or "", setting=f"{table}.correct_on")
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
        reward=own_scores,
        rewarding=own_reward or config.reward,
    )


def _checked(
    config: Config, table: str, held_out: EvalSet, tokenizer: PreTrainedTokenizerBase, context: int
) -> Iterator[str]:
    """Leave out the prompts that cannot be used; yields notices. The run's own check covers `data.held_out`, unless
    evaluation may sample longer answers."""
    options, tokens = config.data.chat_template_options, held_out.params.max_tokens
    if held_out.name:
        require_encodable(held_out.source, tokenizer, options)
        yield from unanswered(config, held_out.source)
    elif tokens <= config.rollout.max_tokens:
        return
    known = 0 if held_out.name else len(held_out.source.notices)
    check = PromptCheck(
        tokenizer=tokenizer,
        options=options,
        skip=config.data.refused == "skip",
        longest=max(0, context - tokens) if context else UNLIMITED,
        limit=f"{table}.max_tokens={tokens} in a context of {context}",
    )
    check_first(held_out.source, check)
    yield from held_out.source.notices[known:]
