"""Where each field of what users bring is used, and what becomes of those that are not: the tables of inputs.md.

A rule is a pattern of names, what becomes of them, and why; the first one that fits counts. `tests/docs/test_inputs.py`
fails for a field of the installed libraries that no rule and no list has.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple

from corerl.data.rows import OPTIONS
from corerl.models.build import NOISE
from corerl.models.lora import HARMLESS, READ
from corerl_doctor.advice import FURTHER, SHAPING


class Rule(NamedTuple):
    names: str  # a pattern
    becomes: str  # used, ignored, noted or refused
    why: str


# Fields that only transformers' code of a model type reads, as which every backend builds the model.
ARCHITECTURE = frozenset((Path(__file__).parent / "model_fields.txt").read_text().split())
MODEL = (
    Rule(
        "|".join(NOISE),
        "ignored",
        "trained without this noise, so that log-probs are the engine's; `phimoe`, which masks experts by it in "
        "inference too, is refused",
    ),
    Rule("loss", "ignored", "a run has losses of its own: only `train.aux_loss_coef` balances experts"),
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
    Rule("^output_router_logits$", "ignored", "as the terms of transformers' loss that it asks for"),
    Rule("label|classifier|^summary_|^problem_type$", "ignored", "of heads that are not a causal language model's"),
    Rule(
        "^forced_|^decoder_start_|^begin_suppress|^suppress_|^encoder_no_repeat",
        "ignored",
        "of `generate`, which samples nothing here",
    ),
    Rule("^(transformers_version|_name_or_path|architectures|init_device)$", "ignored", "says where it came from"),
    Rule("^quantization_config$", "refused", "weights are trained in 16 or 32 bits"),
    Rule("^(auto_map|custom_pipelines)$", "ignored", "code of a model's directory is never run"),
)
GENERATION = (
    Rule("^eos_token_id$", "used", "ends samples"),
    Rule(f"^({'|'.join(SHAPING)})$", "noted", "sampling follows `[rollout]`; said of a value that differs from it"),
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
TOKENIZER = (
    Rule("^chat_template$", "used", "writes prompts; without one, a prompt is its text"),
    Rule("^response_template$", "used", 'by `samplers.episodes.tool_calls = "auto"`'),
    Rule(
        "^response_schema$",
        "ignored",
        "transformers drops this older form; calls are read as the chat template has them",
    ),
    Rule("^auto_map$", "refused", "unless transformers has a class for it; code of a directory is never run"),
    Rule(
        "padding|truncation|^max_len|^model_max_length$|^stride$|^pad_to_multiple_of$|^pad_token_type_id$",
        "ignored",
        "`[rollout]` bounds lengths; texts are encoded one by one and whole",
    ),
    Rule(
        "^(processor_class|name_or_path|files_loaded|gguf_file|verbose|model_input_names)$",
        "ignored",
        "no text needs it",
    ),
    Rule(
        "_token$|_tokens$|^tokenizer|^merges|^vocab|^add_|^added_tokens|^backend$|^clean_up|^split_special|^model_specific",
        "used",
        "by transformers, which builds the tokenizer",
    ),
    Rule("^(_spm_precompiled_charsmap|fix_mistral_regex|post_processor|unk_id)$", "used", "by transformers likewise"),
)
ROW = (
    Rule("^(prompt_key|answer_key|tools_key)$", "used", "the field that this setting of `[data]` names"),
    Rule(f"^({OPTIONS})$", "used", "options of the chat template for this row"),
    Rule(
        "^(image|images|video|videos|audio|audios)$",
        "refused",
        "as any field that holds pictures, sound or video, unless in `data.ignore`",
    ),
    Rule("", "used", "by reward functions and episodes, as `prompt.fields`; the model is not shown them"),
)
MESSAGE = (
    Rule("^(role|content)$", "used", "by the chat template; parts of a content are joined, and are text alone"),
    Rule("^(tool_calls|tool_call_id|name)$", "used", "by the chat template; arguments as objects"),
    Rule("^function_call$", "used", "as `tool_calls`, if there are none"),
    Rule("^refusal$", "used", "as `content`, if there is none"),
    Rule("^audio$", "refused", "as any field that holds pictures, sound or video"),
)
CHECKPOINT = (
    Rule("^(format|crc32|files|sums)$", "used", "checked before anything is loaded"),
    Rule("^(boxes|key|name|shape|offsets|sizes|stored)$", "used", "where each part of each tensor is"),
    Rule("^extra$", "used", "by the backend: steps of the optimizer, and others"),
    Rule("^(rollout_step|source|schedules)$", "used", "where the run goes on"),
    Rule("^data$", "used", "compared with the data of now; a change is an error or said at the start"),
    Rule("^config$", "used", "compared with the config of now; a change is said at the start"),
    Rule("^before$", "used", "samples of the first evaluation, for the comparison at the end"),
)
ADAPTERS = (
    Rule(f"^({'|'.join(READ)})$", "used", "as `[lora]`"),
    Rule(f"^({'|'.join(HARMLESS)})$", "ignored", "they change nothing that adapters compute"),
    Rule("", "refused", "unless unset: they change what adapters compute"),
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
        "A tokenizer's tokenizer_config.json": (TOKENIZER, ()),
        "A row of the data": (ROW, ()),
        "A message, of a row or a request": (MESSAGE, ()),
        "A checkpoint's checkpoint.json, its `state`, and the index of a rank": (CHECKPOINT, ()),
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
