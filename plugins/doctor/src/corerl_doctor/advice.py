"""What a user should know of a run before its first step, though nothing is wrong: what it trains, samples and reads
otherwise than may be meant."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from corerl.algorithms import ACTOR
from corerl.config import EXPERTS
from corerl.messages import install_hint, listed, short_repr
from corerl.models import (
    VALUE_HEAD_WEIGHT,
    architecture_of,
    experts_of,
    kept_files,
    meta_model,
    model_files,
    reads_pictures,
    shapes_of,
    targets_in,
    unread_parameters,
)
from corerl.pictures import read
from corerl.plugin import Capability, Kind, PlanAnswer
from corerl_doctor.listing import Status, installed

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from corerl.cluster import Placement
    from corerl.config import Config
    from corerl.plan import EvalSet, PlanReady, RoleModel, RolloutPlan

SHOWN = 8  # names in one line
MEASURED = 8  # pictures that are read to say how many tokens one takes
EXPECTED_CHANGES = ("run.dir", "run.steps", "checkpoint.resume")  # settings that a resumed run is meant to change
SHOWN_CHARACTERS = 40  # of a setting's value
# Fields that count layers of a checkpoint which predict tokens after the next one, and which transformers never builds.
FURTHER = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
GENERATION = "generation_config.json"  # the authors' sampling settings
# Fields of that file with which `generate` samples other tokens, while engines sample as [rollout] says -> the value
# that is as good as none, besides 0, null and an empty one.
SHAPING: Mapping[str, float | None] = {
    **dict.fromkeys(("temperature", "top_p", "typical_p", "guidance_scale", "num_beams"), 1),
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty"), 1),
    **dict.fromkeys(("top_k", "min_p", "top_h", "epsilon_cutoff", "eta_cutoff", "penalty_alpha", "dola_layers")),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty")),
    **dict.fromkeys(("bad_words_ids", "force_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias")),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "min_length", "min_new_tokens", "stop_strings")),
    **dict.fromkeys(("constraints", "watermarking_config")),
}


class Advising:
    def __init__(self, *, options: Any, run_dir: str) -> None:
        pass

    def plan_ready(self, plan: PlanReady) -> PlanAnswer:
        return PlanAnswer(notices=list(advice(plan)))


def advice(plan: PlanReady) -> Iterator[str]:
    """The lines about a plan."""
    config = plan.config
    if plan.start.state and config.run.trains:
        yield from changed_settings(plan.start.state["config"], plan.record)
    if config.run.has_engines:
        yield from tokens_of_pictures(plan.rollout)
        yield from held_out_and_trained_on(plan.rollout, plan.eval_sets)
        yield from ignored_sampling(config)
    yield from absent_extensions()
    for model in plan.models.values():
        if model.settings.path:
            adapted = model.lora is not None  # adapters alone are in a checkpoint
            yield from of_files(model, read=plan.start.resume is None or model.frozen or adapted)
        yield from of_model(model)
    if plan.processes.device == "cuda":
        yield from of_choices(plan)
    elif not config.cluster.address:
        yield from too_few_cores(plan.processes.placement)
    if config.run.trains:
        yield from of_sampling(config)
        yield from of_learning(config)
        yield from unpacked(plan.models)
        if config.algorithm.reference and (lacking := unused(config.algorithm.reference, plan.models[ACTOR].hf)):
            yield f"algorithm.reference: {lacking}"


# ---- what is installed -----------------------------------------------------------------------------------------------


def absent_extensions() -> Iterator[str]:
    """One line for each installed extension whose spec cannot be used, so that nobody knows whether it would join."""
    for each in installed(Kind.EXTENSIONS):
        if each.status in (Status.BROKEN, Status.INCOMPATIBLE):
            yield (
                f"the extension {each.name!r} of {each.distribution} takes no part: {each.reason}; run corerl doctor "
                f"{each.name}, or uninstall {each.distribution}"
            )


# ---- models ----------------------------------------------------------------------------------------------------------


def of_files(model: RoleModel, *, read: bool) -> Iterator[str]:
    """Lines about what else the files of a model's directory hold, which are `read` unless the run resumes."""
    path, where = model.settings.path, f"{model.table}.path"
    shows = bool(model.settings.pictures) and reads_pictures(model.hf)
    if not model.frozen and not (shows and model.settings.tower == "trained"):
        why = f"with {model.table}.tower='frozen'" if shows else "as the run reads text alone"
        if kept := untrained(path, model.hf, model.built, why=why):
            yield f"{where}: {kept}"
    if read and (lacking := unused(path, model.hf)):
        yield f"{where}: {lacking}"


