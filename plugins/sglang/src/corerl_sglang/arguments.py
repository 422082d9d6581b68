"""What SGLang's server is started with: its arguments, from the run, the options and the user's table, fields of the
model's config.json, and which modules it can hold adapters of. Imports nothing heavy."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corerl.errors import ConfigError
from corerl_sglang.server import PING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from corerl.engines import EngineContext
    from corerl_sglang.config import SglangConfig

VOCABULARY = "corerl_vocabulary"  # in the arguments file: not an argument of SGLang's, but `launch` reads it
# Whether SGLang's /health generates a token, and answers a second later. It answers "starting" until the server has
# generated some by itself, and only a start asks.
HEALTH_GENERATES = "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"
PRELOAD = "CORERL_SGLANG_PRELOAD"  # environment variable for `launch`: ranks that import while the server does
LOADER = "corerl_sglang.loader.load"  # SGLang's notation for a function: module.function

# SGLang's cache of the features of pictures, by their content, in MB: no weight update empties it.
FEATURES_CACHED = "SGLANG_VLM_CACHE_SIZE_MB"
TRANSPORT = "mm_feature_transport"  # of a picture's pixels to the ranks; not in SGLang 0.5.15
# Types of models in which the tokens of one picture see each other. SGLang (0.5.17: prepare_attn_masks) computes that
# with one of its attention backends, and not for a picture that is cut between two chunks of a prefill.
TWO_WAY = ("gemma3", "gemma4")
MASKING: Mapping[str, str | int] = {"attention_backend": "triton", "chunked_prefill_size": -1}

MODEL = "set [model]"
TRAINER = "weights come only from the trainer"
LOCAL = "a replica runs on one machine and serves only CoreRL"
KEY = "each server has a key of its own"
DEVICES = "CoreRL places replicas on devices; see [cluster]"
SAMPLING = "only [rollout] controls sampling"
TOKENS = "CoreRL exchanges only tokens with the server"
REQUESTS = "CoreRL sends the requests"

# SGLang arguments that are set elsewhere or not at all -> why.
ELSEWHERE = {
    "model_path": MODEL,
    "tokenizer_path": MODEL,
    "revision": MODEL,
    "trust_remote_code": MODEL,
    "json_model_override_args": MODEL,
    "skip_tokenizer_init": TOKENS,
    "enable_multimodal": "set model.pictures",
    "tokenizer_worker_num": TOKENS,
    "load_format": TRAINER,
    "model_loader_extra_config": TRAINER,
    "custom_weight_loader": TRAINER,
    "weight_version": TRAINER,
    "weight_cache_mode": TRAINER,
    "checkpoint_engine_wait_weights_before_ready": TRAINER,
    "delete_ckpt_after_loading": TRAINER,
    "quantization": "set weights.quantize",
    "torchao_config": f"{TRAINER}, which sends none quantized by torchao",
    "modelopt_quant": f"{TRAINER}, which sends none quantized by ModelOpt",
    "quantize_and_serve": f"{TRAINER}, which sends none quantized by ModelOpt",
    "speculative_algorithm": f"{TRAINER}, which has none for a draft model",
    "enable_lora": "set [lora] and weights.lora",
    "max_lora_rank": "set lora.rank",
    "lora_target_modules": "set lora.targets",
    "max_loaded_loras": TRAINER,
    "max_loras_per_batch": TRAINER,
    "lora_paths": TRAINER,
    "dtype": "set train.precision",
    "device": "set cluster.device",
    "host": LOCAL,
    "port": LOCAL,
    "grpc_port": LOCAL,
    "grpc_mode": LOCAL,
    "smg_grpc_mode": LOCAL,
    "api_key": KEY,
    "admin_api_key": KEY,
    "ssl_certfile": LOCAL,
    "ssl_keyfile": LOCAL,
    "fastapi_root_path": LOCAL,
    "nnodes": LOCAL,
    "node_rank": LOCAL,
    "dist_init_addr": LOCAL,
    "use_ray": LOCAL,
    "tp_size": "set tensor_parallel",
    "dp_size": "set data_parallel",
    "enable_dp_attention": "set data_parallel",
    "ep_size": "set expert_parallel",
    "pp_size": "a replica is not split into pipeline stages; set tensor_parallel",
    "base_gpu_id": DEVICES,
    "gpu_id_step": DEVICES,
    "context_length": "set rollout.context_length",
    "mem_fraction_static": "set memory",
    "enable_memory_saver": "it is always on with a GPU, so that the engine can sleep",
    "enable_weights_cpu_backup": "the trainer sends fresh weights whenever the engine wakes up",
    "attention_backend": "set attention_backend",
    "enable_deterministic_inference": "set deterministic",
    "enable_return_routed_experts": "set routed_experts",
    "allow_auto_truncate": "samples must be drawn from the same tokens they are trained on; lower rollout.max_tokens",
    "preferred_sampling_params": SAMPLING,
    "sampling_defaults": SAMPLING,
    "disaggregation_mode": REQUESTS,
    "encoder_only": REQUESTS,
    "incremental_streaming_output": REQUESTS,
}


# SGLang refuses an input of its context's length less 6 (`max_req_input_len` in managers/tp_worker.py, 0.5.17), and the
# last token of a row is drawn for an input of all others.
KEPT_BACK = 6

# SGLang admits a sample if memory has room for a share of what those it draws may still draw, of 4,096 tokens each at
# most: 0.7 after each pause, and a seventh of that 600 steps later. A batch for training comes at once after a pause,
# and most of its samples end long before `max_tokens`: what is not admitted at first is let in two or three at a time,
# each time with a prefill that all others wait for. Where memory runs out, samples are taken back, and go on later.
CONSERVATIVENESS = 0.3  # times those shares, as SGLang itself chooses for DP attention


class Key(str):
    """A server's key. SGLang writes its arguments to its log, which others may read."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'***'"


