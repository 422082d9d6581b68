"""Episodes in an environment of OpenEnv: an observation, the policy's action, and so on until it is done."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import frozen
from openenv import GenericEnvClient

from corerl.data import parse_json
from corerl.errors import ConfigError
from corerl.rollout import SamplerContext
from corerl_agents.episodes import Episode, EpisodeFunction
from corerl_agents.sampler import EpisodeSampler
from corerl_openenv.server import Server, schema_of
from corerl_openenv.spec import OpenEnvConfig, application, is_address

ACT = "You act in an environment. Answer each observation with"
OWN = ("metadata",)  # fields of all actions and observations, which are not shown


@frozen(kw_only=True)
class Actions:
    """How the policy writes an action, by the JSON schema of the environment's."""

    schema: Mapping[str, Any]

    @property
    def fields(self) -> dict[str, Any]:
        return {name: each for name, each in self.schema.get("properties", {}).items() if name not in OWN}

    @property
    def only_text(self) -> str:
        """The name of the only field, if that is a text; else ""."""
        (name, *others) = self.fields or [""]
        return name if not others and name and self.fields[name].get("type") == "string" else ""

    @property
    def instruction(self) -> str:
        if self.only_text:
            return f"{ACT} the {self.only_text} of your action alone."
        shown = {"properties": self.fields, "required": self.schema.get("required", [])}
        shown |= {"$defs": self.schema["$defs"]} if "$defs" in self.schema else {}  # to which fields may refer
        return f"{ACT} your action, a JSON object of this schema: {json.dumps(shown)}"

    def read(self, text: str) -> dict[str, Any] | None:
        """The action of an answer; None if it is none."""
        if self.only_text:
            return {self.only_text: text.strip()}
        try:
            action = parse_json(text)
        except ValueError:
            return None
        return action if isinstance(action, dict) else None


def shown(observation: Mapping[str, Any]) -> str:
    """An observation as a message: the text of its only field, or JSON."""
    fields = {name: each for name, each in observation.items() if name not in OWN}
    (only, *others) = fields.values() or [""]
    return only if not others and isinstance(only, str) else json.dumps(fields, ensure_ascii=False)


@frozen(kw_only=True, eq=False)
class Play(EpisodeFunction):
    """In place of a user's function, with errors of its own name."""

    setting: ClassVar[str] = "samplers.openenv.environment"
    section: ClassVar[str] = "samplers.openenv.episodes"


@frozen(kw_only=True)
class Environment:
    """A server's environment, as episodes are played in it."""

    url: str
    actions: Actions
    options: OpenEnvConfig

    async def play(self, episode: Episode) -> list[float]:
        """The reward of each turn. An answer that is no action, or that had no room, ends the episode, and is worth
        0."""
        system = self.actions.instruction if self.options.system is None else self.options.system
        messages = [{"role": "system", "content": system}] if system else []
        rewards: list[float] = []
        async with GenericEnvClient(base_url=self.url) as client:
            result = await client.reset(seed=episode.prompt.fields["seed"], **self.options.reset)
            while not result.done and len(rewards) < self.options.turns:
                messages.append({"role": "user", "content": shown(result.observation)})
                choice = await episode.chat_async(messages)
                messages.append(choice["message"])
                said, cut = choice["message"]["content"] or "", choice["finish_reason"] == "length"
                action = self.actions.read(said) if said or not cut else None
                if action is None:
                    return [*rewards, 0.0]
                result = await client.step(action)
                rewards.append(float(result.reward or 0.0))
                if cut:
                    break
        return rewards


class OpenEnvSampler(EpisodeSampler):
    """Each sample is an episode of an environment that is reset with the prompt's seed."""

    def __init__(self, options: OpenEnvConfig, context: SamplerContext) -> None:
        name = options.environment
        self._local = None if is_address(name) else Server(application(name))
        url = name.rstrip("/") if self._local is None else self._local.url
        try:
            environment = Environment(url=url, actions=Actions(schema=schema_of(url)), options=options)
        except OSError as error:
            raise ConfigError(f"samplers.openenv.environment: nothing answers at {name}/schema: {error}") from error
        super().__init__(options.episodes, context, function=Play(name=name, function=environment.play))

    def close(self) -> None:
        super().close()
        if self._local is not None:
            self._local.close()
