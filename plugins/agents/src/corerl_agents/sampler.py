"""Sample episodes: conversations that a user's function has with the policy."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from corerl.data import Prompt
from corerl.engines import UNLIMITED, GenerateRequest, Generation, SamplingParams
from corerl.errors import ConfigError
from corerl.ops import hash_key
from corerl.rollout import Rollout, Sampler, SamplerContext, rows_of
from corerl.types import PICTURE, ROLE, TURN_REWARDS, Array, Output, SampleBatch, all_shown, offsets_of
from corerl_agents.chat_server import LOOPBACK, ChatServer
from corerl_agents.commands import allow_open_files
from corerl_agents.config import AUTO, EpisodesConfig
from corerl_agents.conversation import Row
from corerl_agents.episodes import EpisodeFunction
from corerl_agents.places import Places
from corerl_agents.runner import EpisodeRunner, EpisodeState
from corerl_agents.workers import PlayedByWorkers, player_of

if TYPE_CHECKING:
    from corerl_agents.nodes import NodeProcesses

# Allocations between two collections of garbage. An episode has thousands of objects that live as long as itself: with
# Python's own 700, a fifth of the CPU seconds of 1,000 episodes is the collector's, and one pass of it holds up the
# event loop for 0.2 s.
COLLECT_AFTER = 10_000


class EpisodeSampler(Sampler):
    """A sampler whose samples are conversations, each played by a user's function.

    A conversation counts as one long response, in which the environment's tokens stand between the policy's. Noise
    follows the sample token by token, so that neither timing nor batching changes what is sampled.
    `rollout.max_tokens` bounds everything after the first request, including the environment's tokens. A request that
    continues no conversation whole begins another row of its sample.
    """

    options: EpisodesConfig

    def __init__(
        self,
        options: EpisodesConfig,
        context: SamplerContext,
        *,
        function: EpisodeFunction | None = None,
        server: ChatServer | None = None,
    ) -> None:
        """`function` and `server` in place of those that the options and the run's sampling name. From now on this
        process may open more files, and collects garbage less often, unless it never does."""
        super().__init__(options, context)
        allow_open_files()
        if 0 < gc.get_threshold()[0] < COLLECT_AFTER:
            gc.set_threshold(COLLECT_AFTER, *gc.get_threshold()[1:])
        params = context.params
        nodes: NodeProcesses | None = None
        if options.workers_on == "cluster":
            from corerl_agents.nodes import NodeProcesses  # imports ray

            nodes = NodeProcesses(options, context.environment)
        self._function = function or (PlayedByWorkers.start(options, nodes) if options.workers else player_of(options))
        self._server = server or ChatServer(
            context.loop,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            address=LOOPBACK if nodes is None else nodes.address,
        )
        self._runners: dict[SamplingParams, EpisodeRunner] = {}

    def close(self) -> None:
        self._function.close()
        self._server.close()

    async def generate(
        self,
        prompts: Sequence[Prompt],
        request: GenerateRequest,
        *,
        background: bool = False,
        on_tokens: Callable[[Generation], None] | None = None,
    ) -> Rollout:
        """Play one episode per row. If a function fails, its sample keeps what was sampled until then, with the failure
        in the rollout's `outcomes`."""
        await self._function.started()
        episodes = states_of(prompts, request, self.options.roles)
        on_progress = None if background else self.context.on_progress
        await self._runner(request).play(
            episodes,
            functools.partial(self.context.generate, urgent=not background, on_tokens=on_tokens),
            # With `on_tokens` a run samples all the time: engines are busy, and what comes then is sent together.
            # Engines that answer several calls at once wait for no request that could be sampled with another.
            gathers=self.context.calls == 1 and on_tokens is None,
            on_ended=lambda ended: None if on_progress is None else on_progress(ended, len(episodes)),
        )
        return played(prompts, request, episodes)

    def _runner(self, request: GenerateRequest) -> EpisodeRunner:
        """One for all groups that are played in the background: it limits how many."""
        params = request.params
        if params not in self._runners:
            context = self.context
            self._runners[params] = EpisodeRunner(
                server=self._server,
                tokenizer=context.tokenizer,
                params=params,
                function=self._function,
                config=self.options,
                longest_prompt=context.context_length - params.max_tokens if context.context_length else UNLIMITED,
                template_options=context.template_options,
                special_tokens=context.special_tokens,
                pictures=context.pictures,
                places=self._places(request),
            )
        return self._runners[params]

    def _places(self, request: GenerateRequest) -> Places | None:
        """None for a fixed number of them."""
        if self.options.concurrency != AUTO:
            return None
        if self.context.cache_use is None:
            raise ConfigError(f"samplers.episodes.concurrency: {AUTO!r} needs the engines of a run; set a number")
        longest = int(np.diff(request.offsets).max(initial=0)) + request.params.max_tokens
        return Places(self.context.cache_use, longest=longest)


