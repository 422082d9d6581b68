"""Sample episodes, either a whole batch that the caller waits for or prompt by prompt in the background."""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from corerl.config.schema import EpisodesConfig
from corerl.data.prompts import Prompt
from corerl.engines.base import UNLIMITED, GenerateRequest, Generation, SamplingParams
from corerl.engines.continuation import split
from corerl.engines.fleet import Counted, NoneLeft
from corerl.rollout.agents.chat_server import ChatServer
from corerl.rollout.agents.conversation import Conversation
from corerl.rollout.agents.episode_runner import EpisodeRunner, EpisodeState, Turns
from corerl.rollout.agents.episodes import EpisodeFunction
from corerl.rollout.sampler import Background, PromptTask, Rollout, Sampler, require_finished, rows_of
from corerl.types import Array, IntArray, Output, SampleBatch, offsets_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class EpisodeSampler(Sampler):
    """A sampler whose samples are conversations, each played by a user's function.

    A conversation counts as one long response, in which the environment's tokens stand between the policy's. Noise
    follows the sample token by token, so that neither timing nor batching changes what is sampled.
    `rollout.max_tokens` bounds everything after the first request, including the environment's tokens.
    """

    def __init__(
        self,
        *,
        tokenizer: PreTrainedTokenizerBase,
        generate: Callable[[GenerateRequest], Generation],
        seed: int,
        function: EpisodeFunction,
        front: ChatServer,
        config: EpisodesConfig,
        aside: Callable[[GenerateRequest], Generation] | None = None,
        calls: int = 1,
        longest_prompt: int = UNLIMITED,
        template_options: Mapping[str, Any] | None = None,
        special_tokens: bool = False,
        told: Counted | None = None,
    ) -> None:
        """`aside` is `generate` for other threads: up to `calls` of them call it at once, so that a long answer delays
        no other; it raises NoneLeft if no engine is left. Without it, calls run one after the other. `longest_prompt`:
        tokens that an episode's first request may have. `told` hears how many episodes have ended, and how many there
        are."""
        super().__init__(
            tokenizer=tokenizer,
            generate=generate,
            seed=seed,
            template_options=template_options,
            special_tokens=special_tokens,
        )
        self._told = told
        self._aside = aside
        self._calls = calls
        self._function = function
        self._front = front
        self._config = config
        self._longest_prompt = longest_prompt

    def sample(
        self, prompts: Sequence[Prompt], *, rollout_step: int, samples: int, params: SamplingParams, attempt: int = 0
    ) -> Rollout:
        """Play one episode per sample. The calling thread calls the engines; functions run in other threads. If a
        function fails, its sample keeps what was sampled until then, with the failure in the rollout's `outcomes`."""
        request = self.request(prompts, rollout_step=rollout_step, samples=samples, params=params, attempt=attempt)
        players, told = players_of(prompts, request), self._told
        state = threading.Condition()
        table = self._table(params, state)
        table.admit(players)
        Play(
            table,
            state,
            generate=self._generate,
            aside=self._aside if self._calls > 1 else None,
            calls=self._calls,
            heard=None if told is None else lambda: told(sum(player.ended for player in players), len(players)),
        ).run()
        return played(prompts, request, players)

    def background(self, params: SamplingParams, state: threading.Condition) -> Background:
        return Episodes(self._table(params, state), state)

    def _table(self, params: SamplingParams, state: threading.Condition) -> EpisodeRunner:
        return EpisodeRunner(
            front=self._front,
            tokenizer=self._tokenizer,
            params=params,
            function=self._function,
            config=self._config,
            state=state,
            longest_prompt=self._longest_prompt,
            template_options=self._template_options,
            special_tokens=self._special_tokens,
        )


class Play:
    """Play a runner's episodes to their end; requests that arrive together are sampled together.

    The thread that calls `run` calls the engines, or starts threads to do so if the engines take several calls at once.
    Shared state changes under the runner's `state`.
    """

    def __init__(
        self,
        table: EpisodeRunner,
        state: threading.Condition,
        *,
        generate: Callable[[GenerateRequest], Generation],
        aside: Callable[[GenerateRequest], Generation] | None = None,
        calls: int = 1,
        heard: Callable[[], None] | None = None,
    ) -> None:
        """`heard` is called at each change."""
        self._heard = heard
        self._table = table
        self._state = state
        self._generate = generate
        self._gathered: deque[Turns] = deque()  # waiting for an engine, one call each
        self._aside = aside
        self._calls = calls
        self._calling = 0  # calls in progress in threads
        self._failure: BaseException | None = None  # of one of these threads

    def run(self) -> None:
        """Play until all episodes have ended. Raises what `generate` raises, after ending all episodes."""
        try:
            while turns := self._next():
                if self._aside is None:
                    self._ask(self._generate, turns)
                    continue
                with self._state:
                    self._calling += 1
                work = functools.partial(self._ask_aside, self._aside, turns)
                threading.Thread(target=work, name="rollout call", daemon=True).start()
        finally:
            self._table.close()

    def _next(self) -> Turns:
        """Wait for the next requests to send in one call; [] once all episodes have ended."""
        with self._state:
            while True:
                if self._failure is not None:
                    raise self._failure
                if self._heard is not None:
                    self._heard()
                gathered, seconds = self._table.look(free=self._calling < self._calls)
                self._gathered.extend(gathered)
                if self._gathered and self._calling < self._calls:
                    return self._gathered.popleft()
                if self._table.over and not self._calling:
                    return []
                self._state.wait(seconds)

    def _ask(self, generate: Callable[[GenerateRequest], Generation], turns: Turns) -> None:
        requests = [turn.request for _, turn in turns]
        generation = generate(GenerateRequest.concatenate(requests))
        require_finished(generation)
        for (player, turn), drawn in zip(turns, split(generation, requests), strict=True):
            self._table.tell(player, turn, drawn)

    def _ask_aside(self, generate: Callable[[GenerateRequest], Generation], turns: Turns) -> None:
        try:
            self._ask(generate, turns)
        except NoneLeft:  # only the thread in `run` may start new engines; from now on it makes the calls
            with self._state:
                self._aside = None
                self._gathered.appendleft(turns)
        except BaseException as error:
            with self._state:
                self._failure = self._failure or error
        finally:
            with self._state:
                self._calling -= 1
                self._state.notify_all()