def unused(directory: str, config: PreTrainedConfig) -> str:
    """A notice of tensors in a model's directory that the model lacks; "" if there are none."""
    if reads_pictures(config):
        return ""  # see `untrained`
    if not (found := unused_names(directory, config)):
        return ""
    count = f"{len(found)} tensors" if len(found) > 1 else "a tensor"
    return f"{directory} has {count} that the model lacks, not used: {listed(found, SHOWN)}"


def unused_names(directory: str, config: PreTrainedConfig) -> list[str]:
    """The tensors in a model's directory that the model lacks, of which transformers would warn too."""
    whole = meta_model(config)  # with its head, which a critic does not read
    known = [r"rotary_emb\.inv_freq", r"(^|\.)position_ids$", *(whole._keys_to_ignore_on_load_unexpected or ())]
    others = model_files(directory, config).others([*shapes_of(whole), VALUE_HEAD_WEIGHT], whole)
    return [name for name in others if not any(re.search(each, name) for each in known)]


def untrained(
    directory: str, config: PreTrainedConfig, model: PreTrainedModel, *, why: str = "as the run reads text alone"
) -> str:
    """A notice of the weights in a directory that a run does not train, and `why`: of a model that reads pictures those
    that are left out of `model`, the role's on meta; of others those that no pass over text reads. "" if there are
    none."""
    if reads_pictures(config):
        files, names = kept_files(directory, config)
        kept, trained = {name: files.shape(name) or () for name in names}, shapes_of(meta_model(config))
    else:
        trained = {name: tuple(param.shape) for name, param in model.named_parameters()}
        kept = {name: trained.pop(name) for name in unread_parameters(model)}
    if not kept:
        return ""
    sizes, others = (sum(map(math.prod, each.values())) for each in (trained, kept))
    inside = {start for name in trained for start in _prefixes(name)}
    parts = {next(start for start in _prefixes(name) if start not in inside) for name in kept}
    return (
        f"{len(kept)} tensors ({others / (sizes + others):.1%} of the weights) are not trained, {why}, and an export "
        f"has them unchanged: {listed(sorted(parts), SHOWN)}"
    )


def _prefixes(name: str) -> list[str]:
    """The names of a tensor and of the modules around it, the outermost first."""
    return list(itertools.accumulate(name.split("."), "{}.{}".format))


def of_model(model: RoleModel) -> Iterator[str]:
    """Lines about a trained model: layers of its checkpoint that are left out, weights without adapters, and adapters
    that other classes lack."""
    if model.trained and not model.critic and model.settings.path and not reads_pictures(model.hf):
        # Of a model that reads pictures an export has them unchanged: see `untrained`.
        fields = {**model.hf.to_dict(), **model.hf.get_text_config().to_dict()}
        for name in (name for name in FURTHER if fields.get(name)):
            where = f"{model.table}.path: config.json: {name}={fields[name]}"
            yield f"{where}: layers that predict further tokens are neither trained nor exported"
    if model.trained and model.lora is not None:
        yield from without_adapters(model)
        if reads_pictures(model.hf):
            yield (
                f"{model.lora_table}: adapters are named for the modules of {architecture_of(model.hf).__name__}, the "
                "class of the checkpoint; load them onto a model of AutoModelForImageTextToText"
            )