def contradictions(server: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(name, what is wrong) for each argument that must not be in the user's table."""
    for name in server:
        if name.replace("-", "_") in ELSEWHERE:
            yield name, f"cannot be set here: {ELSEWHERE[name.replace('-', '_')]}; remove it here"
        elif not name.isidentifier():
            yield name, f"is not an argument name; write {name.strip('-').replace('-', '_')!r}"


def server_arguments(
    options: SglangConfig,
    context: EngineContext,
    *,
    model: Path,
    adapted: Sequence[str] = (),
    vocabulary: int = 0,
    shown: str = "",
) -> dict[str, Any]:
    """Arguments by ServerArgs' names, except host, port and key. `model` is a directory with a config.json; `adapted`
    are the modules that have adapters, `vocabulary` is as `model.vocabulary`, and `shown` is the type of a model that
    is shown pictures: then the directory has the files of tokenizer and processor too. Raises ConfigError for
    settings with which attention would see such a model's pictures otherwise than the trainer."""
    arguments: dict[str, Any] = {
        "model_path": str(model),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "trust_remote_code": False,
        "enable_multimodal": bool(shown),  # else it looks for a processor of pictures, and keeps memory for them
        "custom_weight_loader": [LOADER],
        "device": context.device,
        "dtype": context.precision,
        "tp_size": options.tensor_parallel,
        "ep_size": options.expert_parallel,
        "incremental_streaming_output": True,  # an event of a stream has new tokens alone
        "enable_memory_saver": context.device == "cuda",
        "enable_deterministic_inference": options.deterministic,
        "enable_return_routed_experts": options.routed_experts,
        "uvicorn_access_log_exclude_prefixes": [PING],  # errors quote the log's last lines
    }
    if context.context_length:
        arguments["context_length"] = context.context_length + KEPT_BACK
    if context.weights.quantize == "fp8":
        arguments["quantization"] = "fp8"
    if context.lora is not None:
        arguments |= {
            "enable_lora": True,
            "max_lora_rank": context.lora.rank,
            "lora_target_modules": list(adapted),
            # Of versions that it has: of one that is replaced, requests may be on their way while the next is loaded.
            "max_loras_per_batch": context.weights.versions + 1,
        }
    if shown:
        # SGLang's own choice keeps 1 GiB of the device while the engine sleeps.
        arguments[TRANSPORT] = "cpu"
    if shown in TWO_WAY:
        _require_masks(options, shown)
        arguments |= MASKING
    if options.data_parallel > 1:
        arguments |= {"dp_size": options.data_parallel, "enable_dp_attention": True}
    else:
        arguments["schedule_conservativeness"] = CONSERVATIVENESS
    if vocabulary:
        arguments[VOCABULARY] = vocabulary
    if options.memory:
        arguments["mem_fraction_static"] = options.memory
    if options.attention_backend:
        arguments["attention_backend"] = options.attention_backend
    return {**arguments, **options.server}


def _require_masks(options: SglangConfig, shown: str) -> None:
    """Raise ConfigError for settings with which SGLang would not compute what tokens of a picture see of each other."""
    attention = MASKING["attention_backend"]
    for path, given, wanted in (
        ("attention_backend", options.attention_backend or attention, attention),
        ("server.prefill_attention_backend", options.server.get("prefill_attention_backend", attention), attention),
        ("server.chunked_prefill_size", options.server.get("chunked_prefill_size", -1), -1),
    ):
        if given != wanted:
            raise ConfigError(
                f"engines.sglang.{path}: {given!r}, but in a {shown} model the tokens of a picture see each other, "
                f"which SGLang computes with {attention!r} alone, and not for a picture cut in two; use {wanted!r}"
            )


def plain_allocator(environment: Mapping[str, str]) -> dict[str, str]:
    """Environment variables to override in the server: the memory saver behind SGLang's sleep does not start with
    expandable segments, which are meant for the training ranks."""
    switch = re.compile(r"(expandable_segments\s*:\s*)true", re.IGNORECASE)
    return {name: switch.sub(r"\1False", value) for name, value in environment.items() if switch.search(value)}


# ---- adapters --------------------------------------------------------------------------------------------------------

# What SGLang 0.5.17 knows adapters of (the choices of its --lora-target-modules), and of those what it holds as one: it
# silently leaves out the adapters of a part whose first one has none.
KNOWN = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj", "gate_up_proj"),
    *("q_a_proj", "q_b_proj", "kv_b_proj", "kv_a_proj_with_mqa", "wq_b", "wk", "weights_proj", "qkvr", "wo_ud"),
)
TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def adapter_misfits(modules: Collection[str]) -> Iterator[str]:
    """Why SGLang cannot hold adapters of the modules with these last names."""
    merged = "leave them out of lora.targets, or set weights.lora to 'merged'"
    if unknown := sorted(set(modules) - set(KNOWN)):
        yield f"SGLang has no adapters of {', '.join(unknown)}; {merged}"
    for parts in TOGETHER:
        if 0 < len(found := [part for part in parts if part in modules]) < len(parts):
            yield (
                f"SGLang holds {', '.join(parts)} as one, but only {', '.join(found)} would have adapters; name all of "
                "them in lora.targets, or none, or set weights.lora to 'merged'"
            )


