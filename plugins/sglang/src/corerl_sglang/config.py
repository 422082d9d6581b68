"""The SGLang-specific options of an engine; everything common is in [rollout]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from corerl.config import above, at_least, between, option
from corerl.messages import install_hint

# Concurrent `generate` calls: SGLang batches them itself, so many small ones cost nothing. As many as a step has rows,
# where each is asked for by itself: what finds no free call is not decoded meanwhile, or shares a call with others. A
# thread of the engine's process each.
CALLS = 1024
LAUNCHER = "corerl_sglang.launch"
INSTALL = f"python -m {install_hint('sglang')}"
ROWS = 8  # of a request at least: SGLang handles all requests in one event loop, at a fixed cost each


@frozen(kw_only=True)
class SglangConfig:
    tensor_parallel: int = option(
        "devices of one machine over which each replica's model is split", default=1, validator=at_least(1)
    )
    data_parallel: int = option(
        "groups into which these devices are divided for attention, each with its own requests (SGLang's DP "
        "attention); for whole copies of the model use rollout.replicas",
        default=1,
        validator=at_least(1),
    )
    expert_parallel: int = option(
        "groups into which these devices are divided for experts, each with its own experts",
        default=1,
        validator=at_least(1),
    )
    memory: float = option(
        "fraction of each device's memory for weights and KV cache; 0 leaves it to SGLang, which takes most of it",
        default=0.0,
        validator=between(0, 1),
    )
    attention_backend: str = option(
        "attention backend: fa3, flashinfer, triton, ...; empty leaves it to SGLang", default=""
    )
    deterministic: bool = option(
        "make each sample a function of its noise key, its tokens and the weights only, independent of the batch; "
        "slower",
        default=False,
    )
    routed_experts: bool = option(
        "return the experts that each token was routed to, for algorithm.routing_replay = 'engine'", default=False
    )
    requests: int = option(
        "requests into which a rollout step is split, or each part that is answered by itself, of 8 rows or more; all "
        "are sent at once",
        default=8,
        validator=at_least(1),
    )
    start_timeout: float = option("seconds allowed for the server to start", default=900.0, validator=above(0))
    health_timeout: float = option(
        "seconds that a server with a pending request may be completely silent, health checks included, before it is "
        "ended and replaced",
        default=120.0,
        validator=above(0),
    )
    preload: bool = option(
        "import SGLang in the processes of its ranks while its server imports it; false: SGLang starts them after that",
        default=True,
    )
    launcher: str = option(
        "module that starts the server, run with -m; your own may register a model before it calls "
        "corerl_sglang.launch.main",
        default=LAUNCHER,
    )
    server: Mapping[str, Any] = option(
        "further arguments of SGLang's server, by the names of its ServerArgs: {chunked_prefill_size = 8192}; those "
        "that the options above or other tables control are rejected",
        factory=dict,
    )
