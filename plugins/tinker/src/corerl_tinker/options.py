"""The table `[serve]` of a server's config."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

from corerl.config import above, at_least, between, finite, option


@frozen(kw_only=True)
class ServeOptions:
    name: str = option(
        "what clients call the model, such as Qwen/Qwen3-8B-Base: by this name they also choose its tokenizer and chat "
        "format; empty: model.path",
        default="",
    )
    aliases: tuple[str, ...] = option("further names of the same model", factory=tuple)
    address: str = option(
        "address on which to listen; one that other machines reach needs a key in TINKER_API_KEY",
        default="127.0.0.1",
    )
    port: int = option("port on which to listen; 0: any that is free", default=8420, validator=between(0, 65535))
    hosts: tuple[str, ...] = option(
        "names by which clients reach this machine; requests to any other name but localhost, such as those of a web "
        "page, are refused",
        factory=tuple,
    )
    directory: str = option("directory of the checkpoints that clients save", default="checkpoints")
    idle_minutes: float = option(
        "minutes after which a session without heartbeat has ended and its model is given up",
        default=5.0,
        validator=[above(0), finite],
    )
    snapshots: int | None = option(
        "copies of earlier weights that ranks keep in host memory, for samplers that are asked for log-probs of "
        "prompts, such as a reference policy; none: 8 of adapters, 1 of whole weights. The weights at the start are "
        "kept besides, once a client wants them",
        default=None,
        validator=at_least(1),
    )
    teachers: Mapping[str, str] = option(
        "directories of frozen models, of the architecture and with the tokenizer of the trained one, by the names "
        "that clients call them; they are asked for log-probs of prompts (compute_logprobs), or sampled from. Each "
        "takes host memory, and all weights have to be trained",
        factory=dict,
    )
    memory_mib: int = option(
        "memory for requests that wait and for results until they are fetched, in MiB; above it clients wait, and "
        "results that were fetched before are forgotten",
        default=4096,
        validator=at_least(256),
    )
