"""Turn a server's answers to `/generate` into a `Generation`."""

from __future__ import annotations

import base64
import contextlib
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
from attrs import evolve, frozen

from corerl.engines import GenerateRequest, Generation, OnFinished, PromptScores, SamplingParams, ignore
from corerl.errors import EngineFailed
from corerl.models import routers
from corerl.types import Array, offsets_of
from corerl_sglang.pictures import shown
from corerl_sglang.server import Refused

IN_QUEUE = "Abort in waiting queue"  # SGLang's word (0.5.15 to 0.5.17)
LAYER = re.compile(r"\.layers\.(\d+)\.")


# ---- the parts of an answer that we read: a list with one `Sample` per row ------------------------------------------


# Untracked by Python's garbage collector: tens of thousands are created at once, while the rollout waits, and would
# trigger collections of the whole process, which take longer than parsing the answer.
class Token(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """SGLang sends [log-prob, id, text]; the text is ignored, since it is null."""

    logprob: float | None  # None if not finite, which JSON cannot express
    id: int


class MetaInfo(msgspec.Struct, frozen=True, kw_only=True):
    finish_reason: dict[str, Any] | None  # None while more is to come
    weight_version: str
    completion_tokens: int = 0  # so far
    output_token_logprobs: list[Token] = []
    input_token_logprobs: list[Token] = []  # the first has none
    input_top_logprobs_val_flat_b64: str = ""  # base64 of float32 [all of these but the first, k]
    input_top_logprobs_idx_flat_b64: str = ""  # base64 of int32
    routed_experts: str | None = None  # base64 of int32
    num_retractions: int = 0  # how often the row lost its place in the KV cache, and was read again


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    output_ids: list[int]
    prompt_token_ids: list[int] | None = None  # if asked for, with the placeholders of pictures expanded
    meta_info: MetaInfo


read_samples = msgspec.json.Decoder(list[Sample]).decode


class Event(msgspec.Struct, frozen=True):
    """Of an answer that comes as it is made: a part of one row's sample, or why there is none."""

    output_ids: list[int] = []
    index: int = 0  # of the row
    prompt_token_ids: list[int] | None = None
    meta_info: MetaInfo | None = None
    error: dict[str, Any] = {}


read_event = msgspec.json.Decoder(Event).decode


# ---- what is made of it ----------------------------------------------------------------------------------------------


class Cut(EngineFailed):
    """The server aborted a row on request, although the engine was not paused."""


class Parts:
    """The samples of a request, as their parts come."""

    def __init__(self, engine: str, rows: int) -> None:
        self._engine = engine
        self._tokens: list[list[int]] = [[] for _ in range(rows)]
        self._logprobs: list[list[Token]] = [[] for _ in range(rows)]
        self._last: dict[int, Event] = {}

    def take(self, data: bytes) -> tuple[int, list[int], bool]:
        """The row, its new tokens, and whether it goes on. Raises Refused for a request that the server does not answer
        and EngineFailed for what is no part of an answer."""
        with parsing(self._engine):
            event = read_event(data)
        info = event.meta_info
        if info is None:
            raise Refused(f"{self._engine}: its server refused /generate: {event.error.get('message', data.decode())}")
        tokens = self._tokens[event.index]
        # Of a row that is aborted while it waits to be read again, SGLang (0.5.17) sends the last token twice.
        new = info.completion_tokens - len(tokens)
        tokens += event.output_ids[len(event.output_ids) - new :]
        self._logprobs[event.index] += info.output_token_logprobs[len(info.output_token_logprobs) - new :]
        self._last[event.index] = event
        return event.index, tokens[len(tokens) - new :], info.finish_reason is None

    def samples(self) -> list[Sample]:
        """All, once they have ended."""
        found = []
        for row, (tokens, logprobs) in enumerate(zip(self._tokens, self._logprobs, strict=True)):
            last = self._last.get(row)
            if last is None or last.meta_info is None or last.meta_info.finish_reason is None:
                rows = len(self._tokens)
                raise EngineFailed(f"{self._engine}: its server's answer ends before row {row} of {rows} has ended")
            info = msgspec.structs.replace(last.meta_info, output_token_logprobs=logprobs)
            found.append(Sample(output_ids=tokens, prompt_token_ids=last.prompt_token_ids, meta_info=info))
        return found


@contextlib.contextmanager
def parsing(engine: str) -> Iterator[None]:
    """Raise EngineFailed for an answer that cannot be parsed within the context."""
    try:
        yield
    except msgspec.DecodeError as error:
        raise EngineFailed(
            f"{engine}: cannot read its server's answer to /generate: {error}; use SGLang 0.5.15 or later"
        ) from error


@frozen(kw_only=True)
class Experts:
    """A model's mixture-of-experts layers."""

    layers: int  # all of the model's, with or without experts
    choosing: Sequence[int]  # indices of the layers with experts
    chosen: int  # experts per token, in each of these

    @classmethod
    def of(cls, model: Any) -> Experts:
        """Derived from a transformers model."""
        config = model.config.get_text_config()
        found = {id(router) for router in routers(model)}
        names = [name for name, module in model.named_modules() if id(module) in found]
        return cls(
            layers=config.num_hidden_layers,
            choosing=[int(LAYER.search(name)[1]) for name in names],  # type: ignore[index]
            chosen=getattr(config, "num_experts_per_tok", 0),
        )

    def unknown(self, tokens: int) -> Array:
        """[tokens, MoE layers, k], all -1."""
        return np.full((tokens, len(self.choosing), self.chosen), -1, dtype=np.int16)

    def read(self, encoded: str, tokens: int) -> Array:
        """[tokens, MoE layers, k] of one row. SGLang reports all layers, and nothing for the last token."""
        known = np.frombuffer(base64.b64decode(encoded), dtype=np.int32)
        layers = known.reshape(tokens - 1, self.layers, -1)[:, self.choosing].astype(np.int16)
        return np.concatenate([layers, self.unknown(1)])


@frozen(kw_only=True)
class Reader:
    engine: str
    experts: Experts
    pictures: str = ""  # model.pictures

    def samples(self, answer: bytes) -> list[Sample]:
        """Those of a whole request; EngineFailed if they cannot be read."""
        with parsing(self.engine):
            return read_samples(answer)

    def generation(
        self,
        samples: Sequence[Sample],
        request: GenerateRequest,
        version: int,
        *,
        cut: Collection[int] = (),
        on_retracted: OnFinished = ignore,
    ) -> Generation:
        """What the samples of a whole request are, some of whose rows may have been `cut`. `on_retracted` is called
        with how often rows lost their place in the KV cache.

        Raises EngineFailed if they do not fit the request: a row ended early, tokens of other weights than `version`,
        no experts.
        """
        on_retracted(sum(sample.meta_info.num_retractions for sample in samples))
        tokens, logprobs, routed, scores = [], [], [], []
        rows = zip(request.by_row(), request.left, samples, strict=True)
        for row, (prompt, left, sample) in enumerate(rows):
            if request.pictures and sample.output_ids:
                self._require_same(sample.prompt_token_ids, request, row)
            sampled, own = self._row(sample, request.params, int(left), version, may_be_cut=row in cut)
            if (unknown := np.flatnonzero(np.isnan(own))).size:
                raise EngineFailed(
                    f"{self.engine}: its server returned a non-finite log-prob for token {unknown[0]} of {len(own)} "
                    f"in row {row} of {len(samples)} (noise key {request.noise_keys[row]}); check that the weights are "
                    "finite, and that the engine's precision suffices for the model"
                )
            tokens.append(sampled)
            logprobs.append(own)
            if request.params.scored:
                scores.append(self._scores(sample, len(prompt), request.params))
            if request.params.routed_experts:
                goes_on = len(sampled) < left and not _stopped(sample, request.params)
                routed.append(self._routes(sample, len(prompt) + len(sampled), goes_on=goes_on))
        sizes = np.array([len(row) for row in tokens])
        stopped = np.array([_stopped(sample, request.params) for sample in samples])
        return Generation(
            tokens=np.concatenate(tokens),
            offsets=offsets_of(sizes),
            logprobs=np.concatenate(logprobs),
            versions=np.full(sizes.sum(), version, dtype=np.int64),
            # Not SGLang's reason, which is "length" for a stop token in last place.
            truncated=~stopped & (sizes == request.left),
            routed_experts=np.concatenate(routed) if routed else None,
            scores=PromptScores.concatenate(scores) if scores else None,
            unfinished=~stopped & (sizes < request.left),
        )

    def nothing(self, request: GenerateRequest) -> Generation:
        """An empty, unfinished generation, with unknown experts if they are requested."""
        unknown = self.experts.unknown(len(request.tokens)) if request.params.routed_experts else None
        return evolve(Generation.nothing(request), routed_experts=unknown)

    def _row(
        self, sample: Sample, params: SamplingParams, left: int, version: int, *, may_be_cut: bool
    ) -> tuple[Array, Array]:
        """Tokens [m] and log-probs [m] of one row, of at most `left` tokens; of a cut row, those sampled so far."""
        info, tokens = sample.meta_info, sample.output_ids
        reason, stopped = info.finish_reason or {"type": ""}, _stopped(sample, params)
        cut = reason["type"] == "abort" and may_be_cut
        ended = bool(tokens) and (reason["type"] == "length" or (reason["type"] == "stop" and stopped))
        if not (cut or ended):
            failure = Cut if reason["type"] == "abort" else EngineFailed
            raise failure(f"{self.engine}: its server ended a sample after {len(tokens)} tokens: {reason}")
        if not cut and not stopped and len(tokens) < left:
            raise EngineFailed(
                f"{self.engine}: its server ended a sample after {len(tokens)} of {left} tokens: its KV cache or "
                "context is full; raise engines.sglang.memory or server.max_total_tokens, or lower "
                "rollout.max_tokens"
            )
        if info.weight_version != str(version):
            raise EngineFailed(
                f"{self.engine}: its server sampled from weights {info.weight_version!r}, wanted {version}; something "
                "other than CoreRL has changed them"
            )
        if [token.id for token in info.output_token_logprobs] != tokens:
            raise EngineFailed(f"{self.engine}: its server returned log-probs of other tokens than it sampled")
        logprobs = [token.logprob for token in info.output_token_logprobs]
        return np.array(tokens, dtype=np.int64), np.array(logprobs, dtype=np.float32)

    def _scores(self, sample: Sample, length: int, params: SamplingParams) -> PromptScores:
        """Of one prompt; unknown if the row was cut before it was read."""
        found, info = PromptScores.unknown(length, params), sample.meta_info
        given = [token.logprob for token in info.input_token_logprobs][1:]
        values, tokens = (
            np.frombuffer(base64.b64decode(text), dtype)
            for text, dtype in (
                (info.input_top_logprobs_val_flat_b64, np.float32),
                (info.input_top_logprobs_idx_flat_b64, np.int32),
            )
        )
        count, k = min(params.scored, length - 1), params.scored_top
        if not sample.output_ids or not count:
            return found
        if len(given) != count or None in given or not len(values) == len(tokens) == count * k:
            raise EngineFailed(
                f"{self.engine}: its server returned log-probs of {len(given)} tokens of a prompt of {length}, and "
                f"{len(values)} of likely ones, wanted {count} and {count * k}; use SGLang 0.5.17 or later, and check "
                "that the weights are finite"
            )
        found.logprobs[-count:] = given
        found.top_logprobs[-count:] = values.reshape(count, k)
        found.top_tokens[-count:] = tokens.reshape(count, k)
        return found

    def _require_same(self, read: list[int] | None, request: GenerateRequest, row: int) -> None:
        """Raise EngineFailed unless the server has sampled after the tokens of the row, pictures expanded."""
        wanted = request.by_row()[row]
        if read is None:
            raise EngineFailed(
                f"{self.engine}: its server does not report the tokens of prompts with pictures; use SGLang 0.5.17 or "
                "later"
            )
        if read == wanted.tolist():
            return
        pictures = [request.pictures[number - 1] for number in shown(request.picture_by_row()[row])]
        at = next((at for at, pair in enumerate(zip(read, wanted, strict=False)) if pair[0] != pair[1]), len(read))
        raise EngineFailed(
            f"{self.engine}: its server reads {len(read)} tokens in the row of noise key {request.noise_keys[row]}, "
            f"wanted {len(wanted)}; they differ from token {at} on: "
            f"{read[at : at + 4]}, wanted {wanted[at : at + 4].tolist()}. It expands {', '.join(map(str, pictures))} "
            f"otherwise than [pictures.{self.pictures}], or has tokenized the text again: its log says so. The files "
            "of the processor in model.path must be those of the model, limits of pictures must lie within theirs, and "
            "engines.sglang.server.mm_process_config, if set, must agree with them; else use "
            "rollout.engine='transformers'"
        )

    def _routes(self, sample: Sample, length: int, *, goes_on: bool) -> Array:
        """[length, MoE layers, k] of one row."""
        reported = sample.meta_info.routed_experts
        # A row cut before its first token: SGLang reports experts for only a part of the prompt.
        if goes_on and (reported is None or not sample.output_ids):
            return self.experts.unknown(length)
        if reported is None:
            raise EngineFailed(f"{self.engine}: its server did not report which experts the tokens went through")
        return self.experts.read(reported, length)


def _stopped(sample: Sample, params: SamplingParams) -> bool:
    return bool(sample.output_ids) and sample.output_ids[-1] in params.stop_tokens


def waited(sample: Sample) -> bool:
    """Whether a row was aborted while it waited to be read, or read again."""
    return (sample.meta_info.finish_reason or {}).get("message") == IN_QUEUE
