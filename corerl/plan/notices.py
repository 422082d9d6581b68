"""Lines that tell a user what a run will do, before its first step."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from corerl.algorithms.base import REFERENCE
from corerl.algorithms.kl import DIFFERENTIATED
from corerl.config.schema import AlgorithmConfig, Config
from corerl.data.prompts import PromptSource
from corerl.models.tokenizer import unapplied
from corerl.plan.algorithm import AlgorithmPlan
from corerl.plan.processes import ProcessPlan
from corerl.plan.sampler import brings_prompts
from corerl.plugin.spec import ACTOR
from corerl.rollout.encoding import Rejected
from corerl.rollout.reasoning import Openings, generation_prompt, left_open

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from corerl.models.layouts import Layout
    from corerl.rollout.evaluation import EvalSet


def title_of(config: Config, processes: ProcessPlan, prompts: PromptSource, layouts: Mapping[str, Layout]) -> str:
    """A run in one line: the algorithm, what it learns from, the model, the processes and their device."""
    model = Path(config.model.path).name if config.model.path else f"{config.model.config['model_type']} from scratch"
    ranks = [
        f"{len(plan.assignments)} {plan.backend.name} rank{'s' * (len(plan.assignments) != 1)}"
        + (f" for the {role}" if role != ACTOR else "")
        + (" (LoRA)" if config.lora_of(role) else "")
        + (" (whole)" if config.run.trains and layouts[role].name == "whole" else "")
        for role, plan in processes.roles.items()
    ]
    if processes.engine is not None:
        engines = len(processes.engine.assignments)
        ranks.append(f"{engines} {processes.engine.name} engine{'s' * (engines != 1)}")
    if config.run.samples:
        source = " + ".join(share.name for share in prompts.shares) or (
            config.rollout.sampler if brings_prompts(config) else config.data.source
        )
    else:
        source = config.rollout.saved
    return f"{config.algorithm.name} on {source}: {model}, {', '.join(ranks)}, {processes.device}"


def unanswered(config: Config, prompts: PromptSource) -> list[str]:
    """One line if prompts have no answers: rewards that compare with the answer would fail or be 0."""
    if not config.run.samples or not prompts.unanswered:
        return []
    if prompts.unanswered < len(prompts):
        where = prompts.where(prompts.first_unanswered)
        return [f"data: {prompts.unanswered} of {len(prompts)} prompts have no answer; the first: {where}"]
    has = ", ".join(prompts.prompt(0).fields) or "nothing"
    line = f"data.answer_key: none of the {len(prompts)} prompts has an answer under {config.data.answer_key!r}"
    return [f"{line}; the first one has: {has}"]


def unapplied_sampling(config: Config) -> list[str]:
    """One line if the model's authors recommend other sampling parameters."""
    rollout = config.rollout
    own = {"temperature": rollout.temperature, "top_p": rollout.top_p, "top_k": rollout.top_k}
    return [line] if config.run.samples and (line := unapplied(config.model, own)) else []


def held_out_and_trained_on(config: Config, prompts: PromptSource, eval_sets: Sequence[EvalSet]) -> list[str]:
    """One line if copies of held-out rows are left out of training, and one for each set with prompts that training
    rows have too."""
    if not config.run.samples:
        return []
    lines = []
    if prompts.copies:
        lines.append(f"data.held_out: {prompts.copies} copies of held-out rows are not trained on")
    for each in eval_sets:
        asked = each.source.asked[each.source.held_out]
        if both := int(np.isin(asked, prompts.asked[prompts.train]).sum()):
            where = f"eval.sets: {each.name!r}" if each.name else "data.held_out"
            lines.append(f"{where}: {both} of {len(asked)} held-out prompts are prompts of training rows too")
    return lines


def opened_reasoning(config: Config, prompts: PromptSource, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """One line if the chat template begins the answer with a reasoning tag, of the first prompt."""
    if not config.run.samples or not len(prompts.train):
        return []
    first = prompts.prompt(int(prompts.train[0]))
    options, opened = {**config.data.chat_template_options, **first.template_options}, ""
    with contextlib.suppress(Rejected):  # the check of all prompts reports it
        opened = left_open(generation_prompt(tokenizer, first.messages, tools=first.tools, options=options))
    if not opened:
        return []
    if Openings(tokenizer).seen(opened, special_tokens=config.reward.special_tokens):
        what = "rewards and samples.jsonl see that before the sampled text"
    else:
        what = "a special token, which rewards see with reward.special_tokens=true"
    return [f"data: the chat template begins each answer with {opened!r}: {what}; it is not trained on"]


def unpacked(config: Config, layouts: Mapping[str, Layout]) -> list[str]:
    """One line for each reason why a role's model is not packed, though packing would be faster."""
    lines = [
        f"{config.train_table_of(role)}.layout: whole, on padded rows, because {layout.why}"
        for role, layout in layouts.items()
        if layout.why
    ]
    return list(dict.fromkeys(lines))


# What the KL penalty's gradient is that of, by `kl_in` and `kl_estimator`, where it is not KL(policy || reference).
OTHER_GRADIENTS = {
    ("loss", DIFFERENTIATED): "KL(reference || policy), and after the first optimizer step on a batch of neither",
    ("reward", "k2"): "the mean of k2 - KL(policy || reference), which can lead away from the reference",
    ("reward", "k3"): "KL(policy || reference) - KL(reference || policy), which can lead away from the reference",
}


def kl_gradient(algorithm: AlgorithmConfig) -> list[str]:
    """One line if the gradient of the KL penalty is not that of the KL."""
    gradient = OTHER_GRADIENTS.get((algorithm.kl_in, algorithm.kl_estimator or ""))
    if gradient is None or not algorithm.kl_coef:
        return []
    setting = f"algorithm.kl_estimator: {algorithm.kl_estimator!r} with algorithm.kl_in={algorithm.kl_in!r}"
    return [f"{setting}: the penalty's gradient is that of {gradient}; remove it for that of KL(policy || reference)"]


def swapped_weights(algorithm: AlgorithmPlan, source: str) -> list[str]:
    """One line for each snapshot whose weights a streamed batch swaps in and out again and again."""
    if source != "streamed":
        return []
    return [
        f"{wanted}: with rollout.source='streamed' the actor's weights are swapped for it at each part of a batch that "
        "arrives, which can take longer than the passes themselves"
        + ("; a table [roles.reference] makes it a model that stays in memory" if tag == REFERENCE else "")
        for tag, wanted in algorithm.snapshots(ACTOR).items()
    ]
