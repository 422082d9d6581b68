"""Episodes: a user's function talks with the policy over any number of turns, and may return the episode's reward."""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
from attrs import evolve, field, frozen

from corerl.config import imported, require_callable
from corerl.data import Prompt
from corerl.messages import did_you_mean, short_repr
from corerl.rollout import (
    Failure,
    Judged,
    Outcome,
    described,
    in_thread,
    number,
    short,
    start_user_coroutine,
)
from corerl_agents.chat_server import API_KEY
from corerl_agents.dialects.base import MODEL
from corerl_agents.pictures import picture_part, with_indices
from corerl_agents.posted import NoReward

Rewarded = float | Outcome | None  # None: a posted reward, or what `reward.name` returns
Played = Rewarded | Mapping[str, Rewarded]  # what a function made of an episode; by role if it has several
WANTED = "a finite number, numbers by name, one for each turn, or None"


class Asked(Protocol):
    """What answers an episode's requests: a `ChatServer`, or a client of one in another process."""

    def ask(self, base_url: str, body: Mapping[str, Any]) -> Future[dict[str, Any]]: ...


@frozen(kw_only=True)
class Episode:
    """The argument of a user's function: a prompt, and the URL where the policy answers."""

    prompt: Prompt  # text, answer, and the row's fields
    base_url: str  # OpenAI-compatible, for this episode alone, or for one of its roles
    roles: Mapping[str, str] = field(factory=dict)  # base URLs by name; empty without `samplers.episodes.roles`
    api_key: str = API_KEY
    model: str = MODEL
    _server: Asked  # at base_url

    def role(self, name: str) -> Episode:
        """The episode as the role of this name plays it: requests of the result are that role's. Raises ValueError for
        a name that is not in `samplers.episodes.roles`."""
        if name not in self.roles:
            known = f"roles are {', '.join(self.roles)}" if self.roles else "set samplers.episodes.roles"
            raise ValueError(f"episode.role: no role {name!r}; {known}{did_you_mean(name, self.roles)}")
        return evolve(self, base_url=self.roles[name])

    @property
    def anthropic_url(self) -> str:
        """`base_url` as Anthropic's clients take it, which add `/v1` themselves."""
        return self.base_url.removesuffix("/v1")

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The prompt as chat messages; a text becomes one user message. New ones, which you may change."""
        return with_indices(self.prompt.messages or ({"role": "user", "content": self.prompt.text},))

    @staticmethod
    def picture(picture: bytes | str | Path) -> dict[str, Any]:
        """A part of a message's content, which shows the model a picture file: its content, or its path. Those of the
        prompt are in its messages already, as parts `{"type": "image", "index": 0}`."""
        return picture_part(picture)

    def chat(self, messages: Sequence[Mapping[str, Any]], **parameters: Any) -> dict[str, Any]:
        """Send one chat request and return its only choice: `message` and `finish_reason`. Saves the function a client
        library, and this process HTTP. Raises RuntimeError with the server's message if the request is refused, and in
        a coroutine."""
        if _in_coroutine():
            raise RuntimeError(
                "episode.chat would block the event loop that all async functions share; in a coroutine, use `await "
                "episode.chat_async(...)`"
            )
        thread, turn = threading.current_thread(), 1 + sum(message.get("role") == "assistant" for message in messages)
        name, thread.name = thread.name, f"{thread.name}, turn {turn}"  # a stack trace shows it
        try:
            return _choice(self._ask(messages, parameters).result())
        finally:
            thread.name = name

    async def chat_async(self, messages: Sequence[Mapping[str, Any]], **parameters: Any) -> dict[str, Any]:
        """`chat` for coroutines: as many requests side by side as there are tasks that wait for them."""
        return _choice(await asyncio.wrap_future(self._ask(messages, parameters)))

    def _ask(self, messages: Sequence[Mapping[str, Any]], parameters: Mapping[str, Any]) -> Future[dict[str, Any]]:
        body = {"model": self.model, "messages": messages, **parameters}
        # The answer is returned whole: a stream's parts would only be more calls of the engines.
        return self._server.ask(self.base_url, {**body, "stream": False} if body.get("stream") is True else body)


def _in_coroutine() -> bool:
    """Whether the caller is one, or is called by one: it must not wait."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _choice(answer: dict[str, Any]) -> dict[str, Any]:
    if "error" in answer:
        raise RuntimeError(answer["error"]["message"])
    choice: dict[str, Any] = answer["choices"][0]
    return choice


