"""The SGLang-specific options of an engine; everything common is in [rollout]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from corerl.config.schema import above, at_least, between, option

# Concurrent `generate` calls: SGLang batches them itself, so many small ones cost nothing.
CALLS = 16


@frozen(kw_only=True)
class SglangConfig:
    tensor_parallel: int = option(
        "devices, of one machine, that each replica's model is split over", default=1, validator=at_least(1)
    )
    data_parallel: int = option(
        "parts into which these devices are divided for attention, each with requests of its own (SGLang's DP "
        "attention); whole copies of the model are rollout.replicas",
        default=1,
        validator=at_least(1),
    )
    expert_parallel: int = option(
        "parts into which these devices are divided for experts, each with experts of its own",
        default=1,
        validator=at_least(1),
    )
    memory: float = option(
        "share of each device's memory for weights and KV cache; 0 leaves it to SGLang, which takes most of it",
        default=0.0,
        validator=between(0, 1),
    )
    attention_backend: str = option("fa3, flashinfer, triton, ...; empty leaves it to SGLang", default="")
    deterministic: bool = option(
        "what is drawn for a sample is a function of its noise key, its tokens and the weights, whatever it is batched "
        "with; slower",
        default=False,
    )
    routed_experts: bool = option(
        "tell through which experts each token went, for algorithm.routing_replay = 'engine'", default=False
    )
    requests: int = option(
        "requests that a rollout step is divided into; all are sent at once", default=8, validator=at_least(1)
    )
    start_timeout: float = option("seconds that a server has to start", default=900.0, validator=above(0))
    health_timeout: float = option(
        "seconds in which a server that owes an answer may say nothing at all, not even that it is there, before it is "
        "ended and replaced",
        default=120.0,
        validator=above(0),
    )
    launcher: str = option(
        "the module that starts the server, run with -m: one of your own may register a model before it calls "
        "corerl_sglang.launch.main",
        default="corerl_sglang.launch",
    )
    server: Mapping[str, Any] = option(
        "more arguments of SGLang's server, by the names of its ServerArgs: {chunked_prefill_size = 8192}; what the "
        "options above or other tables say is refused",
        factory=dict,
    )
