"""Where each field of what users bring is used, and what becomes of those that are not: the tables of inputs.md.

A rule is a pattern of names, what becomes of them, and why; the first one that fits counts. `tests/docs/test_inputs.py`
fails for a field of the installed libraries that no rule and no list has.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple

from corerl.models.build import NOISE
from corerl.models.peft_files import PLAIN
from corerl.models.tokenizer import SHAPING
from corerl.plan.experts import FURTHER, TERMS
from corerl.rollout.agents.chat_requests import FIELDS, REFUSED


class Rule(NamedTuple):
    names: str  # a pattern
    becomes: str  # used, ignored, noted or refused
    why: str


# Fields that only transformers' code of a model type reads, as which every backend builds the model.
ARCHITECTURE = frozenset((Path(__file__).parent / "model_fields.txt").read_text().split())
MODEL = (
    Rule(
        "|".join(NOISE),
        "noted",
        "trained without this noise, so that log-probs are the engine's; said of a value that differs from its type's",
    ),
    Rule(f"^({'|'.join(TERMS)})$", "noted", "a term of transformers' loss: only `train.aux_loss_coef` adds one"),
    Rule("loss", "ignored", "a run has losses of its own"),
    Rule(f"^({'|'.join(FURTHER)})$", "noted", "layers that predict further tokens are neither trained nor exported"),
    Rule("initializer|init_std$|init_scheme$|variance_scale$", "used", "for weights that start random"),
    Rule(
        "^(bos_token_id|eos_token_id|eod_token_id|pad_token_id)$",
        "used",
        "an end token ends samples; none is ever sampled as padding",
    ),
    Rule(
        "^(output_attentions|output_hidden_states|return_dict|use_cache|chunk_size_feed_forward)$",
        "ignored",
        "CoreRL asks for what it needs at each call",
    ),
    Rule("^output_router_logits$", "used", "asks for the balancing term of transformers' loss, which is noted"),
    Rule("label|classifier|^summary_|^problem_type$", "ignored", "of heads that are not a causal language model's"),
    Rule(
        "^forced_|^decoder_start_|^begin_suppress|^suppress_|^encoder_no_repeat",
        "ignored",
        "of `generate`, which samples nothing here",
    ),
    Rule("^(transformers_version|_name_or_path|architectures|init_device)$", "ignored", "says where it came from"),
    Rule("^quantization_config$", "refused", "weights are trained in 16 or 32 bits"),
    Rule("^(auto_map|custom_pipelines)$", "noted", "code of a model's directory is never run"),
)
GENERATION = (
    Rule("^eos_token_id$", "used", "ends samples"),
    Rule(f"^({'|'.join(SHAPING)})$", "noted", "samples are drawn as `[rollout]` says"),
    Rule("^max_|^do_sample$|^num_return", "ignored", "`[rollout]` says how many, and how long"),
    Rule("^(length_penalty|early_stopping|num_beam_groups|diversity_penalty|low_memory)$", "ignored", "of beams"),
    Rule(
        "assistant|lookbehind|prompt_lookup|max_matching|speculation|use_mtp|token_healing",
        "ignored",
        "speculation changes no distribution",
    ),
    Rule("^output_|^return_dict|^remove_invalid|^renormalize", "ignored", "of `generate`'s answer"),
    Rule("cache|compile|continuous_batching|prefill", "ignored", "engines have settings of their own"),
    Rule(
        "^(bos_token_id|pad_token_id|decoder_start_token_id|transformers_version|_from_model_config)$",
        "ignored",
        "kept for the export",
    ),
)
REQUEST = (
    Rule(f"^({'|'.join((*FIELDS, 'temperature', 'top_p', 'top_k'))})$", "used", "some with one value alone"),
    Rule(f"^({'|'.join(REFUSED)})$", "refused", "the error says what to do instead"),
)
ADAPTERS = (
    Rule("^(peft_type|r|lora_alpha|target_modules|use_rslora)$", "used", "as `[lora]`"),
    Rule(f"^({'|'.join(PLAIN)})$", "refused", "unless its value changes nothing"),
    Rule("_config$", "refused", "other kinds of adapters"),
    Rule("", "ignored", "`lora_dropout`, `task_type` and others change nothing that adapters compute"),
)


def rule_of(name: str, rules: Iterable[Rule], known: Collection[str] = ()) -> Rule | None:
    """What becomes of a field; None if nobody has said so."""
    if name in known:
        return Rule("", "used", "")
    return next((rule for rule in rules if re.search(rule.names, name)), None)


def inputs_reference() -> str:
    tables = {
        "A model's config.json, or `[model.config]`": (MODEL, ARCHITECTURE),
        "A model's generation_config.json": (GENERATION, ()),
        "A chat request of an agent": (REQUEST, ()),
        "PEFT's adapter_config.json": (ADAPTERS, ()),
    }
    lines: list[str] = []
    for title, (rules, known) in tables.items():
        lines += [f"## {title}", "", "| fields | | why |", "|---|---|---|"]
        lines += [f"| {_shown(rule.names)} | {rule.becomes} | {rule.why} |" for rule in rules]
        if known:
            lines.append(f"| {len(known)} others, by name | used | by transformers' code of the model type |")
        lines.append("")
    return "\n".join(lines)


def _shown(names: str) -> str:
    """A pattern as its parts, with dots where a name may go on."""
    if not names:
        return "all others"
    whole = names.startswith("^(") and names.endswith(")$")
    parts = names.removeprefix("^(").removesuffix(")$").split("|") if whole else names.split("|")
    shown = (
        part if whole else f"{'' if part[0] == '^' else '...'}{part.strip('^$')}{'' if part[-1] == '$' else '...'}"
        for part in parts
    )
    return ", ".join(f"`{part}`" for part in shown)
