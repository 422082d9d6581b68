"""Sample episodes: conversations that a user's function has with the policy."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

import numpy as np
from attrs import field, frozen

from corerl.config.schema import EpisodesConfig
from corerl.data.prompts import Prompt
from corerl.engines.base import UNLIMITED, GenerateRequest, Generation, SamplingParams
from corerl.rollout.agents.chat_server import ChatServer
from corerl.rollout.agents.conversation import Row
from corerl.rollout.agents.episodes import EpisodeFunction
from corerl.rollout.agents.runner import EpisodeRunner, EpisodeState
from corerl.rollout.sampler import Rollout, Sampler, rows_of
from corerl.types import TURN_REWARDS, Array, Output, SampleBatch, offsets_of


@frozen(kw_only=True, eq=False)
class EpisodeSampler(Sampler):
    """A sampler whose samples are conversations, each played by a user's function.

    A conversation counts as one long response, in which the environment's tokens stand between the policy's. Noise
    follows the sample token by token, so that neither timing nor batching changes what is sampled.
    `rollout.max_tokens` bounds everything after the first request, including the environment's tokens. A request that
    continues no conversation whole begins another row of its sample.
    """

    function: EpisodeFunction
    server: ChatServer
    config: EpisodesConfig
    # Engines answer so many calls at once: with more than one, no request waits for others to be drawn beside it.
    calls: int = 1
    context_length: int = 0  # maximum tokens of a row; 0: unlimited
    _runners: dict[SamplingParams, EpisodeRunner] = field(init=False, factory=dict)

    async def draw(
        self,
        prompts: Sequence[Prompt],
        request: GenerateRequest,
        *,
        ahead: bool = False,
        drew: Callable[[Generation], None] | None = None,
    ) -> Rollout:
        """Play one episode per row. If a function fails, its sample keeps what was sampled until then, with the failure
        in the rollout's `outcomes`."""
        states, told = states_of(prompts, request), None if ahead else self.told
        await self._runner(request.params).play(
            states,
            functools.partial(self.generate, urgent=not ahead, drew=drew),
            # Whoever hears of each piece samples all the time: engines are busy, and what comes then is sent together.
            gathers=self.calls == 1 and drew is None,
            told=lambda ended: None if told is None else told(ended, len(states)),
        )
        return played(prompts, request, states)

    def _runner(self, params: SamplingParams) -> EpisodeRunner:
        """One for all groups that are played ahead: it limits how many."""
        if params not in self._runners:
            self._runners[params] = EpisodeRunner(
                server=self.server,
                tokenizer=self.tokenizer,
                params=params,
                function=self.function,
                config=self.config,
                longest_prompt=self.context_length - params.max_tokens if self.context_length else UNLIMITED,
                template_options=self.template_options,
                special_tokens=self.special_tokens,
            )
        return self._runners[params]


def states_of(prompts: Sequence[Prompt], request: GenerateRequest) -> list[EpisodeState]:
    """An episode for each row of `request`."""
    group, sample = rows_of(len(prompts), len(request) // len(prompts))
    return [
        EpisodeState(number=number, prompt=prompts[index], sample=int(each), key=int(key))
        for number, (index, each, key) in enumerate(zip(group, sample, request.noise_keys, strict=True))
    ]


def played(prompts: Sequence[Prompt], request: GenerateRequest, states: Sequence[EpisodeState]) -> Rollout:
    """The rollout of these episodes, all of which have ended."""
    group, sample = rows_of(len(prompts), len(request) // len(prompts))
    rows = [state.rows or [Row.unanswered(prompt)] for state, prompt in zip(states, request.by_row(), strict=True)]
    episode = np.repeat(np.arange(len(states)), [len(each) for each in rows])
    batch = _batch(list(itertools.chain(*rows)), request.params.temperature)
    return Rollout(
        batch=batch.with_rows(group=group[episode], sample=sample[episode], episode=episode),
        prompts=tuple(prompts),
        texts=[row.text for each in rows for row in each],
        outcomes=[state.outcome for state, each in zip(states, rows, strict=True) for _ in each],
    )


def _batch(rows: Sequence[Row], temperature: float) -> SampleBatch:
    lengths = np.array([len(row.tokens) for row in rows])
    columns: dict[str, Array] = {
        "loss_mask": np.concatenate([row.loss_mask for row in rows]),
        "rollout_logprobs": np.concatenate([row.logprobs for row in rows]),
        "versions": np.concatenate([row.versions for row in rows]),
        TURN_REWARDS: np.concatenate([row.turn_rewards for row in rows]),
    }
    if (shape := next((row.routed_experts for row in rows if row.routed_experts is not None), None)) is not None:
        columns[Output.ROUTED_EXPERTS.value] = np.concatenate(
            [
                np.full((len(row.tokens), *shape.shape[1:]), -1, shape.dtype)
                if row.routed_experts is None
                else row.routed_experts
                for row in rows
            ]
        )
    prompt_length = np.array([row.prompt_length for row in rows])
    return SampleBatch(
        tokens=np.concatenate([row.tokens for row in rows]),
        offsets=offsets_of(lengths),
        columns=columns,
        rows={
            "prompt_length": prompt_length,
            "response_length": np.array([int(row.loss_mask.sum()) for row in rows]),
            "span": lengths - prompt_length,
            "truncated": np.array([row.truncated for row in rows], dtype=np.bool_),
            "turns": np.array([row.turns for row in rows]),
            "final": np.array([row.final for row in rows], dtype=np.bool_),
        },
        temperature=temperature,
    )
