"""Draw G samples for each of P prompts, and lay them out as one ragged batch with what training asks of them."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import numpy as np
from attrs import field, frozen

from corerl.config.schema import RolloutConfig
from corerl.data.prompts import Prompt
from corerl.errors import ConfigError, EngineFailed
from corerl.ops.noise import hash_keys
from corerl.rollout.encoding import encode
from corerl.rollout.engine import GenerateRequest, Generation, SamplingParams
from corerl.types import Array, IntArray, Output, SampleBatch, offsets_of, rows_at

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from corerl.rollout.rewards import Failure


@frozen(kw_only=True)
class Rollout:
    """The samples of one rollout step, B = P * G, those of one prompt side by side.

    The batch has the columns `loss_mask`, `rollout_logprobs`, `versions`, from an engine that tells them
    `routed_experts`, and the rows `group` (index into `prompts`),
    `sample` (0 to G - 1), `prompt_length`, `response_length` (both in tokens) and `truncated`. Where samples are
    episodes their response is all that follows the first prompt, the environment's tokens among it, and there is the
    row `turns` too.
    """

    batch: SampleBatch
    prompts: tuple[Prompt, ...]  # [P]
    texts: list[str]  # [B] responses without special tokens; the last one of an episode
    # [B] of episodes: what each is worth by its own function, why it has failed, or None: to be scored as any sample.
    outcomes: Sequence[float | Failure | None] = field(factory=list)

    def take(self, groups: IntArray) -> Rollout:
        """The samples of these prompts [n] alone, numbered anew."""
        of_prompt = self.batch.rows["group"]
        samples = np.concatenate([np.flatnonzero(of_prompt == group) for group in groups] or [np.zeros(0, np.int64)])
        batch = self.batch.take(samples)
        position = {int(group): index for index, group in enumerate(groups)}
        return Rollout(
            batch=batch.with_rows(group=np.array([position[int(group)] for group in batch.rows["group"]], np.int64)),
            prompts=tuple(self.prompts[group] for group in groups),
            texts=[self.texts[sample] for sample in samples],
            outcomes=[self.outcomes[sample] for sample in samples] if self.outcomes else [],
        )

    @classmethod
    def concatenate(cls, parts: Sequence[Rollout]) -> Rollout:
        """The prompts of several rollouts, one after the other."""
        firsts = offsets_of([len(part.prompts) for part in parts])
        group = [part.batch.rows["group"] + first for part, first in zip(parts, firsts, strict=False)]
        batches = _with_experts([part.batch for part in parts])
        return cls(
            batch=SampleBatch.concatenate(batches).with_rows(group=np.concatenate(group)),
            prompts=tuple(prompt for part in parts for prompt in part.prompts),
            texts=[text for part in parts for text in part.texts],
            outcomes=[outcome for part in parts for outcome in part.outcomes],
        )


@frozen(kw_only=True, eq=False)
class Errand:
    """The samples of one prompt, for who has engines asked and does not wait for these alone. None of what is called
    here waits."""

    number: int  # lower ones were begun before
    prompt: Prompt
    request: GenerateRequest  # of all samples, as they begin
    # Has rows drawn, and then calls, in any thread, with all that was drawn for them.
    ask: Callable[[GenerateRequest, Callable[[Generation], None]], None]
    done: Callable[[Callable[[], Rollout]], None]  # once, with what makes the rollout


class Background(Protocol):
    """Draws the samples of prompts while nobody waits for them."""

    def begin(self, errand: Errand) -> None: ...

    def give_up(self, number: int) -> None:
        """What is drawn for this errand is not wanted any more; also where it is done, or was never begun."""

    def attend(self, ending: Callable[[], bool]) -> None:
        """Work in a thread of its own, until `ending`, which is asked at each change of the state that is shared."""


class Singles:
    """Samples that are one response each: all that is to be drawn for a prompt is known at once."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def begin(self, errand: Errand) -> None:
        def drawn(generation: Generation) -> None:
            errand.done(functools.partial(self._sampler.rollout, [errand.prompt], errand.request, generation))

        errand.ask(errand.request, drawn)

    def give_up(self, number: int) -> None:
        pass

    def attend(self, ending: Callable[[], bool]) -> None:
        pass