# ---- the model's config.json -----------------------------------------------------------------------------------------

# Fields that SGLang reads, since published models have them, and that transformers does not write: model type -> what
# its layers do in transformers, in the words of the published files.
FIELDS: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v3": {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    "gpt_oss": {"swiglu_limit": 7.0},
    "minimax_m2": {"scoring_func": "sigmoid", "use_qk_norm": True, "use_routing_bias": True},
    "qwen3_5_vision": {"deepstack_visual_indexes": []},
    "qwen3_5_moe_vision": {"deepstack_visual_indexes": []},
}
INTERVAL = "full_attention_interval"  # of the layers of hybrid models, every so-manieth of which is attention


def add_published_fields(config: PreTrainedConfig) -> None:
    """Set those of the fields that `config` lacks, as it does unless it was read from a published file."""
    if (tower := getattr(config, "vision_config", None)) is not None:
        _set_missing(tower, FIELDS.get(tower.model_type, {}))
    config = config.get_text_config()
    fields = dict(FIELDS.get(config.model_type, {}))
    layers = getattr(config, "layer_types", None) or []
    if "linear_attention" in layers and "full_attention" in layers:
        every = layers.index("full_attention") + 1
        if all((kind == "full_attention") == (at % every == 0) for at, kind in enumerate(layers, start=1)):
            fields[INTERVAL] = every
    _set_missing(config, fields)


def _set_missing(config: PreTrainedConfig, fields: Mapping[str, Any]) -> None:
    for name, value in fields.items():
        if not hasattr(config, name):
            setattr(config, name, value)
