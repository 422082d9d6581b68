"""Find what contradicts itself in a config, long before the first GPU minute: a line for each problem, which begins
with the path of a setting; and collect what is wrong with a run, to report it all at once."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import attrs

from corerl.config.options import RAYS, READ_AT_START, Need
from corerl.config.schema import MOST_SAMPLES, Config
from corerl.config.toml_text import class_fields
from corerl.errors import ConfigError, UserError
from corerl.messages import did_you_mean_path, listed, short_repr
from corerl.plugin.spec import ACTOR

# A model's name there, which a relative path may be too; nobody has the name models there.
HUB = re.compile(r"(?!models/)[\w-][\w.-]*/[\w.-]+")
CODE = ("*.py", "*.so", "*/*.py")  # what can be imported
SHOWN = 3  # files in one line


def contradictions(config: Config) -> list[str]:
    """Those of a run."""
    checks = (_mode, _evaluation, _batch)
    return [*contradictions_of_a_group(config), *(line for check in checks for line in check(config))]


def contradictions_of_a_group(config: Config) -> list[str]:
    """Those that concern the ranks of a role alone."""
    checks = (unmet, _model, _algorithm, _cluster)
    return [line for check in checks for line in check(config)]


# ---- what settings need of each other: `option(..., needs=)` ---------------------------------------------------------


def unmet(config: Config) -> Iterator[str]:
    """A line for each need of a setting that is not met. A setting of its default has none, nor, in a run that only
    scores, have those of the algorithm, which is not asked."""
    unread = ("algorithm.", "roles.") if config.run.mode == "eval" else ()
    settings = {path: (attribute, value) for path, attribute, value in _settings(config)}
    for path, (attribute, value) in settings.items():
        if not _is_set(attribute, value) or path.startswith(unread):
            continue
        shown = "it" if attrs.has(type(value)) else short_repr(value)
        # What is unset may be a number that the algorithm has set.
        off = "set this to 0" if attribute.default is None and isinstance(value, int) else "remove this"
        for need in attribute.metadata.get("needs", ()):
            if need.value in (None, value) and (why := _unmet(need, path, settings)):
                yield f"{path}: {shown} {why}, or {off}"


def _unmet(need: Need, path: str, settings: Mapping[str, tuple[attrs.Attribute[Any], Any]]) -> str:
    """What is wrong, if the setting at `path` has this need; "" if it is met."""
    other = need.path if not need.path.startswith(".") else path.rpartition(".")[0] + need.path
    attribute, value = settings[other]
    met = value in need.values if need.values else _is_set(attribute, value)
    if met is not need.unwanted:
        return ""
    given = f"{other}={short_repr(value)}" if not attrs.has(type(value)) else other
    if need.unwanted:
        return f"does not go with {given}; change that"
    now = "unset" if value is None else short_repr(value)
    wanted = f"{other} to be {' or '.join(map(repr, need.values))}" if need.values else other
    return f"needs {wanted}, which is {now}; set that"


def _settings(table: Any, path: str = "") -> Iterator[tuple[str, attrs.Attribute[Any], Any]]:
    """Each setting with its path and value, tables and those in them."""
    for name, attribute in class_fields(type(table)).items():
        value = getattr(table, name)
        yield path + name, attribute, value
        if attrs.has(type(value)):
            yield from _settings(value, f"{path}{name}.")


def _is_set(attribute: attrs.Attribute[Any], value: Any) -> bool:
    return bool(value) and value != attribute.default


# ---- what is not a need of one setting -------------------------------------------------------------------------------


def _mode(config: Config) -> Iterator[str]:
    if config.run.mode == "train-only" and not config.rollout.saved:
        yield "rollout.saved: empty, but run.mode='train-only' trains from saved batches; set it to their directory"
    if config.run.mode == "eval" and not config.data.held_out and not config.eval.sets:
        yield "data.held_out: 0, but run.mode='eval' scores held-out prompts; set it, or add a table [[eval.sets]]"
    every = {"algorithm.reference_every": config.algorithm.reference_every}
    if config.run.has_engines and config.run.trains:
        every["weights.every"] = config.weights.every
    for setting, steps in every.items():  # a resumed run starts with fresh weights in its engines and its reference
        if steps and config.checkpoint.every % steps and config.run.mode != "eval":
            yield f"checkpoint.every: {config.checkpoint.every} is not a multiple of {setting}={steps}; make it one"


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
                f"{table}.temperature: 0 takes the likeliest token, so that all samples of a prompt are the same; set "
                f"it above 0, or remove {table}.{(given or cuts)[0]}"
            )
        if own.answer and settled.samples in (1, 2) and not common:
            yield f"{table}.answer: set, but a majority needs 3 samples or more; set {table}.samples, or remove it"
    if config.eval.samples and not (config.data.held_out or config.eval.sets):
        yield "eval.samples: set, but nothing is evaluated; set data.held_out, add [[eval.sets]], or remove it"


def _model(config: Config) -> Iterator[str]:
    for role, model in {ACTOR: config.model, **config.roles.own_models}.items():
        if role not in config.chosen_roles:
            continue
        table = config.model_table_of(role)
        if model.tokenizer and role != ACTOR:
            yield f"{table}.tokenizer: the role reads the actor's tokens; remove it"
        if model.pictures not in ("", config.model.pictures):
            yield f"{table}.pictures: the role reads the pictures of the actor's rows; remove it"
        if config.model.pictures and not model.path and model.tower != "trained":
            yield (
                f"{table}.tower: {model.tower!r}, but with {table}.config the tower starts from random weights, and "
                f"would never see; set it to 'trained', or {table}.path"
            )
        if config.model.pictures and model.tower == "trained" and config.lora_of(role) is not None:
            yield (
                f"{table}.tower: 'trained', but {config.lora_table_of(role)} trains adapters of the text half alone; "
                "set it to 'frozen', or train all weights"
            )
        if model.path and not os.path.isdir(model.path):
            near = did_you_mean_path(model.path)
            if not near and HUB.fullmatch(model.path):
                near = f"; if that is a name of the Hugging Face Hub: hf download {model.path} --local-dir {model.path}"
            advice = f"set it to a downloaded Hugging Face model directory{near}"
            yield f"{table}.path: no directory {model.path!r}; {advice}"


def _batch(config: Config) -> Iterator[str]:
    prompts, samples = config.rollout.prompts, config.rollout.samples
    if prompts * samples > MOST_SAMPLES:
        yield (
            f"rollout.prompts: {prompts} x rollout.samples={samples} makes {prompts * samples:,} samples per step, "
            f"wanted at most {MOST_SAMPLES:,}, which are held in memory together; lower one of the two"
        )
    if config.run.mode != "train":
        return  # nothing is trained, or batches that have the size of the run that saved them
    parts = {role: config.train_of(role).mini_batches for role in config.chosen_roles}
    for role, mini_batches in parts.items():
        if prompts % mini_batches:
            yield (
                f"rollout.prompts: {prompts} does not split evenly into {config.train_table_of(role)}.mini_batches="
                f"{mini_batches} optimizer steps; {_use_multiple(prompts, parts.values())}"
            )


def uneven(config: Config, groups: Mapping[str, int]) -> Iterator[str]:
    """A line for each trained role, given with its number of data-parallel groups, over which the samples of one
    optimizer step do not divide."""
    prompts, samples = config.rollout.prompts, config.rollout.samples
    parts = {role: config.train_of(role).mini_batches for role in groups}
    # In prompts, as groups of samples stay whole.
    units = [parts[role] * count // math.gcd(count, samples) for role, count in groups.items()]
    for role, count in groups.items():
        step, ranks = prompts * samples // parts[role], config.chosen_roles[role].ranks
        if step % count == 0:
            continue
        over, other = f"roles.{role}.ranks={ranks}", f"a number of ranks that divides {step}"
        if count != ranks:
            over = f"the {count} data-parallel groups of {over}"
            other = f"ranks and parallelism such that the number of groups divides {step}"
        yield (
            f"rollout.prompts: {prompts} x rollout.samples={samples} / "
            f"{config.train_table_of(role)}.mini_batches={parts[role]} makes {step} samples per optimizer step, which "
            f"do not divide evenly over {over}; {_use_multiple(prompts, units)}, or {other}"
        )


def _use_multiple(value: int, units: Iterable[int]) -> str:
    """The advice for a `value` that is to suit all `units`."""
    unit = math.lcm(*units)
    return f"use a multiple of {unit}, such as {-(-value // unit) * unit}"


def _algorithm(config: Config) -> Iterator[str]:
    if config.run.mode == "eval":
        return  # nothing learns: what is unset is not as the algorithm says
    algorithm, rollout = config.algorithm, config.rollout
    if algorithm.correction_floor > algorithm.correction_cap:
        yield (
            f"algorithm.correction_floor: {algorithm.correction_floor}, above algorithm.correction_cap="
            f"{algorithm.correction_cap}; set it to at most that"
        )
    penalized, buffer = algorithm.overlong == "penalty", algorithm.overlong_buffer or 0
    if penalized != bool(buffer) or buffer > rollout.max_tokens:
        yield (
            f"algorithm.overlong_buffer: {buffer} with algorithm.overlong={algorithm.overlong!r}; "
            f"'penalty' needs 1 to rollout.max_tokens={rollout.max_tokens}, the others 0"
        )


def _cluster(config: Config) -> Iterator[str]:
    cluster = config.cluster
    for setting in ("environment", "secrets"):
        for name in filter(RAYS.match, getattr(cluster, setting)):
            yield (
                f"cluster.{setting}: {name!r} is for Ray, which runs before ranks and engines do; set it in the "
                "environment of this command, or of `ray start` if cluster.address is set"
            )
    for name in (each for each in cluster.secrets if not RAYS.match(each)):
        if READ_AT_START.match(name):
            yield (
                f"cluster.secrets: {name!r} is read as a process starts, so that Ray gets its value and logs it; if it "
                "is no secret, set it in cluster.environment"
            )
        elif name in cluster.environment:
            yield f"cluster.secrets: {name!r} is in cluster.environment too; remove it from one of them"
        elif name not in os.environ:
            yield f"cluster.secrets: {name!r} is not set in the environment of this command; set it, or remove it"


def require_no_code_of_a_model(config: Config) -> None:
    """Raise ConfigError if the working directory, where modules are looked for, is a model's with Python files."""
    for role in config.chosen_roles:
        model, table = config.model_of(role), config.model_table_of(role)
        for name, directory in ((f"{table}.path", model.path), (f"{table}.tokenizer", model.tokenizer)):
            if directory and os.path.isdir(directory) and os.path.samefile(directory, os.curdir):
                code = sorted(str(file) for pattern in CODE for file in Path().glob(pattern))
                if code:
                    raise ConfigError(
                        f"{name}: {directory!r} is the working directory, where modules are looked for, and has code "
                        f"that may have come with the model ({listed(code, SHOWN)}); run the command in another one"
                    )