class Episodes:
    """Plays episodes in the background as prompts arrive, for a source that calls the engines itself."""

    def __init__(self, table: EpisodeRunner, state: threading.Condition) -> None:
        self._table = table
        self._state = state
        self._open: dict[int, tuple[PromptTask, list[EpisodeState]]] = {}  # by the task's number

    def begin(self, task: PromptTask) -> None:
        with self._state:
            players = players_of([task.prompt], task.request, first=task.number)
            self._open[task.number] = task, players
            self._table.admit(players)

    def give_up(self, number: int) -> None:
        """End the task's episodes; further requests of their functions are refused."""
        with self._state:
            if number in self._open:
                self._table.end(self._open.pop(number)[1])

    def attend(self, ending: Callable[[], bool]) -> None:
        try:
            with self._state:
                while not ending():
                    # No need to gather: what arrives while all engines are busy is batched by the source.
                    waiting, seconds = self._table.look(gather=False)
                    for player, turn in (each for turns in waiting for each in turns):
                        task, _ = self._open[player.group]
                        task.ask(turn.request, functools.partial(self._table.tell, player, turn))
                    self._tell_done()
                    self._state.wait(seconds)
        finally:
            self._table.close()

    def _tell_done(self) -> None:
        for number, (task, players) in list(self._open.items()):
            if all(player.ended for player in players):
                del self._open[number]
                task.done(functools.partial(played, [task.prompt], task.request, players))


def players_of(prompts: Sequence[Prompt], request: GenerateRequest, *, first: int = 0) -> list[EpisodeState]:
    """One player for each sample of `request`, with groups numbered from `first`."""
    group, _ = rows_of(len(prompts), samples := len(request) // len(prompts))
    return [
        EpisodeState(number=number, group=first + index, prompt=prompts[index], key=int(key))
        for number, (index, key) in enumerate(zip(group, request.noise_keys, strict=True), first * samples)
    ]


def played(prompts: Sequence[Prompt], request: GenerateRequest, players: Sequence[EpisodeState]) -> Rollout:
    """The rollout of these players, all of which have ended."""
    group, sample = rows_of(len(prompts), len(request) // len(prompts))
    return Rollout(
        batch=_batch(players, request.by_row(), request.params.temperature).with_rows(group=group, sample=sample),
        prompts=tuple(prompts),
        texts=[player.conversation.text for player in players],
        outcomes=[player.outcome for player in players],
    )


def _batch(players: Sequence[EpisodeState], prompts: Sequence[IntArray], temperature: float) -> SampleBatch:
    """All conversations as one batch; an episode that requested nothing has only its prompt [L]."""
    played = [
        player.conversation if player.conversation.turns else Conversation.unanswered(prompt)
        for player, prompt in zip(players, prompts, strict=True)
    ]
    lengths = np.array([len(each.tokens) for each in played])
    columns: dict[str, Array] = {
        "loss_mask": np.concatenate([each.loss_mask for each in played]),
        "rollout_logprobs": np.concatenate([each.logprobs for each in played]),
        "versions": np.concatenate([each.versions for each in played]),
    }
    if (shape := next((each.routed_experts for each in played if each.routed_experts is not None), None)) is not None:
        columns[Output.ROUTED_EXPERTS.value] = np.concatenate(
            [
                np.full((len(each.tokens), *shape.shape[1:]), -1, shape.dtype)
                if each.routed_experts is None
                else each.routed_experts
                for each in played
            ]
        )
    prompt_length = np.array([each.prompt_length for each in played])
    return SampleBatch(
        tokens=np.concatenate([each.tokens for each in played]),
        offsets=offsets_of(lengths),
        columns=columns,
        rows={
            "prompt_length": prompt_length,
            "response_length": lengths - prompt_length,
            "truncated": np.array([player.truncated for player in players], dtype=np.bool_),
            "turns": np.array([each.turns for each in played]),
        },
        temperature=temperature,
    )
