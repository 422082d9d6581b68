"""Find contradictions between a configuration's settings, long before the first GPU minute."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterator

from corerl.config.schema import MOST_SAMPLES, AlgorithmConfig, ClusterConfig, Config
from corerl.config.variables import RAYS, READ_AT_START
from corerl.messages import did_you_mean, did_you_mean_path

UNSET = AlgorithmConfig()
# A model's name there, which a relative path may be too; nobody has the name models there.
HUB = re.compile(r"(?!models/)[\w-][\w.-]*/[\w.-]+")
ONE_MACHINE = 512  # ranks and engines that a Ray started on this machine may have to start


def contradictions(config: Config) -> list[str]:
    """One line for each contradiction, beginning with its dotted path; empty if the configuration can run."""
    checks = (
        *(_mode, _source, _evaluation, _model, _tokenizer, _batch, _algorithm, _asleep, _cluster, _extensions),
        missing_directories,
    )
    return [line for check in checks for line in check(config)]


def contradictions_of_a_group(config: Config) -> list[str]:
    """Those that concern the ranks of a role alone."""
    return [line for check in (_model, _algorithm, _cluster, missing_directories) for line in check(config)]


def _mode(config: Config) -> Iterator[str]:
    from_files = config.run.mode == "train-only"
    if from_files and not config.rollout.saved:
        yield "rollout.saved: empty, but run.mode='train-only' trains from saved batches; set it to their directory"
    if config.rollout.saved and not from_files:
        yield (
            f"rollout.saved: set, but run.mode={config.run.mode!r} does not read saved batches; remove it, or set "
            "run.mode='train-only'"
        )
    if config.run.mode == "eval" and not config.data.held_out and not config.eval.sets:
        yield (
            "data.held_out: 0, but run.mode='eval' scores held-out prompts; set it to at least 1, or add a table "
            "[[eval.sets]]"
        )
    if from_files and config.algorithm.dynamic_sampling:
        yield "algorithm.dynamic_sampling: run.mode='train-only' samples nothing; set it to 0"
    if config.checkpoint.memory and config.cluster.address:
        yield (
            f"checkpoint.memory: is in this machine's memory, but cluster.address={config.cluster.address!r} "
            "may place ranks on others; leave it out, and set checkpoint.every to what may be lost"
        )
    if config.checkpoint.memory and not os.path.isdir("/dev/shm"):
        yield "checkpoint.memory: this machine has no /dev/shm, which keeps files in memory; leave it out"
    sends = config.run.samples and config.run.trains
    if sends and config.weights.every > 1 and config.checkpoint.every % config.weights.every:
        yield (
            f"checkpoint.every: {config.checkpoint.every} is not a multiple of weights.every={config.weights.every}; "
            "a resumed run starts with fresh weights in its engines, so save only at steps that update them"
        )


def _source(config: Config) -> Iterator[str]:
    rollout = config.rollout
    if rollout.max_staleness != 1 and rollout.source != "asynchronous":
        yield (
            f"rollout.max_staleness: {rollout.max_staleness}, but rollout.source={rollout.source!r} "
            f"{'is always one update behind' if rollout.source == 'one-step-off' else 'has no staleness'}; remove it, "
            "or set rollout.source='asynchronous'"
        )
    if rollout.stale != "discard" and rollout.source != "asynchronous":
        yield (
            f"rollout.stale: {rollout.stale!r}, but with rollout.source={rollout.source!r} no sample becomes too old; "
            "remove it, or set rollout.source='asynchronous'"
        )
    if rollout.source == "synchronous" or config.run.mode == "eval":
        return
    if config.run.mode != "train":
        yield (
            f"rollout.source: {rollout.source!r} samples while the model trains, but run.mode={config.run.mode!r} "
            f"{'only samples' if config.run.samples else 'does not sample'}; set it to 'synchronous'"
        )
    if config.weights.every > 1 and rollout.source != "streamed":
        yield (
            f"weights.every: {config.weights.every}, but rollout.source={rollout.source!r} counts staleness in "
            "updates, one per step; set it to 1"
        )


def _evaluation(config: Config) -> Iterator[str]:
    names = Counter(each.called for each in (*config.data.sources, *config.eval.sets))
    for number, each in enumerate(config.eval.sets):
        if names[each.called] > 1 or "/" in each.called:
            yield (
                f"eval.sets[{number}].name: {each.called!r} has a slash, or is the name of another set or source; as "
                "metrics are eval/NAME/reward, choose another one"
            )
    for table, own in config.eval.tables.items():
        settled, common = own.settled(config.eval, config.rollout), own is config.eval and config.eval.sets
        cuts = [] if common else [name for name in ("top_p", "top_k") if getattr(own, name) is not None]
        given = [name for name in ("samples", "temperature") if getattr(own, name) is not None and settled.samples != 1]
        if not settled.temperature and (given or cuts):
            yield (
                f"{table}.temperature: 0 takes the likeliest token: all samples of a prompt are the same, and nothing "
                f"is cut off; set it above 0, or remove {table}.{(given or cuts)[0]}"
            )
        if own.answer and settled.samples in (1, 2) and not common:
            yield f"{table}.answer: set, but a majority needs 3 samples or more; set {table}.samples, or remove it"
    if config.eval.samples and not (config.data.held_out or config.eval.sets):
        yield "eval.samples: set, but nothing is evaluated; set data.held_out, add [[eval.sets]], or remove it"


def _model(config: Config) -> Iterator[str]:
    model = config.model
    for role, own in config.roles.own_models.items():
        table = f"roles.{role}.model"
        if bool(own.path) == bool(own.config):
            yield f"{table}: needs exactly one of path and config; set one, or remove the table to use [model]"
        if own.tokenizer:
            yield f"{table}.tokenizer: the {role} reads the actor's tokens; remove it"
    if not model.path and not model.config:
        yield (
            "model.path: neither model.path nor model.config is set; set model.path to a Hugging Face directory, or "
            "model.config to start from random weights"
        )
    if model.path and model.config:
        yield (
            f"model.config: set together with model.path={model.path!r}; keep model.path to train its weights, or "
            "model.config to start from random weights"
        )
    if model.config and "model_type" not in model.config:
        yield "model.config.model_type: missing; set it to the architecture, such as 'qwen3'"


def _tokenizer(config: Config) -> Iterator[str]:
    model = config.model
    if model.config and not model.path and not model.tokenizer:
        yield (
            "model.tokenizer: empty, but model.config has no tokenizer; set a tokenizer directory, or "
            "'characters:ABC' for one token per character"
        )
    if model.tokenizer == "characters:":
        yield "model.tokenizer: 'characters:' lists no characters; append them, as in 'characters:ABC'"


def _batch(config: Config) -> Iterator[str]:
    prompts, samples = config.rollout.prompts, config.rollout.samples
    if prompts * samples > MOST_SAMPLES:
        yield (
            f"rollout.prompts: {prompts} x rollout.samples={samples} makes {prompts * samples:,} samples per step, "
            f"wanted at most {MOST_SAMPLES:,}, which are held in memory together; lower one of the two"
        )
    for role in config.chosen_roles:
        yield from _batch_of(role, config)


def _batch_of(role: str, config: Config) -> Iterator[str]:
    train, table = config.train_of(role), config.train_table_of(role)
    prompts = config.rollout.prompts
    if prompts % train.mini_batches:
        yield (
            f"rollout.prompts: {prompts} does not split evenly into {table}.mini_batches={train.mini_batches} "
            f"optimizer steps; {_use_multiple(prompts, train.mini_batches)}"
        )


def uneven(role: str, config: Config, *, data_parallel: int) -> str:
    """The problem if the samples of one optimizer step of `role` do not divide over `data_parallel` groups; "" if they
    do."""
    train, ranks = config.train_of(role), config.chosen_roles[role].ranks
    prompts, samples = config.rollout.prompts, config.rollout.samples
    step = prompts * samples // train.mini_batches
    if prompts % train.mini_batches or step % data_parallel == 0:  # `contradictions` reports the first case
        return ""
    unit = train.mini_batches * data_parallel // math.gcd(data_parallel, samples)  # in prompts: groups stay whole
    over, other = f"roles.{role}.ranks={ranks}", f"a number of ranks that divides {step}"
    if data_parallel != ranks:
        over = f"the {data_parallel} data-parallel groups of {over}"
        other = f"ranks and parallelism such that the number of groups divides {step}"
    return (
        f"rollout.prompts: {prompts} x rollout.samples={samples} / "
        f"{config.train_table_of(role)}.mini_batches={train.mini_batches} makes {step} samples per optimizer step, "
        f"which do not divide evenly over {over}; {_use_multiple(prompts, unit)}, or {other}"
    )


def _use_multiple(value: int, unit: int) -> str:
    return f"use a multiple of {unit}, such as {-(-value // unit) * unit}"


def _algorithm(config: Config) -> Iterator[str]:
    if config.run.mode == "eval":
        return  # nothing learns: what is unset is not as the algorithm says
    algorithm = config.algorithm
    if algorithm.kl_target and not algorithm.kl_coef:
        yield "algorithm.kl_target: adapts algorithm.kl_coef, which is 0; set kl_coef to its initial value"
    if algorithm.kl_in == "reward" and not algorithm.kl_coef:
        yield "algorithm.kl_in: 'reward', but algorithm.kl_coef is 0; set kl_coef, or remove kl_in"
    if algorithm.kl_in == "reward" and algorithm.kl_estimator == "k3-differentiated":
        yield (
            "algorithm.kl_estimator: 'k3-differentiated', but algorithm.kl_in='reward' differentiates no estimator; "
            "remove it, which uses k1"
        )
    for setting in ("reference", "reference_every"):
        if getattr(algorithm, setting) and not algorithm.kl_coef:
            yield (
                f"algorithm.{setting}: set, but algorithm.kl_coef=0 keeps no reference policy; set that, or remove this"
            )
    if algorithm.reference and config.run.trains and not os.path.isdir(algorithm.reference):
        yield (
            f"algorithm.reference: no directory {algorithm.reference!r}; set it to a Hugging Face model directory, or "
            f"remove it to use the initial weights{did_you_mean_path(algorithm.reference)}"
        )
    every = algorithm.reference_every
    if every and config.checkpoint.every % every:
        yield (
            f"checkpoint.every: {config.checkpoint.every} is not a multiple of algorithm.reference_every={every}; a "
            "resumed run starts with the current weights as reference, so save only at steps that renew it"
        )
    if algorithm.correction != "none" and algorithm.old_logprobs != "recompute":
        yield (
            f"algorithm.correction: {algorithm.correction!r} compares the engine's log-probs with the trainer's own; "
            "set algorithm.old_logprobs='recompute'"
        )
    if algorithm.old_weights != "current" and algorithm.old_logprobs != "recompute":
        yield (
            f"algorithm.old_weights: {algorithm.old_weights!r} says what recomputes old_logprobs; set "
            "algorithm.old_logprobs='recompute', or remove this"
        )
    if algorithm.correction_floor > algorithm.correction_cap:
        yield (
            f"algorithm.correction_floor: {algorithm.correction_floor}, above algorithm.correction_cap="
            f"{algorithm.correction_cap}; set it to at most that"
        )
    for setting in ("correction_floor", "correction_cap", "correction_beyond"):
        given, unset = getattr(algorithm, setting), getattr(UNSET, setting)
        if algorithm.correction == "none" and given != unset:
            yield f"algorithm.{setting}: {given!r}, but algorithm.correction is 'none'; set one, or remove this"
    if algorithm.routing_replay == "recompute" and algorithm.old_logprobs != "recompute":
        yield (
            "algorithm.routing_replay: 'recompute' replays the experts chosen when old_logprobs are recomputed; set "
            "algorithm.old_logprobs='recompute'"
        )
    penalised, buffer = algorithm.overlong == "penalty", algorithm.overlong_buffer or 0
    if algorithm.kl_target and config.rollout.prompts * config.rollout.samples >= 5 * algorithm.kl_horizon:
        yield (
            f"algorithm.kl_horizon: {algorithm.kl_horizon}, but a rollout step has "
            f"{config.rollout.prompts * config.rollout.samples} samples, so one step could make kl_coef negative; set "
            "it to more than a fifth of that"
        )
    if penalised != bool(buffer) or buffer > config.rollout.max_tokens:
        yield (
            f"algorithm.overlong_buffer: {buffer} with algorithm.overlong={algorithm.overlong!r}; "
            f"'penalty' needs 1 to rollout.max_tokens={config.rollout.max_tokens}, the others 0"
        )


def _asleep(config: Config) -> Iterator[str]:
    """What is for ranks that take turns with engines; a group alone sleeps where its loop says so."""
    cluster, usual = config.cluster, ClusterConfig()
    why = {"cluster.offload": cluster.offload == "never", "cluster.placement": cluster.placement == "disaggregated"}
    awake = [f"{name}={getattr(cluster, name.partition('.')[2])!r}" for name, so in why.items() if so]
    if awake and cluster.offload_kinds != usual.offload_kinds:
        yield f"cluster.offload_kinds: set, but with {awake[0]} no rank sleeps; remove one of the two"


def _cluster(config: Config) -> Iterator[str]:
    if config.cluster.resources and not config.cluster.address:
        yield (
            f"cluster.resources: {', '.join(config.cluster.resources)} requested, but a Ray started on this machine "
            "has only CPUs and GPUs; set cluster.address, or remove it"
        )
    for setting in ("environment", "secrets"):
        for name in filter(RAYS.match, getattr(config.cluster, setting)):
            yield (
                f"cluster.{setting}: {name!r} is for Ray, which runs before ranks and engines do; set it in the "
                "environment of this command, or of `ray start` if cluster.address is set"
            )
    for name in config.cluster.secrets:
        if RAYS.match(name):
            continue
        if READ_AT_START.match(name):
            yield (
                f"cluster.secrets: {name!r} is read as a process starts, so that its value has to go through Ray, "
                "which logs it; if it is no secret, set it in cluster.environment"
            )
        elif name in config.cluster.environment:
            yield f"cluster.secrets: {name!r} is in cluster.environment too; remove it from one of them"
        elif name not in os.environ:
            yield (
                f"cluster.secrets: {name!r} is not set in the environment of this command; set it there, or remove it "
                "from the list"
            )
    counts = {f"roles.{role}.ranks": choice.ranks for role, choice in config.chosen_roles.items()}
    if config.run.samples:
        counts["rollout.replicas"] = config.rollout.replicas
    if not config.cluster.address and sum(counts.values()) > ONE_MACHINE:
        most = max(counts, key=lambda name: counts[name])
        yield (
            f"{most}: {counts[most]}, which makes {sum(counts.values())} processes on this machine, at most "
            f"{ONE_MACHINE}; use fewer, or set cluster.address"
        )


def _extensions(config: Config) -> Iterator[str]:
    counts = Counter(extension.name for extension in config.chosen_extensions)
    for name, count in counts.items():
        if count > 1:
            yield f"extensions: {name!r} is listed {count} times; keep one"


def missing_directories(config: Config) -> Iterator[str]:
    """A line for each directory that is to be there and is not."""
    own = {f"roles.{role}.model": model for role, model in config.roles.own_models.items()}
    for table, model in {"model": config.model, **own}.items():
        if model.path and not os.path.isdir(model.path):
            near = did_you_mean_path(model.path)
            if not near and HUB.fullmatch(model.path):
                near = f"; if that is a name of the Hugging Face Hub: hf download {model.path} --local-dir {model.path}"
            advice = f"set it to a downloaded Hugging Face model directory{near}"
            yield f"{table}.path: no directory {model.path!r}; {advice}"
    resume = config.checkpoint.resume
    if resume not in ("never", "auto") and not os.path.isdir(resume):
        beside = os.path.basename(resume).startswith("step-") and os.path.isdir(os.path.dirname(resume))
        kept = " (a run keeps only its newest checkpoints, checkpoint.keep)" if beside else ""
        near = did_you_mean(resume, ("never", "auto")) or did_you_mean_path(resume)
        advice = f"set 'never', 'auto', or a checkpoint's or a run's directory{near}"
        yield f"checkpoint.resume: no directory {resume!r}{kept}; {advice}"
