"""What each version of the contract has moved, renamed or removed, and where it is now: for findings about older
plugins, and for the table in docs/versioning.md."""

from __future__ import annotations

import re
from collections.abc import Mapping

from corerl.errors import PluginError

NAMES = re.compile(r"pip install [\w'\[\]]+|(?:corerl|Backend)[\w.]*(?::\w+)?(?:\([^)]*\))?")
NO_NAME = re.compile(r"cannot import name '(\w+)' from '(corerl[\w.]*)'")
NO_METHOD = re.compile(r"must implement ([\w, ]+)")

# API -> what was there before -> where it is now. What was there: a module ("corerl.testing", with all below it), a
# name ("corerl.ops.upload:upload"), a method of Backend or a hook ("Backend.train"), or anything else of which only
# the documentation speaks ("the command ...").
MOVED: Mapping[tuple[int, int], Mapping[str, str]] = {
    (2, 0): {
        "Backend.train": (
            "Backend.forward_backward(batch, loss, outputs, last), which adds gradients, and "
            "Backend.optimizer_step(step, scale), which scales and clips them and takes the step"
        ),
        "counting applied steps in `Backend.adam_step`": "core counts them",
        "`with Backend.using(weights)` in `forward`": (
            "core puts the snapshot in place before `forward`, which has no argument `weights`"
        ),
        "Backend.initial_weights": "Backend.initial_weights(chunks): takes the chunks that are to be read",
        "Backend.update_weights": "Backend.update_weights(sender, version, adapters)",
        "Backend.stream": "Backend.stream(adapters=False).as_sent",
        "corerl.algorithms:at_last_token": "corerl_algorithms, in whose module `estimates` it is",
        "corerl.algorithms:explained_variance": "corerl_algorithms, in whose module `estimates` it is",
        "corerl.algorithms:gae": "corerl_algorithms, in whose module `estimates` it is",
        "corerl.algorithms:whiten": "corerl_algorithms, in whose module `estimates` it is",
        "corerl.backend.adamw": "corerl.backend: adamw, moments, set_adam_step, set_lr",
        "corerl.backend:RankTower": "corerl.pictures: RankTower",
        "corerl.backend.base:Extra": "corerl.backend: ExtraState",
        "corerl.backend.passes:StepLosses": (
            "corerl.backend: StepLosses(model, batch, loss, outputs, ...), whose result() has its metrics and tokens"
        ),
        "corerl.models:dtensor_boxes": "corerl_fsdp, in whose module `boxes` it is",
        "corerl.weights:Digest": "corerl.weights: digest(flat), which does not synchronize",
        "corerl.data:Share": "corerl.data: MixtureComponent; a `PromptSource` has `components`",
        "corerl:share": "corerl: StoredBatch(samples), which `forward` takes like the other verbs",
        "`shared` of `MicroBatch`, and `PackedSequences.sharing`": "`prefix_lengths`, and `with_prefixes`",
        '`roles.critic.devices = "shared"`, and of other roles': '`"colocated"`',
        "the metrics `rollout/staleness_share/S` and `moe/largest_share`": "they end in `_fraction`",
        "the lines that `corerl.observability.read_lines` yielded with their records": "not needed: it yields records",
        "corerl_testing:exact_share": "corerl_testing: exact_fraction",
        "corerl.driver:Groups": "corerl.driver: RunGroups",
        "`TrainGroup.plan`": "`TrainGroup.role_plan`",
        "the argument `plan` of `TrainGroup.launch` and `TrainGroup.restart`": "`role_plan`",
        "`ResourcePool.arrange(staying=...)` and `replace_lost`": (
            "`corerl_elastic.slots`: `arranged` and `without_lost`"
        ),
        '`"restarted"` as the reason of `shutdown`': "no run restarts by itself from an older checkpoint",
        "`serve.context_length`": "`rollout.context_length`",
        "the methods `batches`, `step_done` and `update_engines` of a `Run`": (
            "`rollouts`, `report_step` and `push_weights_and_sleep`"
        ),
        "`Run.with_logprobs`, and of a `StreamedStep`": "`with_passes`",
        "setting `Engines.changes_sent`": "`Engines.mark_outdated()` and `Engines.mark_current()`",
        "corerl.weights:gather_plain": "corerl.weights: all_gather_json",
        "corerl.weights:quantized": (
            "corerl.weights: converted_manifest(manifest, left_out, fp8=True, dtypes=...), where `fp8=False` was "
            "`left_out=None`, and `dtypes` was `precise`"
        ),
        "corerl_testing:quantize": "corerl_testing: convert_bucket",
        "`TrainGroup.dp_size`": "`group.layouts[0].dp_size`",
        "`version` of an `UpdateResult` and of `Received`": "not needed: whoever asks for the update knows it",
        "`first_step` of an `Objective`": "`trained_from`",
        "`sent` of a `WeightSender`": "`bytes_sent`",
        "`WeightSender.sender_of`": "`sending_rank`",
        "`sender` of a `Bucket`, `senders` of a `Manifest` and in `build_manifest`": "`stage_rank`, `stage_ranks`",
        "`senders` of an `Address`": "`colocated_ranks`",
        "corerl.driver:with_senders": "corerl.driver: with_colocated_ranks",
        "`samples` of `MicroBatch` and `ForwardResult`": "their `rows`",
        "`weights`, a snapshot's name, of `ForwardPass`, `TrainGroup.forward` and `TrainGroup.update_weights`": (
            "their `snapshot`"
        ),
        "corerl.models.policy": "corerl.models: Policy, make_policy(config, ...), which builds its model",
        "corerl.config.structuring:attempt": "corerl.config: try_structure",
        "corerl.plan:REPLICAS": "corerl_elastic, in whose module `sizes` it is",
        "corerl.plan:with_other_sizes": "corerl_elastic, in whose module `sizes` it is",
        "the method `resized` of a `Plan`": "`corerl_elastic.sizes.resized(plan, overrides)`",
        "corerl.plugin:known_names": "corerl_doctor, in whose module `listing` it is",
        "corerl.plugin:kinds_of": "corerl_doctor, in whose module `listing` it is",
        "corerl.plugin:INSTALL_HINTS": "corerl.plugin: EXTRAS; `corerl.messages.install_hint(extra)` is the command",
        "corerl.plugin:Resources": "corerl.plugin: BackendSpec has none: each process has one device",
        "corerl.plugin.context": "corerl.plugin: Context",
        "corerl.ops.upload": "corerl.ops: upload",
        "corerl.ops:clip_grads": "corerl.ops: scale_grads, clip_factor",
        "corerl.plugin.probing:library": "corerl.plugin: check_library",
        "corerl.plugin.probing:nccl": "corerl.plugin: check_nccl",
        "corerl.plugin.probing:version": "corerl.plugin: version_numbers",
        "corerl.plugin.events:Worked": "corerl.plugin: CallFinished",
        "corerl.plugin.events:Shown": "corerl.plugin: SampleShown",
        "the field `resources` of `BackendSpec` and `EngineSpec`": "not needed: each process has one device",
        "the field `mend` of `corerl.plugin.Finding`": "`fix`",
        "corerl.engines.transformers": "corerl_transformers, which pip install 'corerl[transformers]' brings",
        "corerl.observability.run_state": "corerl_observe.run_state, which pip install 'corerl[observe]' brings",
        "corerl.rollout.engine": "corerl.engines",
        "corerl.rollout.episodes": "corerl_agents, which pip install 'corerl[agents]' brings",
        "corerl.rollout.offered:misfit": "corerl.engines: shape_mismatch",
        "corerl.rollout.receiving": "corerl.engines: Receiving",
        "corerl.rollout.serving": "corerl.engines: EngineLifecycle",
        "corerl.rollout.sources:Scored": "corerl.rollout: ScoredRollout",
        "corerl.weights.transports": (
            "corerl_transports, which pip install 'corerl[transports]' brings, and for `disk` `corerl_delta`"
        ),
        "the field `built` of a `PlanReady`": "`models[role].built`; the config is `models[role].hf`",
        "the option `--help-texts` of `corerl config show`": "`corerl options run.toml`",
        "the methods `begin`, `commit` and `give_up` of a WeightSender": "`open`, `finish` and the argument `lost`",
        "the decorator `corerl.hookimpl`": "not needed: methods are hooks by their names, and generators wrap them",
        "corerl.testing": "corerl_testing, which pip install 'corerl[testing]' brings",
        "the argument `told` of an engine's `generate`": "`on_finished`",
        "the commands `corerl backends`, `engines`, `extensions` and `algorithms`": "`corerl plugins KIND`",
        "the settings `cluster.scaler` and `cluster.spare_timeout`": (
            "options of the extension `elastic`, which pip install 'corerl[elastic]' brings"
        ),
        "the settings `rollout.function` and `[rollout.episodes]`": "`[samplers.episodes]`",
        "`run.apply(run.replan(overrides))` and `run.sizes` of `RunControl`": (
            "corerl_elastic: resize(run, overrides), restart_by, sizes_of"
        ),
    },
}


