"""Generate G samples for each of P prompts, and lay them out as one ragged batch for training: what a sampler is, and
the one that comes with CoreRL, whose samples are single responses."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from attrs import evolve, field, frozen

from corerl.config.schema import RolloutConfig
from corerl.data.files import Refused
from corerl.data.prompts import Prompt
from corerl.engines.base import CacheUse, GenerateRequest, Generation, SamplingParams
from corerl.engines.stops import Stops, stops_of
from corerl.errors import ConfigError, DataError, PluginBroken
from corerl.event_loop import EventLoop
from corerl.ops.noise import hash_keys
from corerl.pictures import Picture, PictureReader, read
from corerl.rollout.encoding import Openings, encode, expand
from corerl.types import PICTURE, Array, IntArray, OnProgress, Output, SampleBatch, all_shown, offsets_of, rows_at

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from corerl.rollout.rewards import Outcome


@frozen(kw_only=True)
class Rollout:
    """The samples of one rollout step: B = P * G rows, those of one prompt adjacent.

    The batch has the columns `loss_mask`, `rollout_logprobs`, `versions`, `engines` and, if the engine reports them,
    `routed_experts`; and the row columns `group` (index into `prompts`), `sample` (0 to G - 1), `prompt_length`,
    `response_length` (both in tokens, the latter of sampled ones) and `truncated`.

    A sample is one row; or, if it is an episode, several rows, one for each of its conversations, with the same `group`
    and `sample`: then B >= P * G. The response is everything after the first prompt, including the environment's
    tokens, `span` in all. There are the row columns `episode` (0 to P * G - 1), `turns` (answers with loss tokens) and
    `final` (whether the last answer is the episode's) too; `response_length` counts loss tokens. The column
    `turn_rewards` has, at the last token of each answer, its reward, if there is one for each. Where several roles play
    an episode, the row column `role` [B] has their names, and each role has a number `episode` and a reward of its own.
    """

    batch: SampleBatch
    prompts: tuple[Prompt, ...]  # [P]
    # [B] responses, without special tokens unless reward.special_tokens, each behind the reasoning tag that the chat
    # template opens for it; of a conversation, the last answer
    texts: list[str]
    # [B] of samples that bring a reward: the reward, the Failure to get one, or None for a sample that `reward.name`
    # is to score; equal for all rows of a sample. Empty: `reward.name` scores all samples.
    outcomes: Sequence[float | Outcome | None] = field(factory=list)

    def prompt_rows(self, groups: IntArray) -> IntArray:
        """The rows of the samples of these prompts [n], those of the first one first."""
        found = [np.flatnonzero(self.batch.row_columns["group"] == group) for group in groups]
        return np.concatenate([np.zeros(0, np.int64), *found])

    def take_rows(self, rows: IntArray) -> Rollout:
        """Only these rows, in this order, with the same prompts."""
        return evolve(
            self,
            batch=self.batch.take_rows(rows),
            texts=[self.texts[row] for row in rows],
            outcomes=[self.outcomes[row] for row in rows] if self.outcomes else [],
        )

    def take_prompts(self, groups: IntArray) -> Rollout:
        """Only the samples of these prompts [n], renumbered."""
        taken = self.take_rows(self.prompt_rows(groups))
        number = np.zeros(len(self.prompts), np.int64)
        number[groups] = np.arange(len(groups))
        return evolve(
            taken,
            batch=taken.batch.with_row_columns(group=number[taken.batch.row_columns["group"]]),
            prompts=tuple(self.prompts[group] for group in groups),
        )

    @classmethod
    def concatenate(cls, parts: Sequence[Rollout]) -> Rollout:
        """Concatenate rollouts, renumbering their groups and episodes. Raises PluginBroken if their columns differ."""
        if len(parts) == 1:  # nothing is copied
            return parts[0]
        batches = _with_experts([part.batch for part in parts])
        _require_same_columns(batches)
        batch = SampleBatch.concatenate(batches)
        numbers = {"group": [len(part.prompts) for part in parts]}
        if "episode" in batch.row_columns:
            numbers["episode"] = [int(part.batch.row_columns["episode"].max(initial=-1)) + 1 for part in parts]
        lengths = [len(part.batch) for part in parts]
        firsts = {name: np.repeat(offsets_of(counts)[:-1], lengths) for name, counts in numbers.items()}
        return cls(
            batch=batch.with_row_columns(**{name: batch.row_columns[name] + first for name, first in firsts.items()}),
            prompts=tuple(prompt for part in parts for prompt in part.prompts),
            texts=[text for part in parts for text in part.texts],
            outcomes=[outcome for part in parts for outcome in part.outcomes or [None] * len(part.batch)],
        )


class Generate(Protocol):
    """Have the run's engines complete the rows of a request."""

    def __call__(
        self,
        request: GenerateRequest,
        *,
        urgent: bool = False,
        on_progress: OnProgress | None = None,
        on_tokens: Callable[[Generation], None] | None = None,
    ) -> Awaitable[Generation]: ...


@frozen(kw_only=True, eq=False)
class SamplerContext:
    """What a run gives its sampler."""

    tokenizer: PreTrainedTokenizerBase
    generate: Generate  # has the run's engines sample, with the newest weights that they hold
    loop: EventLoop  # runs the sampler's coroutines
    seed: int
    params: SamplingParams  # of samples that are trained on; those of evaluation have others
    template_options: Mapping[str, Any] = field(factory=dict)  # arguments of the tokenizer's chat template
    special_tokens: bool = False  # keep them in texts
    context_length: int = 0  # maximum tokens of a row; 0: unlimited
    pictures: PictureReader | None = None  # None: prompts have none
    calls: int = 1  # of `generate` that each engine answers at once
    # How full the caches are of the engines that serve, by name, but for those that cannot say; None outside a run.
    cache_use: Callable[[], Awaitable[Mapping[str, CacheUse]]] | None = None
    environment: Mapping[str, str] = field(factory=dict, repr=False)  # of processes elsewhere; may hold secrets
    # Is called with how many of the samples that the run waits for are done, and how many there are.
    on_progress: OnProgress | None = None


class Sampler(ABC):
    """Turns prompts into samples. A run makes one in its driver, with the options of its table; `generate` runs in the
    event loop of the engines, for as many batches side by side as the run's source asks for."""

    def __init__(self, options: Any, context: SamplerContext) -> None:
        """Raises UserError if the options cannot be used here."""
        self.options, self.context = options, context

    @abstractmethod
    async def generate(
        self,
        prompts: Sequence[Prompt],
        request: GenerateRequest,
        *,
        background: bool = False,
        on_tokens: Callable[[Generation], None] | None = None,
    ) -> Rollout:
        """Sample what `request` asks for: R = P * G rows, those of one prompt adjacent, each with the noise key of its
        sample. With `background`, requests that a step waits for overtake this one, and it reports no progress.
        `on_tokens` gets all that is generated, piece by piece. Cancelled when the run ends, or drops these prompts."""

    def close(self) -> None:  # noqa: B027  -- most hold nothing
        """Release what the sampler holds: nothing is asked of it any more. May be called twice."""

    async def sample(
        self, prompts: Sequence[Prompt], *, rollout_step: int, samples: int, params: SamplingParams
    ) -> Rollout:
        """Sample `samples` responses to each prompt. They depend on the weights, the seed, `rollout_step`, the prompt
        and the sample's number.

        Raises DataError for a prompt without tokens, EngineFailed for an unfinished response, and what `generate`
        raises.
        """
        request = self.request(prompts, rollout_step=rollout_step, samples=samples, params=params)
        return await self.checked_generate(prompts, request, background=False)

    async def checked_generate(
        self,
        prompts: Sequence[Prompt],
        request: GenerateRequest,
        *,
        background: bool,
        on_tokens: Callable[[Generation], None] | None = None,
    ) -> Rollout:
        """Call `generate`, and raise PluginBroken if it returns no rollout of these prompts and this request."""
        rollout = await self.generate(prompts, request, background=background, on_tokens=on_tokens)
        name = f"{type(self).__module__}.{type(self).__qualname__}"
        if not isinstance(rollout, Rollout):
            raise PluginBroken(f"{name}.generate returned {type(rollout).__name__}, wanted a corerl.rollout.Rollout")
        rows = rollout.batch.row_columns
        found = len(set(zip(rows["group"].tolist(), rows["sample"].tolist(), strict=True)))
        got = found, len(rollout.prompts), rollout.batch.temperature
        wanted = len(request), len(prompts), request.params.temperature
        if got != wanted:
            texts = ["{} samples of {} prompts at temperature {:g}".format(*each) for each in (got, wanted)]
            raise PluginBroken(f"{name}.generate returned {texts[0]}, wanted {texts[1]}")
        if len(rollout.outcomes) not in (0, len(rollout.batch)):
            raise PluginBroken(
                f"{name}.generate returned {len(rollout.outcomes)} outcomes of {len(rollout.batch)} rows, wanted one "
                "for each row; give None to a row that reward.name is to score"
            )
        return rollout

    def request(
        self, prompts: Sequence[Prompt], *, rollout_step: int, samples: int, params: SamplingParams, noise_salt: int = 0
    ) -> GenerateRequest:
        """The request that `sample` sends. With another `noise_salt` the same prompts of the same step get other
        samples."""
        shown = [_pictures(prompt) for prompt in prompts]
        ids = encode(self.context.tokenizer, prompts, self.context.template_options)
        encoded = [expand(each, own, self.context.pictures) for each, own in zip(ids, shown, strict=True)]
        tokens = np.concatenate([each for each, _ in encoded])
        offsets = offsets_of([len(each) for each, _ in encoded])
        column, pictures = all_shown([(column, own) for (_, column), own in zip(encoded, shown, strict=True)])
        group, sample = rows_of(len(prompts), samples)
        repeated, rows = rows_at(offsets, group)
        seen: defaultdict[int, itertools.count[int]] = defaultdict(itertools.count)
        before = np.array([next(seen[prompt.index]) for prompt in prompts], dtype=np.int64)  # [P] of this step
        return GenerateRequest(
            tokens=tokens[repeated],
            offsets=rows,
            # A prompt that occurs twice in a step (of a small data set) must not get the same samples twice.
            noise_keys=hash_keys(
                self.context.seed,
                rollout_step,
                np.array([prompt.index for prompt in prompts])[group],
                (noise_salt * len(prompts) + before[group]) * samples + sample,
            ),
            params=params,
            picture=column[repeated],
            pictures=pictures,
        )


def _pictures(prompt: Prompt) -> list[Picture]:
    """Raises DataError for one that cannot be read any more."""
    try:
        return [read(each) for each in prompt.pictures]
    except Refused as refused:
        raise DataError(f"prompt {prompt.index}: {refused}") from refused


class PromptSampler(Sampler):
    """Samples of one response each. A sampler that only scores them, or changes their prompts, may begin from this."""

    def __init__(self, options: Any, context: SamplerContext) -> None:
        super().__init__(options, context)
        self._openings = Openings(context.tokenizer)

    async def generate(
        self,
        prompts: Sequence[Prompt],
        request: GenerateRequest,
        *,
        background: bool = False,
        on_tokens: Callable[[Generation], None] | None = None,
    ) -> Rollout:
        progress = None if background else self.context.on_progress
        generation = await self.context.generate(
            request, urgent=not background, on_progress=progress, on_tokens=on_tokens
        )
        return self.rollout(prompts, request, generation)

    def rollout(self, prompts: Sequence[Prompt], request: GenerateRequest, generation: Generation) -> Rollout:
        """Build the rollout from the answer to `request`."""
        group, sample = rows_of(len(prompts), len(request) // len(prompts))
        batch = assemble(request, generation).with_row_columns(group=group, sample=sample)
        stops = frozenset(request.params.stop_tokens)
        said = [
            generation.tokens[begin : end - int(end > begin and int(generation.tokens[end - 1]) in stops)]
            for begin, end in itertools.pairwise(generation.offsets.tolist())
        ]
        texts = self._texts(said, request.params.stop)
        opened = self._opened(prompts, request)
        if any(opened):
            texts = [opened[index] + text for index, text in zip(group, texts, strict=True)]
        return Rollout(batch=batch, prompts=tuple(prompts), texts=texts)

    def _opened(self, prompts: Sequence[Prompt], request: GenerateRequest) -> list[str]:
        """[P] the reasoning tag that the chat template opens at the end of each prompt, as texts show it."""
        opened = []
        for prompt, tokens in zip(prompts, request.by_row()[:: len(request) // len(prompts)], strict=True):
            options = {**self.context.template_options, **prompt.template_options}
            tag = self._openings.of(tokens.tolist(), prompt.messages, tools=prompt.tools, options=options)
            opened.append(self._openings.seen(tag, special_tokens=self.context.special_tokens))
        return opened

    def _texts(self, said: Sequence[IntArray], stop: Sequence[str]) -> list[str]:
        """[R] responses as texts, without the stop token, which may not be a special one, and without a stop text: they
        are no part of the answer."""
        if stop:
            stops = Stops(self.context.tokenizer, stop)
            return [stops.text(tokens.tolist(), special_tokens=self.context.special_tokens) for tokens in said]
        skipped = not self.context.special_tokens
        return [str(self.context.tokenizer.decode(tokens, skip_special_tokens=skipped)) for tokens in said]


def sampling_params(
    rollout: RolloutConfig, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int], *, setting: str = "rollout.stop"
) -> SamplingParams:
    """The config's sampling parameters; stop tokens are `ends`, the model's own, then those of the stop texts.

    Raises ConfigError for a stop text that no response can contain.
    """
    try:
        tokens, texts = stops_of(rollout.stop, tokenizer)
    except ValueError as error:
        raise ConfigError(f"{setting}: {error}") from error
    return SamplingParams(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_tokens=rollout.max_tokens,
        stop_tokens=tuple(dict.fromkeys([*ends, *tokens])),
        stop=tuple(dict.fromkeys(texts)),
    )


def assemble(request: GenerateRequest, generation: Generation) -> SampleBatch:
    """Interleave prompts and responses into samples; the engine's columns are set at the response's tokens."""
    prompt_length, response_length = np.diff(request.offsets), np.diff(generation.offsets)
    lengths = prompt_length + response_length
    offsets = offsets_of(lengths)
    turns = np.stack([prompt_length, response_length], axis=1).ravel()
    loss_mask = np.repeat(np.tile([False, True], len(lengths)), turns)  # no integer for every token
    tokens = np.empty(len(loss_mask), dtype=np.int64)
    tokens[~loss_mask] = request.tokens
    tokens[loss_mask] = generation.tokens
    rollout_logprobs = np.zeros(len(tokens), dtype=np.float32)
    rollout_logprobs[loss_mask] = generation.logprobs
    versions, engines = np.zeros(len(tokens), dtype=np.int64), np.zeros(len(tokens), dtype=np.int16)
    versions[loss_mask], engines[loss_mask] = generation.versions, generation.engines
    columns: dict[str, Array] = {"loss_mask": loss_mask, "rollout_logprobs": rollout_logprobs, "versions": versions}
    columns["engines"] = engines
    if generation.routed_experts is not None:
        columns[Output.ROUTED_EXPERTS.value] = generation.routed_experts
    if request.pictures:
        columns[PICTURE] = np.zeros(len(tokens), dtype=np.int32)
        columns[PICTURE][~loss_mask] = request.picture
    return SampleBatch(
        tokens=tokens,
        offsets=offsets,
        columns=columns,
        row_columns={
            "prompt_length": prompt_length,
            "response_length": response_length,
            "truncated": generation.truncated,
        },
        temperature=request.params.temperature,
        pictures=request.pictures,
    )


def _with_experts(batches: Sequence[SampleBatch]) -> Sequence[SampleBatch]:
    """If any batch has experts, give the others, of episodes without answers, the column too, filled with -1."""
    name = Output.ROUTED_EXPERTS.value
    experts = next((batch.columns[name] for batch in batches if name in batch.columns), None)
    if experts is None:
        return batches
    return [
        batch
        if name in batch.columns
        else batch.with_columns(**{name: np.full((len(batch.tokens), *experts.shape[1:]), -1, experts.dtype)})
        for batch in batches
    ]


def _require_same_columns(batches: Sequence[SampleBatch]) -> None:
    """Raises PluginBroken. Pictures may be in some alone."""
    for each in ("columns", "row_columns"):
        found = [getattr(batch, each).keys() - {PICTURE} for batch in batches]
        if differ := sorted(set.union(*found) - set.intersection(*found)):
            raise PluginBroken(
                f"the sampler returned batches whose {each} differ: only some have {', '.join(map(repr, differ))}; "
                "give those of all prompts the same ones"
            )


def rows_of(prompts: int, samples: int) -> tuple[IntArray, IntArray]:
    """[R], [R] each row's prompt index and sample number."""
    return np.repeat(np.arange(prompts), samples), np.tile(np.arange(samples), prompts)