# ---- all problems together -------------------------------------------------------------------------------------------


def _path_of(table: str, kind: Any) -> str:
    """A pattern of the paths that begin with a table of the config; a file may be named alike, such as data.jsonl."""
    keys = [key for arm in (kind, *get_args(kind)) if attrs.has(arm) for key in class_fields(arm)]
    within = rf"(?:{'|'.join(keys)})\b" if keys else ""  # tables of plugins have the plugins' names
    return rf"{table}(?:[\[=:]|\.{within})"


PATH = re.compile("|".join(_path_of(name, field.type) for name, field in class_fields(Config).items()))


class Problems:
    """Collects user errors, to raise them together."""

    def __init__(self) -> None:
        self._found: list[UserError] = []

    def add(self, *lines: str) -> None:
        """Add lines that begin with the settings that they are about."""
        self._found += map(ConfigError, lines)

    @contextmanager
    def stage(self, setting: str = "") -> Iterator[None]:
        """Collect a UserError raised in the block, which ends only the block. `setting` is put before lines that do not
        begin with a path in the config."""
        try:
            yield
        except UserError as error:
            self._found.append(_at(setting, error) if setting else error)

    def raise_all(self) -> None:
        """Raise a single error as it is, several as one ConfigError with the lines of all."""
        errors = list({error.message: error for error in self._found}.values())
        if len(errors) == 1:
            raise errors[0]
        if errors:
            raise ConfigError("\n".join(error.message for error in errors)) from ExceptionGroup("problems", errors)


def _at(path: str, error: UserError) -> UserError:
    """The same error, with `path` before each line that has none."""
    lines = [line if PATH.match(line) else f"{path}: {line}" for line in error.message.splitlines()]
    placed = type(error)("\n".join(lines))
    placed.__cause__ = error
    return placed
