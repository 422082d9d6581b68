"""Play episodes concurrently: each is a coroutine, its function and its requests run beside it."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from attrs import define, evolve, field, frozen

from corerl.data import Prompt
from corerl.engines import UNLIMITED, GenerateRequest, Generation, SamplingParams, append, continued, stops_of
from corerl.messages import note
from corerl.pictures import Picture, PictureReader
from corerl.rollout import Failure, Judged
from corerl.types import IntArray, all_shown
from corerl_agents.answers import AnswerReader
from corerl_agents.chat_requests import ChatAnswer, ChatRequest, OnPiece, Piece
from corerl_agents.chat_server import ChatServer
from corerl_agents.config import MOST, EpisodesConfig
from corerl_agents.conversation import Answer, Difference, Message, RenderedRequest, Row
from corerl_agents.episodes import Episode, EpisodeFunction, Played, Rewarded
from corerl_agents.gathering import Gathering
from corerl_agents.histories import History, Turn
from corerl_agents.pictures import Shown, with_pictures
from corerl_agents.places import Places
from corerl_agents.posted import PostedReward
from corerl_agents.refused import Diverges, Refused
from corerl_agents.renderer import Renderer, read_messages
from corerl_agents.tool_calls import format_of, unread

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


GROWTH = 8  # tokens of a streamed answer for one more that is sampled before it is sent
Generate = Callable[[GenerateRequest], Awaitable[Generation]]  # of rows


@define(kw_only=True, eq=False)
class EpisodeState:
    """What one role says in an episode; of most episodes, that is all."""

    number: int  # episodes start, and are batched, in this order
    prompt: Prompt
    sample: int = 0  # the episode's number among those of its prompt
    key: int  # noise key
    role: str = ""  # one of `samplers.episodes.roles`
    root: History = field(init=False)  # while it is played
    outcome: Rewarded = None
    posted: PostedReward = field(factory=PostedReward)
    _rows: list[Row] | None = None  # once it has ended
    answered: int = 0  # requests so far
    empty: list[tuple[int, History]] = field(factory=list)  # `answered` at each answer without a token, and its history
    refusal: str = ""  # why its last request was refused, until another one is answered

    @property
    def name(self) -> str:
        """For its threads and tasks, so that a stack trace tells whose they are."""
        return f"prompt {self.prompt.index}, sample {self.sample}"

    @property
    def turns(self) -> list[Turn]:
        return [turn for history in self.root for turn in history.turns]

    @property
    def rows(self) -> list[Row]:
        """What is trained on, so far."""
        return self.root.rows if self._rows is None else self._rows

    @property
    def ended(self) -> bool:
        return self._rows is not None

    def forget_turn_rewards(self) -> None:
        for history in self.root:
            history.reward = 0.0

    def end(self) -> None:
        """Answer no more, and keep the rows alone: the garbage collector would look through all that the episodes of a
        batch have said, again and again."""
        for turn in self.turns:
            turn.answer.cancel()
        self._rows = self.root.rows
        del self.root
        self.empty.clear()


class EpisodeRunner:
    """Plays episodes, as many at once as the config allows. For coroutines of one event loop; plain functions run in
    threads, one for each episode."""

    def __init__(
        self,
        *,
        server: ChatServer,
        tokenizer: PreTrainedTokenizerBase,
        params: SamplingParams,
        function: EpisodeFunction,
        config: EpisodesConfig,
        longest_prompt: int = UNLIMITED,
        template_options: Mapping[str, Any] | None = None,
        special_tokens: bool = False,
        pictures: PictureReader | None = None,
        places: Places | None = None,
    ) -> None:
        """`longest_prompt`: tokens that the first request of a row may have. `places`: of episodes that play at once,
        if `config.concurrency` is no number."""
        self._pictures = pictures
        self._server = server
        self._tokenizer = tokenizer
        calls = format_of(config.tool_calls, tokenizer)
        self._renderer = Renderer(
            tokenizer,
            template_options,
            unshown_tools=config.tool_calls != "auto",
            unread=unread(config.tool_calls, calls, tokenizer, section=function.section),
            section=function.section,
            pictures=pictures,
        )
        apart = config.reasoning == "separate"
        self._answers = AnswerReader(tokenizer, calls, special_tokens=special_tokens, separate_reasoning=apart)
        self._params = params
        self._function = function
        self._timeout = config.timeout
        self._part = config.stream_tokens
        self._places = places or asyncio.Semaphore(config.concurrency if isinstance(config.concurrency, int) else MOST)
        self._starting = asyncio.Lock()  # those that are asked for first
        self._longest_prompt = longest_prompt
        self._most_rows = config.max_rows
        self._noted_changed = False
        # Searches the vocabulary: once for each list of texts.
        self._stops_of = functools.cache(functools.partial(stops_of, tokenizer=tokenizer))

    async def play(
        self,
        episodes: Sequence[Sequence[EpisodeState]],
        generate: Generate,
        *,
        gathers: bool = False,
        on_ended: Callable[[int], None] = lambda ended: None,
    ) -> None:
        """Play these episodes, each given by the states of its roles, to their end; `generate` gets one row at a time
        or, if this `gathers`, concurrent requests together. `on_ended` is called with how many have ended. Ends all
        episodes and raises if `generate` raises, or if it is cancelled: their requests are answered no more, though
        their functions may go on."""
        gathering = Gathering(generate) if gathers else None
        ended = 0
        on_ended(ended)

        async def one(states: Sequence[EpisodeState]) -> None:
            nonlocal ended
            await self._play(states, generate, gathering)
            ended += 1
            on_ended(ended)

        try:
            async with asyncio.TaskGroup() as playing:
                async with self._starting:
                    for states in episodes:
                        await self._places.acquire()
                        task = playing.create_task(one(states), name=f"episode of {states[0].name}")
                        task.add_done_callback(lambda _: self._places.release())
        except BaseExceptionGroup as failed:
            first = failed.exceptions[0]
            raise first from first.__cause__

    async def _play(self, states: Sequence[EpisodeState], generate: Generate, gathering: Gathering | None) -> None:
        number, name, prompt = states[0].number, states[0].name, states[0].prompt
        # Gets the error of engines that could not answer.
        failed: asyncio.Future[NoReturn] = asyncio.get_running_loop().create_future()

        async def generated(request: GenerateRequest) -> Generation:
            try:
                return await (gathering.generate(request, number) if gathering else generate(request))
            except Refused:
                raise
            except Exception as error:  # the run's, not the client's
                if not failed.done():
                    failed.set_exception(error)
                raise _over() from error

        urls = {}
        for state in states:
            state.root = History(key=state.key)
            answering = functools.partial(self._answer, state, generated)
            refusing = functools.partial(setattr, state, "refusal")
            urls[state.role] = self._server.open(answering, refusing, state.posted.post)
        roles = {role: url for role, url in urls.items() if role}
        if roles:
            refuses = _OfRoles(tuple(roles))
            urls[""] = self._server.open(refuses.answer, functools.partial(setattr, states[0], "refusal"), refuses.post)
        if gathering is not None:
            gathering.joins()
        episode = Episode(prompt=prompt, base_url=urls[""], roles=roles, server=self._server)
        function = asyncio.create_task(self._function.play(episode, name=f"function of {name}"), name=name)
        try:
            waited: list[asyncio.Future[Any]] = [function, failed]
            await asyncio.wait(waited, timeout=self._timeout, return_when=asyncio.FIRST_COMPLETED)
            if failed.done():
                failed.result()
            outcomes = self._outcomes(states, function)
            for state in states:
                state.outcome = outcomes if isinstance(outcomes, Failure) else outcomes[state.role]
                if isinstance(outcomes, Failure):
                    state.forget_turn_rewards()  # those of a role that is right, where another one is not
        finally:
            for state in states:
                state.end()
            function.cancel()
            failed.cancel()
            for url in urls.values():
                self._server.shut(url)
            if gathering is not None:
                gathering.leaves()

    def _outcomes(
        self, states: Sequence[EpisodeState], function: asyncio.Task[Played]
    ) -> Failure | Mapping[str, Rewarded]:
        """The reward of each role that has spoken; what fails in one fails the episode."""
        prompt = states[0].prompt
        if not function.done():
            return self._function.late(self._timeout, prompt)
        outcome = function.result()
        if isinstance(outcome, Failure):
            # A client's own error seldom says more than the status.
            refusal = next((state.refusal for state in states if state.refusal), "")
            if refusal and refusal not in outcome.message:
                outcome = evolve(outcome, message=f"{outcome.message}; its last request was refused: {refusal}")
            return outcome
        if not any(state.answered for state in states):
            return self._function.failure("silent", "sent no request to the policy", prompt)
        given = outcome if isinstance(outcome, Mapping) else {state.role: outcome for state in states}
        found: dict[str, Rewarded] = {state.role: None for state in states}
        for state in (state for state in states if state.answered):
            if state.role not in given and state.posted.judged is None:
                what = f"gave no reward for the role {state.role!r}, which has played, and none was posted to its URL;"
                return self._function.failure("no-number", f"{what} None leaves it to reward.name", prompt)
            rewarded = found[state.role] = self._rewarded(state, given.get(state.role))
            if isinstance(rewarded, Failure):
                return rewarded
        return found

    def _rewarded(self, state: EpisodeState, outcome: Rewarded) -> Rewarded:
        """The reward that the function gave, or else the posted one; those of turns are noted in their histories."""
        if (posted := state.posted.judged) is not None:
            if outcome is not None:
                of, url = (f" for the role {state.role!r}", "its") if state.role else ("", "the episode's")
                what = f"gave a reward{of}, but another one, {posted.reward:g}, was posted to {url} URL"
                return self._function.failure("no-number", what, state.prompt)
            outcome = posted
        if isinstance(outcome, Judged) and outcome.turns:
            answers = sorted((turn.history for turn in state.turns if turn.history), key=lambda each: each.since)
            what = f"returned {len(outcome.turns)} rewards, one for each turn, "
            if len(outcome.turns) not in (len(answers), len(answers) + len(state.empty)):
                return self._function.failure("no-number", f"{what}but got {len(answers)} answers", state.prompt)
            if len({each.since for each in answers}) < len(answers):
                what += "but sent requests side by side, whose answers have no order; return their sum"
                return self._function.failure("no-number", what, state.prompt)
            rewarded = [(each.since, each) for each in answers]
            if len(outcome.turns) > len(answers):  # an answer without a token has no place of its own
                rewarded = sorted([*state.empty, *rewarded], key=lambda each: each[0])
            for (_, history), reward in zip(rewarded, outcome.turns, strict=True):
                history.reward += reward
        return outcome

    # ---- the requests of one episode --------------------------------------------------------------------------------

    async def _answer(
        self, state: EpisodeState, generate: Generate, chat: ChatRequest, on_piece: OnPiece
    ) -> ChatAnswer:
        own = state.prompt.pictures
        if self._pictures is None or chat.prompt_tokens:
            shown = Shown(messages=chat.messages, pictures={})
        else:  # in a thread: decoding may take long
            shown = await asyncio.to_thread(with_pictures, chat.messages, self._pictures, own)
        turn = self._turn(state, generate, evolve(chat, messages=shown.messages), shown.pictures)
        if isinstance(turn, ChatAnswer):
            return turn
        turn.abandoned = False
        turn.on_piece = on_piece if chat.stream else None
        try:
            answer, generation = await asyncio.shield(turn.answer)
        except asyncio.CancelledError:
            if turn.answer.cancelled():
                raise _over() from None
            turn.abandoned, turn.on_piece = True, None  # the client has gone
            raise
        return ChatAnswer(
            text=answer.content,
            reasoning=answer.reasoning,
            tool_calls=answer.calls,
            finish_reason="length" if generation.truncated[0] else "tool_calls" if answer.calls else "stop",
            stopped=self._answers.stopped(generation.tokens, chat.stop),
            prompt_token_ids=turn.request.tokens,
            token_ids=generation.tokens,
            tokens=self._answers.texts(generation.tokens) if chat.logprobs else (),
            logprobs=generation.logprobs.tolist() if chat.logprobs else (),
            versions=generation.versions,
            routed_experts=generation.routed_experts,
        )

    def _turn(
        self, state: EpisodeState, generate: Generate, chat: ChatRequest, pictures: Mapping[str, Picture]
    ) -> Turn | ChatAnswer:
        """The turn that this request begins, or is the second attempt at; or the answer if there is no room for one."""
        if state.ended:
            raise _over()
        if of_row := state.prompt.template_options:
            chat = evolve(chat, template_options={**of_row, **chat.template_options})
        if chat.prompt_tokens:
            (history, asked), difference = self._continued_by_tokens(state.root, chat), None
        else:
            history, asked, difference = self._continued(state.root, chat, pictures)
        conversation, place = history.conversation, history.place(asked, chat)
        if chat.counts:
            before = np.concatenate([conversation.tokens, asked.tokens])
            return ChatAnswer(text="", finish_reason="stop", prompt_token_ids=before)
        if (turn := history.abandoned_turn(place)) is not None:
            self._require_row(state.root, history, difference)
            turn.asked_again(state.answered)
            return turn
        if not conversation.exchanges and len(asked.tokens) > self._longest_prompt:
            raise Refused(
                f"messages: the first request of a row has {len(asked.tokens)} tokens, but only "
                f"{self._longest_prompt} fit into rollout.context_length besides rollout.max_tokens="
                f"{self._params.max_tokens}; shorten it",
                code="context_length_exceeded",
            )
        tokens = np.concatenate([conversation.tokens, asked.tokens])
        length = len(tokens) - (conversation.prompt_length or len(asked.tokens))
        if length >= self._params.max_tokens or history.truncated:
            return self._no_room(state, history, asked, tokens)
        self._require_row(state.root, history, difference)
        shown = all_shown([conversation.shown, (asked.picture, asked.pictures)])
        request = self._request(history.key_at(place), tokens, shown, length, chat)
        turn_of = f"{state.name}, {state.role}" if state.role else state.name
        name = f"answer to {turn_of}, turn {len(conversation.exchanges) + 1}"
        answer = asyncio.create_task(self._generated(state, generate, history, asked, request), name=name)
        turn = Turn(chat=chat, place=place, since=state.answered, request=request, answer=answer)
        history.turns.append(turn)
        return turn

    def _continued(
        self, root: History, chat: ChatRequest, pictures: Mapping[str, Picture]
    ) -> tuple[History, RenderedRequest, Difference | None]:
        """The longest history that the request continues, what it adds to it, and why that is no longer one."""
        messages = read_messages(chat.messages, pictures=self._pictures is not None)
        known, difference = root.continued(messages)
        for history in known:
            try:
                return history, self._asked(history, messages, chat, pictures), difference
            except Diverges as diverges:
                difference = difference or Difference(number=0, changed=False, text=diverges.message)
        return root, self._asked(root, messages, chat, pictures), difference

    def _continued_by_tokens(self, root: History, chat: ChatRequest) -> tuple[History, RenderedRequest]:
        """The longest history that the tokens of a request continue, and what they add to it."""
        known = len(self._tokenizer)
        if (largest := max(chat.prompt_tokens)) >= known:
            raise Refused(f"token_ids: got {largest}, but the tokenizer has {known} tokens, from 0 to {known - 1}")
        if self._pictures is not None and self._pictures.placeholder in chat.prompt_tokens:
            raise Refused("token_ids: have a token that stands for a picture; send messages to show pictures")
        tokens = np.array(chat.prompt_tokens, dtype=np.int64)
        history = root.continued_by_tokens(tokens)
        new = tokens[len(history.conversation.tokens) :]
        return history, RenderedRequest(messages=(), tools=(), tokens=new, by_tokens=True)

    def _asked(
        self, history: History, messages: Sequence[Message], chat: ChatRequest, pictures: Mapping[str, Picture]
    ) -> RenderedRequest:
        return self._renderer.ask(
            history.conversation,
            messages,
            chat.tools,
            most_calls=chat.most_calls,
            options=chat.template_options,
            pictures=pictures,
        )

    def _require_row(self, root: History, history: History, difference: Difference | None) -> None:
        """Raise Refused if a request that continues this history would begin one row too many. `difference` is why it
        continues no other."""
        if history.conversation.exchanges and not history.live_turns:
            return
        if root.begun >= self._most_rows:
            why = difference.text if difference else "messages: another request goes on from the same ones"
            limit = f"{self._function.section}.max_rows={self._most_rows}"
            raise Refused(
                f"{why}; this would begin one more row than {limit}; append messages to those of an answer and change "
                "none, or raise it",
                code="too_many_rows",
            )
        # Few want this: a client that strips answers makes a row of every turn.
        if difference and difference.changed and not self._noted_changed:
            self._noted_changed = True
            note(
                f"an answer came back changed, so the request begins another row of its episode: {difference.text}; to "
                "go on in the same row, send answers as they came"
            )

    async def _generated(
        self,
        state: EpisodeState,
        generate: Generate,
        history: History,
        asked: RenderedRequest,
        request: GenerateRequest,
    ) -> tuple[Answer, Generation]:
        """Have the turn sampled: then its history may be continued."""
        (turn,) = (turn for turn in history.turns if turn.request is request)
        try:
            generation = await self._sampled(generate, asked, turn)
            lost = self._pictures is not None and self._pictures.placeholder in generation.tokens[-1:]
            if lost:  # a sampled placeholder stands for no picture: it ends the answer, and nothing can follow it
                generation = evolve(generation, truncated=np.ones(1, np.bool_))
            answer = self._answers.read(asked, generation.tokens, request.params, history.conversation)
        except Exception:  # such as of what reads tool calls: the same request has the same noise, and no row more
            history.turns.remove(turn)
            raise
        conversation = history.conversation.answered(asked, answer, generation)
        turn.after = History(
            key=int(request.noise_keys[0]),
            conversation=conversation,
            truncated=lost or (bool(generation.truncated[0]) and conversation.begun >= self._params.max_tokens),
            since=turn.since,
        )
        state.answered += 1
        state.refusal = ""
        return answer, generation

    async def _sampled(self, generate: Generate, asked: RenderedRequest, turn: Turn) -> Generation:
        """The turn's answer. A streamed one is sampled in parts: what is sampled does not depend on that, as noise
        belongs to a token's place."""
        request = rest = turn.request
        if not turn.chat.stream or not self._part:
            return await generate(request)
        done: Generation | None = None
        while True:
            part = rest.response_lengths + max(self._part, int(rest.answered[0]) // GROWTH)
            generated = await generate(evolve(rest, limits=np.minimum(rest.limits, part)))
            goes_on = generated.truncated & (np.diff(generated.offsets) < rest.left)
            if goes_on.any():  # only the part has ended
                generated = evolve(generated, truncated=generated.truncated & ~goes_on, unfinished=goes_on)
            done = generated if done is None else append(request, done, generated)
            if not goes_on.any():
                return done
            rest = continued(request, done)
            if turn.on_piece is not None:
                reasoning, text = self._answers.known(asked, done.tokens, request.params)
                before, said = len(request.tokens), len(done.tokens)
                turn.on_piece(Piece(text=text, reasoning=reasoning, prompt_tokens=before, tokens=said))

    def _request(
        self,
        key: int,
        tokens: IntArray,
        shown: tuple[IntArray, tuple[Picture, ...]],
        length: int,
        request: ChatRequest,
    ) -> GenerateRequest:
        """The engine request for the next part of a row's one response."""
        params = self._params
        try:
            ends, texts = self._stops_of(tuple(request.stop))
        except ValueError as error:
            raise Refused(f"stop: {error}") from error
        if request.stop:
            params = evolve(
                params,
                stop_tokens=tuple(dict.fromkeys([*params.stop_tokens, *ends])),
                stop=tuple(dict.fromkeys([*params.stop, *texts])),
            )
        # As a row's limit, not in `params`: rows with different limits can be sampled together.
        limit = min(length + (request.max_tokens or params.max_tokens), params.max_tokens)
        return GenerateRequest(
            tokens=tokens,
            offsets=np.array([0, len(tokens)]),
            noise_keys=np.array([key]),
            params=params,
            response_lengths=np.array([length]),
            answered=np.array([0]),
            limits=np.array([limit]),
            picture=shown[0],
            pictures=shown[1],
        )

    def _no_room(self, state: EpisodeState, history: History, asked: RenderedRequest, prompt: IntArray) -> ChatAnswer:
        """An empty answer, cut before its first token; Refused if the function goes on after it."""
        said = len(prompt) if asked.by_tokens else len(asked.messages)
        if 0 < history.full < said:
            raise Refused(
                f"the row has used up its rollout.max_tokens={self._params.max_tokens}; end it when an answer has "
                "finish_reason='length', or begin another with shorter messages",
                code="context_length_exceeded",
            )
        history.full = said
        state.empty.append((state.answered, history))
        return ChatAnswer(text="", finish_reason="length", prompt_token_ids=prompt)


@frozen
class _OfRoles:
    """Behind the URL of an episode with roles, which belongs to none of them."""

    roles: tuple[str, ...]

    async def answer(self, chat: ChatRequest, on_piece: OnPiece) -> ChatAnswer:
        raise self._refused("send requests")

    def post(self, body: bytes) -> None:
        raise self._refused("post rewards")

    def _refused(self, what: str) -> Refused:
        urls = f"one of {', '.join(self.roles)}: episode.role({self.roles[0]!r}), or {{base_url_{self.roles[0]}}}"
        return Refused(f"the episode has roles (samplers.episodes.roles); {what} to the URL of {urls}", code="no_role")


def _over() -> Refused:
    return Refused("the episode is over; its requests are no longer answered", status=410, code="episode_over")