def states_of(
    prompts: Sequence[Prompt], request: GenerateRequest, roles: Sequence[str] = ()
) -> list[list[EpisodeState]]:
    """Of an episode for each row of `request`, the state of each of its roles; without roles, of the one that has no
    name."""
    group, sample = rows_of(len(prompts), len(request) // len(prompts))
    return [
        [
            EpisodeState(number=number, prompt=prompts[index], sample=int(each), key=own, role=role)
            for role, own in keys_of(int(key), roles).items()
        ]
        for number, (index, each, key) in enumerate(zip(group, sample, request.noise_keys, strict=True))
    ]


def keys_of(key: int, roles: Sequence[str]) -> dict[str, int]:
    """The noise key of each role: what two of them are asked alike, they answer differently."""
    return {role: hash_key(key, place) for place, role in enumerate(roles)} or {"": key}


def played(prompts: Sequence[Prompt], request: GenerateRequest, episodes: Sequence[Sequence[EpisodeState]]) -> Rollout:
    """The rollout of these episodes, all of which have ended. A role that said nothing has no row, unless none did."""
    found = []  # (number of the episode, role's state, its rows)
    for number, states in enumerate(episodes):
        spoke = [(number, state, state.rows) for state in states if state.rows]
        found += spoke or [(number, states[0], [Row.unanswered(request.take_rows(np.array([number])))])]
    counts = [len(rows) for *_, rows in found]
    place = np.repeat([number for number, *_ in found], counts)
    group, sample = rows_of(len(prompts), len(episodes) // len(prompts))
    columns: dict[str, Array] = {"group": group[place], "sample": sample[place]}
    if episodes[0][0].role:
        columns[ROLE] = np.repeat([state.role for _, state, _ in found], counts)
    batch = _batch([row for *_, rows in found for row in rows], request.params.temperature)
    return Rollout(
        batch=batch.with_row_columns(**columns, episode=np.repeat(np.arange(len(found)), counts)),
        prompts=tuple(prompts),
        texts=[row.text for *_, rows in found for row in rows],
        outcomes=[state.outcome for _, state, rows in found for _ in rows],
    )


def _batch(rows: Sequence[Row], temperature: float) -> SampleBatch:
    lengths = np.array([len(row.tokens) for row in rows])
    columns: dict[str, Array] = {
        "loss_mask": np.concatenate([row.loss_mask for row in rows]),
        "rollout_logprobs": np.concatenate([row.logprobs for row in rows]),
        "versions": np.concatenate([row.versions for row in rows]),
        "engines": np.concatenate([row.engines for row in rows]),
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
    column, pictures = all_shown([(row.picture, row.pictures) for row in rows])
    if pictures:
        columns[PICTURE] = column
    return SampleBatch(
        tokens=np.concatenate([row.tokens for row in rows]),
        offsets=offsets_of(lengths),
        columns=columns,
        row_columns={
            "prompt_length": prompt_length,
            "response_length": np.array([int(row.loss_mask.sum()) for row in rows]),
            "span": lengths - prompt_length,
            "truncated": np.array([row.truncated for row in rows], dtype=np.bool_),
            "turns": np.array([row.turns for row in rows]),
            "final": np.array([row.final for row in rows], dtype=np.bool_),
        },
        temperature=temperature,
        pictures=pictures,
    )
