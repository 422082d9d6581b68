"""An environment of verifiers from a config's options: its settings, its tasks, and rows for these."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import verifiers.v1 as vf
from pydantic import ValidationError
from verifiers.v1 import tasksets
from verifiers.v1.utils.loaders import default_harness_id, env_config_type

from corerl.messages import did_you_mean, one_line

if TYPE_CHECKING:
    from corerl_verifiers.spec import VerifiersConfig


def problems(options: VerifiersConfig) -> Iterator[tuple[str, str]]:
    """The settings of an environment that cannot be had, and why."""
    own = sorted(module.name for module in pkgutil.iter_modules(tasksets.__path__))
    if not options.environment:
        yield "environment", f"empty; name a taskset: an installed package, or one of verifiers' own, {', '.join(own)}"
        return
    try:
        env = load(options)
    except ValidationError as error:
        for each in error.errors():
            head, *path = map(str, each["loc"] or ("env",))
            setting = ".".join(["args", *path] if head == "taskset" else ["env", head, *path])
            yield setting, f"{each['msg']}, got {each['input']!r}"
    except ModuleNotFoundError as error:
        missing = str(error)
        setting = "harness" if missing.startswith("harness") else "environment"
        near = "" if setting == "harness" else did_you_mean(options.environment, own)
        yield setting, missing.splitlines()[0] + near
    except Exception as error:  # of the environment's own code
        yield "environment", f"{options.environment!r} cannot be loaded: {one_line(error)}"
    else:
        if not options.tasks and not env.taskset.bounded:
            yield "tasks", f"0: all, but {options.environment!r} has tasks without end; set how many"


def load(options: VerifiersConfig) -> vf.Env[Any]:
    """Raises what verifiers and the environment raise."""
    data: dict[str, Any] = {**options.env, "taskset": {**options.args, "id": options.environment}}
    without = default_harness_id(options.environment) == vf.HarnessConfig().id  # a harness of its own
    for role, field in env_config_type(options.environment, data.get("id", "")).model_fields.items():
        if isinstance(field.default, vf.AgentConfig):
            agent = {"runtime": {"type": "subprocess"}, **data.get(role, {})}
            if without and field.default.harness is None:
                agent.setdefault("harness", {"id": options.harness})
            data[role] = agent
    return vf.load_environment(vf.resolve_env_config(data))


def tasks_of(env: vf.Env[Any], options: VerifiersConfig) -> dict[str, vf.Task[Any, Any, Any]]:
    """By the hash of a task's data, in which the system message is."""
    found = env.taskset.take(options.tasks) if options.tasks else env.taskset
    if options.system is not None:
        found = (task.with_data(system_prompt=options.system or None) for task in found)
    return {task.hash: task for task in found}


def rows(options: VerifiersConfig) -> list[dict[str, Any]]:
    """A row for each task. The prompt is what the task is shown by; its harness decides what the policy is asked."""
    found = []
    for key, task in tasks_of(load(options), options).items():
        shown = task.data.prompt_text or task.data.name or f"{options.environment} {task.data.idx}"
        answer = getattr(task.data, "answer", None)
        found.append({"prompt": shown, "task": key} | ({"answer": answer} if isinstance(answer, str) else {}))
    return found