@frozen(kw_only=True, eq=False)
class EpisodeFunction:
    """A user's function with its name in the config and its options."""

    setting: ClassVar[str] = "samplers.episodes.function"  # with the name
    section: ClassVar[str] = "samplers.episodes"  # with the options of episodes
    name: str
    # (episode, **options) -> WANTED, or that of each role by name; or an awaitable of it
    function: Callable[..., Any]
    options: Mapping[str, Any] = field(factory=dict)

    async def play(self, episode: Episode, *, name: str = "episode function") -> Played:
        """Run the function; returns the episode's reward, or those of its roles, as far as it gives them. Coroutines
        run in the loop of all users' coroutines, and are cancelled with this one; other functions run in threads of
        this `name`, which nothing ends."""
        if inspect.iscoroutinefunction(self.function):
            value = self._called(episode)  # which runs none of it yet
        else:
            value = await in_thread(functools.partial(self._called, episode), name=name)
        if inspect.isawaitable(value):
            value = await asyncio.wrap_future(start_user_coroutine(self._awaited(value, episode.prompt), name=name))
        if value is None or isinstance(value, Failure):
            return value
        try:
            if episode.roles:
                return _by_role(value, episode.roles)
            if (reward := _reward(value)) is not None:
                return reward
            what = f"returned {short_repr(value)}, wanted {WANTED},"
        except NoReward as error:
            what = f"returned {error},"
        except BaseException as error:  # of the value's own code, such as a tensor's that is on no device
            what = f"returned a value that raised {described(error)}"
        return self.failure("no-number", what, episode.prompt)

    def _called(self, episode: Episode) -> Any:
        try:
            return self.function(episode, **self.options)
        except BaseException as error:  # SystemExit too: it would end the thread silently
            return self.failure("raised", f"raised {described(error)}", episode.prompt)

    async def _awaited(self, value: Awaitable[Any], prompt: Prompt) -> Any:
        try:
            return await value
        except BaseException as error:  # here, as who waits for it gets another TimeoutError, from nowhere
            return self.failure("raised", f"raised {described(error)}", prompt)

    async def started(self) -> None:
        """Wait until it can play."""

    def close(self) -> None:
        """End what it has started, as the run ends."""

    def late(self, timeout: float, prompt: Prompt) -> Failure:
        return self.failure("timeout", f"took longer than {self.section}.timeout={timeout:g} seconds", prompt)

    def failure(self, kind: str, what: str, prompt: Prompt) -> Failure:
        message = f"{self.setting} {self.name!r} {what} on prompt {prompt.index} ({short(prompt.text)})"
        return Failure(kind=kind, message=" ".join(message.split()))


def _reward(value: Any) -> float | Judged | None:
    """What a function returned as a reward; None if that is no reward."""
    if getattr(value, "ndim", 0) == 1:  # of numpy, torch or jax
        value = value.tolist()
    if not isinstance(value, Mapping | list | tuple):
        return number(value)
    numbers = [number(each) for each in (value.values() if isinstance(value, Mapping) else value)]
    # As float32, in which rewards are added up again where they are placed at tokens.
    found = tuple(float(np.float32(each)) for each in numbers if each is not None)
    if len(found) < len(numbers) or not found or number(sum(found)) is None:
        return None
    if isinstance(value, Mapping):
        return Judged(reward=sum(found), parts=dict(zip(map(str, value), found, strict=True)))
    return Judged(reward=sum(found), turns=found)


def _by_role(value: Any, roles: Collection[str]) -> dict[str, Rewarded]:
    """Raises NoReward, whose text says what was returned."""
    known, found = ", ".join(roles), dict[str, Rewarded]()
    if not isinstance(value, Mapping):
        raise NoReward(f"{short_repr(value)}, wanted a reward for each role by its name ({known}), or None")
    for name, each in value.items():
        if name not in roles:
            raise NoReward(f"a reward for {short_repr(name)}, wanted those of the roles {known}")
        found[name] = None if each is None else _reward(each)
        if each is not None and found[name] is None:
            raise NoReward(f"{short_repr(each)} for the role {name!r}, wanted {WANTED}")
    return found


def resolve_function(name: str, options: Mapping[str, Any]) -> EpisodeFunction:
    """Import the function. Raises ConfigError if it does not exist or cannot be called with (episode, **options)."""
    function = imported(name, setting="samplers.episodes.function")
    require_callable(
        function,
        "function(episode, **samplers.episodes.options)",
        None,
        setting=f"samplers.episodes.function: {name!r}",
        options=options,
    )
    return EpisodeFunction(name=name, function=function, options=options)