class Sampler:
    """Turns prompts into samples with whatever generates; holds no state but the seed."""

    def __init__(
        self,
        *,
        tokenizer: PreTrainedTokenizerBase,
        generate: Callable[[GenerateRequest], Generation],
        seed: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._generate = generate
        self._seed = seed

    def sample(
        self, prompts: Sequence[Prompt], *, rollout_step: int, samples: int, params: SamplingParams, attempt: int = 0
    ) -> Rollout:
        """`samples` responses to each prompt. What is drawn depends on the weights, the seed and `rollout_step`, on the
        prompt and on the sample's number; a later `attempt` at the same step draws anew. Prompts are encoded with the
        tokenizer's own special tokens (its <bos>).

        Raises DataError for a prompt of no tokens, EngineFailed for a response that is unfinished, and what `generate`
        raises.
        """
        request = self.request(prompts, rollout_step=rollout_step, samples=samples, params=params, attempt=attempt)
        return self.rollout(prompts, request, self._generate(request))

    def background(self, params: SamplingParams, state: threading.Condition) -> Background:
        """Draws the same without waiting. What it shares with others changes under `state`, and they are told."""
        return Singles(self)

    def request(
        self, prompts: Sequence[Prompt], *, rollout_step: int, samples: int, params: SamplingParams, attempt: int = 0
    ) -> GenerateRequest:
        """What `sample` asks for."""
        tokens, offsets = self._encode(prompts)
        group, sample = rows_of(len(prompts), samples)
        repeated, rows = rows_at(offsets, group)
        return GenerateRequest(
            tokens=tokens[repeated],
            offsets=rows,
            # A prompt that comes twice in one step (a data set smaller than the step) must not draw the same twice.
            noise_keys=hash_keys(
                self._seed,
                rollout_step,
                np.array([prompt.index for prompt in prompts])[group],
                (attempt * len(prompts) + _occurrence(prompts)[group]) * samples + sample,
            ),
            params=params,
        )

    def rollout(self, prompts: Sequence[Prompt], request: GenerateRequest, generation: Generation) -> Rollout:
        """What `sample` makes of the answer to `request`."""
        require_finished(generation)
        group, sample = rows_of(len(prompts), len(request) // len(prompts))
        batch = assemble(request, generation).with_rows(group=group, sample=sample)
        stops = np.isin(generation.tokens, request.params.stop_tokens)
        said = [
            generation.tokens[begin : end - int(end > begin and stops[end - 1])]
            for begin, end in pairwise(generation.offsets.tolist())
        ]
        return Rollout(
            batch=batch,
            prompts=tuple(prompts),
            # Without the token that ended each, which may be none of the special ones: it is no part of an answer.
            # Arrays, which its annotation leaves out: of a list transformers looks at each token.
            texts=self._tokenizer.batch_decode(said, skip_special_tokens=True),  # type: ignore[arg-type]
        )

    def _encode(self, prompts: Sequence[Prompt]) -> tuple[IntArray, IntArray]:
        """Prompts as ragged tokens [n] and offsets [P + 1]."""
        encoded = encode(self._tokenizer, prompts)
        tokens = np.concatenate([np.asarray(ids, dtype=np.int64) for ids in encoded])
        return tokens, offsets_of([len(ids) for ids in encoded])


def sampling_params(rollout: RolloutConfig, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int]) -> SamplingParams:
    """The config's sampling, its stop texts as token ids after `ends`, which are the model's own.

    Raises ConfigError where a stop text is not exactly one token.
    """
    stops = list(ends)
    for text in rollout.stop:
        try:
            stops.append(stop_token(text, tokenizer))
        except ValueError as error:
            raise ConfigError(f"rollout.stop: {error}") from error
    return SamplingParams(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        max_tokens=rollout.max_tokens,
        stop_tokens=tuple(dict.fromkeys(stops)),
    )


def require_finished(generation: Generation) -> None:
    """Raises EngineFailed for responses that nobody had asked to interrupt."""
    if generation.unfinished.any():
        raise EngineFailed(
            f"{int(generation.unfinished.sum())} of {len(generation)} responses came back unfinished, and nobody "
            "had paused the engines; an engine may do so only between pause() and resume()"
        )


def stop_token(text: str, tokenizer: PreTrainedTokenizerBase) -> int:
    """Raises ValueError where the text is not exactly one token."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) != 1 or ids[0] == tokenizer.unk_token_id:
        raise ValueError(
            f"{text!r} is {len(ids)} tokens of this tokenizer ({tokenizer.convert_ids_to_tokens(ids)}), wanted exactly "
            "one that it knows"
        )
    return int(ids[0])


def assemble(request: GenerateRequest, generation: Generation) -> SampleBatch:
    """Prompts and responses interleaved into samples; what the engine recorded stands at the response's tokens."""
    prompt_length, response_length = np.diff(request.offsets), np.diff(generation.offsets)
    lengths = prompt_length + response_length
    offsets = offsets_of(lengths)
    within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    loss_mask = within >= np.repeat(prompt_length, lengths)
    tokens = np.empty(len(loss_mask), dtype=np.int64)
    tokens[~loss_mask] = request.tokens
    tokens[loss_mask] = generation.tokens
    rollout_logprobs = np.zeros(len(tokens), dtype=np.float32)
    rollout_logprobs[loss_mask] = generation.logprobs
    versions = np.zeros(len(tokens), dtype=np.int64)
    versions[loss_mask] = generation.versions
    columns: dict[str, Array] = {"loss_mask": loss_mask, "rollout_logprobs": rollout_logprobs, "versions": versions}
    if generation.routed_experts is not None:
        columns[Output.ROUTED_EXPERTS.value] = generation.routed_experts
    return SampleBatch(
        tokens=tokens,
        offsets=offsets,
        columns=columns,
        rows={
            "prompt_length": prompt_length,
            "response_length": response_length,
            "truncated": generation.truncated,
        },
        temperature=request.params.temperature,
    )


def _with_experts(batches: Sequence[SampleBatch]) -> Sequence[SampleBatch]:
    """Where some of them tell experts all do: -1, which is none, where episodes had nothing drawn for them."""
    name = Output.ROUTED_EXPERTS.value
    told = next((batch.columns[name] for batch in batches if name in batch.columns), None)
    if told is None:
        return batches
    return [
        batch
        if name in batch.columns
        else batch.with_columns(**{name: np.full((len(batch.tokens), *told.shape[1:]), -1, told.dtype)})
        for batch in batches
    ]


def rows_of(prompts: int, samples: int) -> tuple[IntArray, IntArray]:
    """[R] of which prompt each row is, and which sample of it."""
    return np.repeat(np.arange(prompts), samples), np.tile(np.arange(samples), prompts)


def _occurrence(prompts: Sequence[Prompt]) -> IntArray:
    """[P] how many times each prompt came before in this step."""
    seen: dict[int, int] = {}
    counts = []
    for prompt in prompts:
        counts.append(seen.get(prompt.index, 0))
        seen[prompt.index] = counts[-1] + 1
    return np.array(counts, dtype=np.int64)