def table() -> str:
    """Rows of Markdown: of each API, what was there before, and where it is now."""
    lines = ["| since | before | now |", "|---|---|---|"]
    for api, rows in MOVED.items():
        lines += [f"| {'.'.join(map(str, api))} | {_quoted(old)} | {_quoted(new)} |" for old, new in rows.items()]
    return "\n".join(lines) + "\n"


def replaced(error: PluginError) -> str:
    """The end of a message about a plugin that lacks a method, or whose import of something of core's has failed: what
    is in its place. "" if the table does not say."""
    cause, rows = error.__cause__, [row for rows in MOVED.values() for row in rows.items()]
    missing = ""
    if lacks := NO_METHOD.search(error.message):
        methods = [f"Backend.{name}(" for name in lacks[1].split(", ")]
        found = [f"{old} is {new}" for old, new in rows if any(method in new for method in methods)]
    else:
        if isinstance(cause, ModuleNotFoundError):
            missing = cause.name or ""
        elif named := NO_NAME.match(str(cause)):
            missing = f"{named[2]}:{named[1]}"
        found = [f"{_dotted(missing)} is {new}" for old, new in rows if _covers(old, missing)]
    return f"; {found[-1]}" if found else ""


def _covers(old: str, missing: str) -> bool:
    """Whether a row is about a name, "module:name" or "module", or about a module that it is in."""
    return old == missing or (":" not in old and f"{missing.partition(':')[0]}.".startswith(f"{old}."))


def _dotted(name: str) -> str:
    return name.replace(":", ".")


def _quoted(text: str) -> str:
    """With names of core's as code."""
    return text if "`" in text else NAMES.sub(lambda found: f"`{_dotted(found[0])}`", text)