def without_adapters(model: RoleModel) -> Iterator[str]:
    """A line if a model with adapters has experts in fused tensors that get none."""
    count = experts_of(model.hf.get_text_config().to_dict())
    parameters = dict(model.built.named_parameters())
    fused = {name: param for name, param in parameters.items() if param.dim() == 3 and len(param) == count}
    if model.lora is None or not fused:
        return
    adapted = {id(param) for module in targets_in(model.built, model.lora).values() for param in module.parameters()}
    left_out = [name for name, param in fused.items() if id(param) not in adapted]
    if left_out:
        covered = sum(param.numel() for param in parameters.values() if id(param) in adapted and param.dim() > 1)
        fraction = covered / sum(param.numel() for param in parameters.values())
        names = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in left_out))
        yield (
            f"{model.lora_table}: adapters cover {fraction:.2%} of the weights: {len(left_out)} fused tensors of "
            f"experts ({names}) get none; the target {EXPERTS!r} may give them adapters (docs/lora.md)"
        )


def unpacked(models: Mapping[str, RoleModel]) -> list[str]:
    """A line for each reason why a role's model is not packed, though packing would be faster."""
    whys = {each.train_table: each.layout.why for each in models.values() if each.layout.why}
    return [f"{table}.layout: whole, on padded rows, because {why}" for table, why in whys.items()]


# ---- what was chosen -------------------------------------------------------------------------------------------------


def of_choices(plan: PlanReady) -> Iterator[str]:
    """A line for each setting that CoreRL chose, but for what the forecast decides where it takes part."""
    forecast = any(each.name == "forecast" for each in plan.plugins.extensions)
    for role in plan.asked.chosen_roles:
        table, was, now = plan.asked.train_table_of(role), plan.asked.train_of(role), plan.config.train_of(role)
        trained = plan.asked.run.trains and not plan.plugins.is_frozen(role)
        for name in ("precision", "recompute") if trained and not forecast else ("precision",):
            if getattr(was, name) == "auto":
                open_to = name == "recompute" and plan.plugins.supports(role, Capability.RECOMPUTE)
                more = f"; {install_hint('forecast')} to have it chosen by the memory that training needs" * open_to
                yield f"{table}.{name}: 'auto' is {getattr(now, name)!r} for the {role}{more}"


