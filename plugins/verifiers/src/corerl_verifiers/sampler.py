"""Episodes that an environment of verifiers plays."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any, ClassVar

import verifiers.v1 as vf
from attrs import field, frozen

from corerl.rollout import Failure, Judged, SamplerContext, described, number, start_user_coroutine
from corerl_agents.episodes import Episode, EpisodeFunction
from corerl_agents.sampler import EpisodeSampler
from corerl_verifiers.environment import load, tasks_of
from corerl_verifiers.spec import VerifiersConfig

KEY = "CORERL_EPISODE_KEY"  # unset: nothing of this machine's keys goes to an episode's URL
CLOSING = 30.0  # seconds for an environment to release what it serves


class Serving:
    """What an environment serves while it is used, such as tools that all episodes share: entered and left by one
    task, as its context wants."""

    def __init__(self, env: vf.Env[Any]) -> None:
        self._env = env
        self._ready: asyncio.Future[None] | None = None
        self._over = asyncio.Event()

    async def wait(self) -> None:
        """Begin, unless that has been done, and wait until it serves. Raises what the environment raises."""
        if self._ready is None:
            self._ready = asyncio.get_running_loop().create_future()
            self._serving = asyncio.create_task(self._serve(self._ready), name="environment of verifiers")
        await asyncio.shield(self._ready)

    async def _serve(self, ready: asyncio.Future[None]) -> None:
        try:
            async with self._env.serving():
                ready.set_result(None)
                await self._over.wait()
        except (Exception, SystemExit) as error:
            if ready.done():
                raise
            ready.set_exception(error)

    async def end(self) -> None:
        self._over.set()
        if self._ready is not None:
            await self._serving


@frozen(kw_only=True, eq=False)
class Play(EpisodeFunction):
    """In place of a user's function: run the task of an episode's prompt."""

    setting: ClassVar[str] = "samplers.verifiers.environment"
    section: ClassVar[str] = "samplers.verifiers.episodes"
    env: vf.Env[Any]
    tasks: dict[str, vf.Task[Any, Any, Any]]
    serving: Serving
    function: Any = field(default=None)  # there is none

    async def play(self, episode: Episode, *, name: str = "episode of verifiers") -> Judged | Failure:
        """Run the task in the loop of users' coroutines; cancelled with this one."""
        return await asyncio.wrap_future(start_user_coroutine(self._played(episode), name=name))

    async def _played(self, episode: Episode) -> Judged | Failure:
        client = vf.EvalClientConfig(base_url=episode.base_url, api_key_var=KEY)
        try:
            await self.serving.wait()
            task = self.tasks[episode.prompt.fields["task"]]
            played = await self.env.run_episode(task, vf.ModelContext(model=episode.model, client=client))
        except BaseException as error:  # SystemExit too, which would end the run
            return self.failure("raised", f"raised {described(error)}", episode.prompt)
        if not played.ok:
            errors = [*played.errors, *(error for trace in played.traces for error in trace.errors)]
            said = f"{errors[0].type}: {errors[0].message}" if errors else "an agent did not end well"
            return self.failure("raised", f"failed: {said}", episode.prompt)
        judged = judged_of(played.traces)
        return judged or self.failure("no-number", "gave a reward that is not finite", episode.prompt)


def judged_of(traces: Sequence[vf.Trace[Any, Any, Any]]) -> Judged | None:
    """The sum of all weighted rewards of the agents that train the policy; its parts are each reward by name, and
    metrics, which count nothing. None if it is not finite."""
    rewards: dict[str, float] = {}
    metrics: dict[str, float] = {}
    for trace in traces:
        if trace.agent.trainable:
            for name, reward in trace.rewards.items():
                rewards[name] = rewards.get(name, 0.0) + (0.0 if reward is None else reward.value)
            metrics |= {name: value for name, value in trace.metrics.items() if value is not None}
    total = number(sum(rewards.values()))
    parts = {name: value for name, value in {**metrics, **rewards}.items() if number(value) is not None}
    return None if total is None else Judged(reward=total, parts=parts)


class VerifiersSampler(EpisodeSampler):
    """Each sample is an episode of an environment, which sends its agents' requests to the episode's URL."""

    def __init__(self, options: VerifiersConfig, context: SamplerContext) -> None:
        env = load(options)
        self._serving = Serving(env)
        function = Play(name=options.environment, env=env, tasks=tasks_of(env, options), serving=self._serving)
        super().__init__(options.episodes, context, function=function)

    def close(self) -> None:
        try:
            with contextlib.suppress(TimeoutError):  # it ends with this process then
                start_user_coroutine(self._serving.end()).result(CLOSING)
        finally:  # also if an environment's teardown raises
            super().close()