def too_few_cores(placement: Placement) -> Iterator[str]:
    """A line if the processes of a group, which work at the same time, share cores of this machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    name, most = max(((name, len(own)) for name, own in placement.places.items()), key=lambda each: each[1])
    if most > cores:
        yield f"{most} processes of {name} share the {cores} cores that this run may use; fewer take less time"


# ---- learning and sampling -------------------------------------------------------------------------------------------


# What the KL penalty's gradient is that of, by `kl_in` and `kl_estimator`, where it is not KL(policy || reference).
OTHER_GRADIENTS = {
    ("loss", "k3-differentiated"): "KL(reference || policy), and after the first optimizer step on a batch of neither",
    ("reward", "k2"): "the mean of k2 - KL(policy || reference), which can lead away from the reference",
    ("reward", "k3"): "KL(policy || reference) - KL(reference || policy), which can lead away from the reference",
}


def of_learning(config: Config) -> Iterator[str]:
    """A line if the gradient of a run that trains may not be the one that is meant."""
    algorithm = config.algorithm
    if algorithm.kl_estimator and not algorithm.kl_coef:
        estimator = f"algorithm.kl_estimator: {algorithm.kl_estimator!r} has no effect, as algorithm.kl_coef is 0"
        yield f"{estimator}; set that for a KL penalty, or remove this"
    gradient = OTHER_GRADIENTS.get((algorithm.kl_in, algorithm.kl_estimator or ""))
    if gradient is not None and algorithm.kl_coef:
        setting = f"algorithm.kl_estimator: {algorithm.kl_estimator!r} with algorithm.kl_in={algorithm.kl_in!r}"
        yield f"{setting}: the penalty's gradient is that of {gradient}; remove it for that of KL(policy || reference)"


def of_sampling(config: Config) -> Iterator[str]:
    """A line if the policy is trained on tokens that are sampled from fewer than its log-probs are of."""
    rollout = config.rollout
    cuts = {"top_p": rollout.top_p if rollout.top_p < 1 else None, "top_k": rollout.top_k or None}
    if given := [f"rollout.{name}={value:g}" for name, value in cuts.items() if value]:
        yield (
            f"{' and '.join(given)}: only the likeliest tokens are sampled, but log-probs are of all tokens, in "
            "engines and trainer alike; this biases the gradient, which no ratio shows and no correction undoes; leave "
            f"{'it' if len(given) == 1 else 'them'} out to sample from the policy that is trained"
        )


def ignored_sampling(config: Config) -> Iterator[str]:
    """A line about what the model's generation_config.json says of sampling that differs from a run's."""
    path = config.model.path
    file = Path(path) / GENERATION
    fields = json.loads(file.read_bytes()) if path and file.is_file() else {}
    sampling = {name: getattr(config.rollout, name) for name in ("temperature", "top_p", "top_k")}
    found = [
        f"{name}={short_repr(value)}"
        for name, neutral in SHAPING.items()
        if (value := fields.get(name)) and value not in (neutral, sampling.get(name))
    ]
    if found:
        yield f"model.path: {GENERATION} has {', '.join(found)}, which is ignored: sampling follows [rollout]"


# ---- prompts ---------------------------------------------------------------------------------------------------------


def tokens_of_pictures(rollout: RolloutPlan) -> Iterator[str]:
    """A line about how long pictures are for the model, by those of the prompts that are checked."""
    if (reader := rollout.pictures) is None:
        return
    first = rollout.prompts.checked.values()
    found = itertools.chain.from_iterable(prompt.pictures for prompt in first)
    pictures = [read(each) for each in itertools.islice(found, MEASURED)]
    if not pictures:
        yield f"model.pictures: none of the first {len(first)} prompts has a picture"
        return
    tokens = [len(reader.expand(picture)) for picture in pictures]
    width, height = pictures[int(np.argmax(tokens))].size
    least, most = min(tokens), max(tokens)
    takes = str(most) if least == most else f"{least} to {most}"
    yield (
        f"model.pictures: of the first {len(pictures)} pictures each takes {takes} tokens of a prompt; the model sees "
        f"the largest at {width}x{height}"
    )


def held_out_and_trained_on(rollout: RolloutPlan, eval_sets: Sequence[EvalSet]) -> Iterator[str]:
    """A line if copies of held-out rows are not trained on, and one for each set with prompts of training rows."""
    prompts = rollout.prompts
    if prompts.copies:
        yield f"data.held_out: {prompts.copies} copies of held-out rows are not trained on"
    for each in eval_sets:
        asked = each.source.asked[each.source.held_out]
        if both := int(np.isin(asked, prompts.asked[prompts.train]).sum()):
            where = f"eval.sets: {each.name!r}" if each.name else "data.held_out"
            yield f"{where}: {both} of {len(asked)} held-out prompts are prompts of training rows too"


# ---- settings that have changed --------------------------------------------------------------------------------------


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """One line that names the settings in which a resumed run differs from its checkpoint's config, if there are any.
    Both are plain data."""
    changes = [
        "{}={} (was {})".format(path, *_shown_apart(value, old)) if old is not None and value is not None else path
        for path, old, value in _differences(before, now)
        if path not in EXPECTED_CHANGES
    ]
    return [f"resumed with other settings: {listed(changes, SHOWN)}"] if changes else []


def _shown_apart(*values: Any) -> list[str]:
    """The beginnings of values, or the ends of those that begin alike, as long paths do."""
    shown = [short_repr(each, SHOWN_CHARACTERS) for each in values]
    return shown if len({*shown}) > 1 else [f"...{str(each)[-SHOWN_CHARACTERS:]}" for each in values]


def _differences(before: Any, now: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Dotted path, old and new value of each difference; of what is in one of them only, the outermost path."""
    if not isinstance(before, Mapping) or not isinstance(now, Mapping):
        if before != now:
            yield path, before, now
        return
    for key in [*now, *(key for key in before if key not in now)]:
        yield from _differences(before.get(key), now.get(key), f"{path}.{key}" if path else key)
